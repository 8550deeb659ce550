"""A check is left out only if it passed on the same files."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import unchanged


def test_the_key_follows_names_modes_and_contents(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    for name in ("core.rs", "docs/page.md", "tests/check.py", "tests/other.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    names = unchanged.files_of(tmp_path, ["tests/"], ["tests/check.py"])
    assert names == ["core.rs", "docs/page.md", "tests/check.py"]
    keys = {unchanged.digest(tmp_path, names), unchanged.digest(tmp_path, names, "3.11")}
    (tmp_path / "core.rs").chmod(0o755)
    keys.add(unchanged.digest(tmp_path, names))
    (tmp_path / "core.rs").write_text("changed")
    keys.add(unchanged.digest(tmp_path, names))
    assert len(keys) == 4


def test_only_a_pass_is_kept_and_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("QUIRE_RUN_ALL", raising=False)
    kept = tmp_path / "cache" / "check"
    assert unchanged.run_unless_passed(kept, ["sh", "-c", "echo 1 passed; exit 1"]) == 1
    assert unchanged.run_unless_passed(kept, ["true"]) == 0  # it was skipped: a check that runs says what passed
    assert not kept.exists()
    assert unchanged.run_unless_passed(kept, ["echo", "3 passed"]) == 0
    capsys.readouterr()
    assert unchanged.run_unless_passed(kept, ["false"]) == 0
    said = capsys.readouterr().out
    assert "NOT RUN" in said
    assert "3 passed" in said
    monkeypatch.setenv("QUIRE_RUN_ALL", "1")
    assert unchanged.run_unless_passed(kept, ["false"]) == 1
    monkeypatch.delenv("QUIRE_RUN_ALL")
    os.utime(kept, (0, 0))
    assert unchanged.run_unless_passed(kept, ["false"]) == 1
