"""Addresses: accepted and refused ones, and the socket files that may be removed."""

import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.serving.addresses import (
    AddressError,
    AddressInUseError,
    TcpAddress,
    UnixAddress,
    claimed_socket,
    explain_bind_failure,
    parse_dial_address,
    parse_listen_address,
    remove_stale_socket,
)
from quire.serving.runtime_folder import MAX_SOCKET_PATH_BYTES


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short enough for a socket's path, which pytest's own is not everywhere."""
    with tempfile.TemporaryDirectory(prefix="q-") as name:
        yield Path(name)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("unix:/run/quire/cachemgr.sock", UnixAddress("/run/quire/cachemgr.sock")),
        ("unix:///run/quire/cachemgr.sock", UnixAddress("/run/quire/cachemgr.sock")),
        ("127.0.0.1:7070", TcpAddress("127.0.0.1", 7070)),
        ("worker-0.quire.svc:65535", TcpAddress("worker-0.quire.svc", 65535)),
        ("[::1]:7070", TcpAddress("::1", 7070)),
        ("0.0.0.0:1", TcpAddress("0.0.0.0", 1)),
    ],
)
def test_reads(text: str, address: TcpAddress | UnixAddress) -> None:
    assert parse_listen_address(text) == address
    assert parse_dial_address(text) == address
    assert parse_listen_address(str(address)) == address


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "host:port"),
        ("unix:", "absolute"),
        ("unix:run/a.sock", "absolute"),
        ("unix:/run/", "not the path"),
        ("unix:/run/a\0b", "not the path"),
        ("7070", "host:port"),
        (":7070", "host:port"),
        ("localhost", "host:port"),
        ("localhost:", "port must be"),
        ("localhost:http", "port must be"),
        ("localhost:-1", "port must be"),
        ("localhost:65536", "port must be"),
        ("localhost:٣", "port must be"),
        ("::1:7070", "brackets"),
        ("http://localhost:7070", "host:port"),
        ("a b:1", "host:port"),
        ("/run/quire.sock", "host:port"),
    ],
)
def test_refuses(text: str, says: str) -> None:
    with pytest.raises(AddressError, match=says):
        parse_listen_address(text)


def test_port_0_is_for_listening_only() -> None:
    assert parse_listen_address("127.0.0.1:0") == TcpAddress("127.0.0.1", 0)
    with pytest.raises(AddressError, match="from 1 to 65535"):
        parse_dial_address("127.0.0.1:0")


def test_the_length_limit_counts_bytes_and_is_the_systems(folder: Path) -> None:
    longest = f"{folder}/" + "a" * (MAX_SOCKET_PATH_BYTES - len(str(folder)) - 1)
    assert parse_listen_address(f"unix:{longest}") == UnixAddress(longest)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(longest)
    with pytest.raises(AddressError, match=f"has {MAX_SOCKET_PATH_BYTES + 1} bytes"):
        parse_listen_address(f"unix:{longest[:-1]}é")


def test_a_socket_nobody_answers_on_is_removed(folder: Path) -> None:
    path = folder / "a.sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
    assert path.exists()
    remove_stale_socket(str(path))
    assert not path.exists()
    remove_stale_socket(str(path))


def test_a_socket_somebody_answers_on_stays(folder: Path) -> None:
    path = folder / "a.sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        with pytest.raises(AddressInUseError, match="another server"):
            remove_stale_socket(str(path))
    assert path.exists()


def test_a_server_too_busy_to_accept_is_alive(folder: Path) -> None:
    path = folder / "a.sock"
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as waiting:
        server.bind(str(path))
        server.listen(0)
        waiting.connect(str(path))
        with pytest.raises(AddressInUseError):
            remove_stale_socket(str(path))


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_what_is_no_socket_stays(folder: Path, kind: str) -> None:
    path = folder / "precious"
    {"file": path.touch, "folder": path.mkdir, "link": lambda: path.symlink_to(folder / "elsewhere")}[kind]()
    with pytest.raises(AddressInUseError, match="no socket"):
        remove_stale_socket(str(path))
    assert os.path.lexists(path)


def test_a_missing_folder_is_named(folder: Path) -> None:
    with pytest.raises(AddressError, match="nowhere"), claimed_socket(f"{folder}/nowhere/a.sock"):
        pass


def test_a_claim_leaves_nothing_behind_and_can_be_repeated(folder: Path) -> None:
    for _ in range(2):
        with claimed_socket(f"{folder}/a.sock"):
            pass
    assert not list(folder.iterdir())


def test_a_failed_bind_is_explained() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert "in use" in explain_bind_failure(TcpAddress("127.0.0.1", taken.getsockname()[1]))
    assert explain_bind_failure(TcpAddress("127.0.0.1", 0)) == ""
    assert explain_bind_failure(TcpAddress("192.0.2.1", 7070))
    assert "no such host" in explain_bind_failure(TcpAddress("a..b", 7070))
