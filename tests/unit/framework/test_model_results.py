"""The protocol's model is searched again if a search could find something else than RESULTS.md has."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from robustness.model import check


def change_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "worker.pml"
    path.write_text(path.read_text().replace("skip", "true", 1))


def change_sizes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, *others = check.CONFIGURATIONS
    monkeypatch.setattr(check, "CONFIGURATIONS", (replace(first, sizes="LEASES=1"), *others))


def leave_out_fault(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "FAULTS", check.FAULTS[1:])


def change_spin(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "run", lambda command, folder: "Spin Version 7")


@pytest.mark.parametrize("change", [change_file, change_sizes, leave_out_fault, change_spin])
def test_whatever_changes_a_result_changes_the_digest(
    change: Callable[[Path, pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(check.FOLDER, tmp_path / "model")
    monkeypatch.setattr(check, "FOLDER", folder)
    monkeypatch.setattr(check, "run", lambda command, folder: "Spin Version 6")
    before = check.digest()
    assert check.digest() == before
    change(folder, monkeypatch)
    assert check.digest() != before
