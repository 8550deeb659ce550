"""A model's folder or hub id: a missing part is reported at once."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from deadlines import DEADLINE_S

from quire.worker.model.model_source import HUB_TIMEOUT_S, ModelNotFound, find_folder

CHECK_HUB = "import sys; from quire.worker.model.model_source import check_hub; check_hub(sys.argv[1])"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with two models and an empty folder."""
    for name in ("model", "models/small"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("source", ["model", "./model", "models/small", "models/../model", "model/"])
def test_folders(here: Path, source: str) -> None:
    found = find_folder(source)
    assert found is not None
    assert (here / found).samefile(here / source)


@pytest.mark.parametrize("source", ["gpt2", "Qwen/Qwen3-0.6B", "openai-community/gpt2", "a_b/c.d-e"])
def test_hub_ids(source: str) -> None:
    assert find_folder(source) is None


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("./modle", "there is no such folder in HERE"),
        ("../modle", "there is no such folder in HERE/.."),
        ("models/smal", "there is no such folder in HERE/models"),
        ("models/small/deeper", "there is no such folder in HERE/models/small"),
        ("a/b/c", "there is no such folder in HERE"),
        ("/nowhere/at/all", "there is no such folder in /"),
        ("~/nowhere", "there is no such folder in HERE"),
        ("with space", "there is no such folder in HERE"),
        ("file", "it is a file"),
        ("empty", "the folder has no config.json"),
    ],
)
def test_what_can_be_no_hub_id_is_said_without_a_network(here: Path, source: str, reason: str) -> None:
    with pytest.raises(ModelNotFound) as caught:
        find_folder(source)
    assert repr(source) in str(caught.value)
    assert reason.replace("HERE", str(here)) in str(caught.value)


def ask(hub_id: str, **environment: str) -> str:
    """Ask for a model in a process of its own, because the library reads its settings when it is imported."""
    done = subprocess.run(
        [sys.executable, "-c", CHECK_HUB, hub_id],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "0", "HF_HOME": str(Path.cwd()), **environment},
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    return done.stderr.strip().splitlines()[-1]


def test_a_hub_that_does_not_answer_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=8) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        said = ask("owner/name", HF_ENDPOINT=endpoint)
    assert HUB_TIMEOUT_S < 10
    assert re.search(f"no model at 'owner/name': there is no such folder, and {endpoint} .*(within|timed out)", said)


def test_a_hub_that_refuses_the_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        endpoint = f"http://127.0.0.1:{probe.getsockname()[1]}"
    assert f"{endpoint} can't be asked: " in ask("owner/name", HF_ENDPOINT=endpoint)


def test_without_a_network_by_choice() -> None:
    assert "HF_HUB_OFFLINE is set" in ask("owner/name", HF_HUB_OFFLINE="1")


def test_what_is_no_hub_id_either() -> None:
    assert "neither a folder nor an id of the hub" in ask("name--with-two")
