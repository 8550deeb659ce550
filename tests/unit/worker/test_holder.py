"""The holder: one memory, one borrower, and identities that never name another memory."""

from __future__ import annotations

import json
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from deadlines import DEADLINE_S
from running_holder import RunningHolder

from quire.serving.addresses import AddressInUseError, is_answered
from quire.worker.holder import borrowing
from quire.worker.holder.borrowing import Borrowed, HolderError
from quire.worker.holder.holder import Holder, listen_at

SIZE = 8_192


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[RunningHolder]:
    with RunningHolder(tmp_path / "holder.sock") as running:
        yield running


def test_memory_outlives_its_borrower(holder: RunningHolder) -> None:
    first = Borrowed(holder.path, SIZE)
    assert first.buffer[:] == bytes(SIZE)
    first.buffer[:5] = b"quire"
    first.close()
    second = Borrowed(holder.path, SIZE)
    assert (second.memory_id, second.buffer[:5]) == (first.memory_id, b"quire")
    second.close()


def test_memory_is_lent_to_one_process_at_a_time(holder: RunningHolder) -> None:
    first = Borrowed(holder.path, SIZE)
    with pytest.raises(HolderError, match=f"lent to process {os.getpid()}, which is alive"):
        Borrowed(holder.path, SIZE)
    first.close()
    Borrowed(holder.path, SIZE).close()


def test_a_second_writer_is_refused_even_if_the_holder_lends_twice(
    holder: RunningHolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Borrowed(holder.path, SIZE)
    monkeypatch.setattr(Holder, "_hear_borrower", lambda holder: setattr(holder, "_borrower", None))
    with pytest.raises(HolderError, match="another process still uses the memory"):
        Borrowed(holder.path, SIZE)
    first.close()


def test_memory_of_another_size_and_memory_that_is_to_be_fresh_are_other_memories(holder: RunningHolder) -> None:
    first = Borrowed(holder.path, SIZE)
    first.buffer[0] = 7
    known = {first.memory_id}
    first.replace()
    assert (first.memory_id in known, first.buffer[0]) == (False, 0)
    known.add(first.memory_id)
    first.close()
    larger = Borrowed(holder.path, 2 * SIZE)
    assert (larger.memory_id in known, len(larger.buffer)) == (False, 2 * SIZE)
    larger.close()


def test_a_holder_that_was_started_again_has_another_memory(tmp_path: Path) -> None:
    found = []
    for _ in range(2):
        holder = RunningHolder(tmp_path / "holder.sock")
        borrowed = Borrowed(holder.path, SIZE)
        found.append(borrowed.memory_id)
        assert borrowed.buffer[0] == 0
        borrowed.buffer[0] = 1
        borrowed.close()
        holder.stop()
    assert found[0] != found[1]


def test_the_size_of_lent_memory_cannot_change(holder: RunningHolder) -> None:
    borrowed = Borrowed(holder.path, SIZE)
    with pytest.raises(PermissionError):
        os.ftruncate(borrowed._lock, SIZE // 2)
    borrowed.close()


def test_the_socket_is_for_its_owner_and_one_holder(holder: RunningHolder) -> None:
    assert stat.S_IMODE(holder.path.stat().st_mode) == 0o600
    with pytest.raises(AddressInUseError, match="another server is listening there"):
        listen_at(holder.path)
    assert is_answered(str(holder.path)), "though the probe is a socket of another type"
    assert holder.path.is_socket()


@pytest.mark.parametrize(
    "request_", [b"{}", b"[]", b"no json", b'{"bytes": -1, "fresh": false}', b'{"bytes": 1, "fresh": 1}']
)
def test_a_malformed_request_is_refused_and_the_next_answered(holder: RunningHolder, request_: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as caller:
        caller.settimeout(DEADLINE_S)
        caller.connect(str(holder.path))
        caller.send(request_)
        assert "refused" in json.loads(caller.recv(4_096))
    Borrowed(holder.path, SIZE).close()


def test_a_holder_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(borrowing, "START_TIMEOUT_S", 0.0)
    with pytest.raises(HolderError, match=r"nobody\.sock: No such file"):
        Borrowed(tmp_path / "nobody.sock", SIZE)
