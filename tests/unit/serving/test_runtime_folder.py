"""The default folder of sockets: one rule for services and clients."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.serving import runtime_folder
from quire.serving.runtime_folder import RuntimeFolderError, default_cachemgr, default_listen, make_serving_folder


class Folders:
    """The three folders that are possible, none of which exists yet."""

    def __init__(self, parent: Path) -> None:
        self.login, self.run, self.temporary = parent / "login", parent / "run", parent / "tmp"
        for folder in (self.login, self.run, self.temporary):
            folder.mkdir(mode=0o700)
        self.all = self.login / "quire", self.run / "quire", self.temporary / f"quire-{os.getuid()}"
        self._sockets: list[socket.socket] = []

    def serve(self, folder: Path) -> str:
        """Bind a cachemgr's socket there; returns its address."""
        folder.mkdir(exist_ok=True)
        path = folder / "cachemgr.sock"
        self._sockets.append(socket.socket(socket.AF_UNIX))
        self._sockets[-1].bind(str(path))
        return f"unix:{path}"

    def close(self) -> None:
        for each in self._sockets:
            each.close()


@pytest.fixture
def folders(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Folders]:
    made = Folders(short_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(made.login))
    monkeypatch.setattr(runtime_folder, "SYSTEM_FOLDER", made.run / "quire")
    monkeypatch.setattr(runtime_folder.tempfile, "gettempdir", lambda: str(made.temporary))
    yield made
    made.close()


@pytest.fixture
def short_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="q-", dir="/tmp") as name:
        yield Path(name)


def give_away(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the folder another user's; only its owner is looked at."""
    real = Path.stat

    def owned_by_another(path: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        found = real(path, follow_symlinks=follow_symlinks)
        if path != folder:
            return found
        return os.stat_result((*found[:4], os.getuid() + 1, *found[5:10]))

    monkeypatch.setattr(Path, "stat", owned_by_another)


def test_services_serve_in_the_logins_folder(folders: Folders) -> None:
    made = make_serving_folder()
    assert made == folders.all[0]
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    assert default_listen("worker") == f"unix:{made}/worker.sock"
    assert default_cachemgr() == default_listen("cachemgr")


def test_without_a_login_in_the_systems_folder_if_it_can_be_made(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert make_serving_folder() == folders.all[1]


@pytest.mark.parametrize("login", ["", "relative", "/nowhere/at/all", "LINK", "OPEN"])
def test_a_login_folder_that_can_not_be_used_is_passed_over(
    login: str, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = folders.login.with_name("link")
    link.symlink_to(folders.login)
    opened = folders.login.with_name("open")
    opened.mkdir()
    opened.chmod(0o777)
    monkeypatch.setenv("XDG_RUNTIME_DIR", {"LINK": str(link), "OPEN": str(opened)}.get(login, login))
    assert make_serving_folder() == folders.all[1]


def test_the_systems_folder_of_another_user_is_not_served_in_and_looked_into(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it is with the systemd unit's."""
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    address = folders.serve(folders.all[1])
    give_away(folders.all[1], monkeypatch)
    assert make_serving_folder() == folders.all[2]
    assert default_cachemgr() == address


@pytest.mark.parametrize("index", [0, 1, 2])
def test_clients_find_the_only_cachemgr(index: int, folders: Folders) -> None:
    address = folders.serve(folders.all[index])
    assert default_cachemgr() == address


def test_of_several_the_logins_own_comes_first(folders: Folders) -> None:
    addresses = [folders.serve(folder) for folder in folders.all]
    assert default_cachemgr() == addresses[0]


def test_a_temporary_folder_of_another_user_is_neither_served_in_nor_looked_into(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    folders.run.rmdir()
    address = folders.serve(folders.all[2])
    assert default_cachemgr() == address
    give_away(folders.all[2], monkeypatch)
    with pytest.raises(RuntimeFolderError, match=f"{folders.all[2]} is no folder of this user"):
        make_serving_folder()
    assert default_cachemgr() == f"unix:{folders.all[1]}/cachemgr.sock"


def test_a_client_does_not_wait_in_a_folder_that_anybody_could_make(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    folders.run.rmdir()
    assert default_cachemgr() == f"unix:{folders.all[1]}/cachemgr.sock"
    make_serving_folder()
    assert default_cachemgr() == default_listen("cachemgr") == f"unix:{folders.all[2]}/cachemgr.sock"


def test_a_file_in_place_of_a_socket_is_no_cachemgr(folders: Folders) -> None:
    folders.all[0].mkdir()
    (folders.all[0] / "cachemgr.sock").write_text("")
    address = folders.serve(folders.all[1])
    assert default_cachemgr() == address
