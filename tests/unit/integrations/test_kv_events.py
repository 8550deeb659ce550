"""The batches of `quire events`: vLLM's format, and which of them can be had again."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from array import array
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq.asyncio
from deadlines import DEADLINE_S

from quire.cache.v1 import cache_service_pb2 as pb
from quire.integrations.kv_events.copies import CopiesRemoved, CopiesStored, CopyChange
from quire.integrations.kv_events.encoding import encode_batch, namespace_of, parts_of
from quire.integrations.kv_events.publisher import MAX_KEPT_BATCHES, PoolPublisher, ReplayBuffer
from quire.integrations.kv_events.replica import ROOT, AllCleared, BlocksRemoved, BlocksStored, CachedBlock, Change
from quire.serving.addresses import TcpAddress

ONE, TWO = bytes(range(32)), bytes([255] * 32)
ONE_64, TWO_64 = 0x0001020304050607, 2**64 - 1
BLOCKS = (CachedBlock(ONE, array("i", [5, 6])), CachedBlock(TWO, array("i", [7, 8])))


def decoded(*changes: Change | CopyChange) -> Any:
    return msgspec.msgpack.decode(encode_batch(changes, now=12.5))


def test_a_batch_has_the_time_the_events_and_the_rank() -> None:
    stored = ["BlockStored", [ONE_64, TWO_64], None, [5, 6, 7, 8], 2, None, "GPU", None, None]
    removed = ["BlockRemoved", [TWO_64, ONE_64], "GPU"]
    changes = (AllCleared(), BlocksStored(ROOT, BLOCKS, "", b""), BlocksRemoved((TWO, ONE)))
    assert decoded(*changes) == [12.5, [["AllBlocksCleared"], stored, removed], 0]


def test_a_copy_has_its_hash_and_its_medium_alone() -> None:
    changes = (CopiesStored(pb.MEDIUM_HOST, (ONE, TWO)), CopiesRemoved(pb.MEDIUM_DISK, (TWO,)))
    stored = ["BlockStored", [ONE_64, TWO_64], None, [], 0, None, "CPU", None, None]
    assert decoded(*changes)[1] == [stored, ["BlockRemoved", [TWO_64], "STORAGE"]]


def test_a_chain_names_its_parent_and_its_namespace() -> None:
    ((_, hashes, parent, *_, keys),) = decoded(BlocksStored(TWO, BLOCKS, "alice", b"blue"))[1]
    assert (hashes, parent, keys) == ([ONE_64, TWO_64], TWO_64, [["dynamo-cache-salt:alice:blue"], None])


@pytest.mark.parametrize(
    ("tenant", "salt", "namespace"),
    [
        ("", b"", ""),
        ("", b"blue", "blue"),
        ("alice", b"", "alice:"),
        ("alice", b"b", "alice:b"),
        ("", b"\xff", "hex:ff"),
    ],
)
def test_a_namespace_is_of_tenant_and_salt(tenant: str, salt: bytes, namespace: str) -> None:
    assert namespace_of(tenant, salt) == namespace


def test_many_changes_are_divided_and_stay_in_order() -> None:
    stored = BlocksStored(ROOT, BLOCKS, "", b"")
    changes = [AllCleared(), stored, stored, stored]
    assert list(parts_of(changes, max_blocks=3)) == [[AllCleared(), stored, stored], [stored]]
    assert list(parts_of(changes, max_blocks=4096)) == [changes]
    assert list(parts_of([AllCleared()], max_blocks=1)) == [[AllCleared()]]
    copies = CopiesStored(pb.MEDIUM_HOST, (ONE, TWO))
    assert list(parts_of([copies, copies, stored], max_blocks=3)) == [[copies, copies], [stored]]


def test_batches_are_had_again_from_a_number_on() -> None:
    buffer = ReplayBuffer()
    for number in range(5, 9):
        buffer.append(number, b"batch", clears=number == 5)
    assert [sequence for sequence, _ in buffer.since(7) or ()] == [7, 8]
    assert [sequence for sequence, _ in buffer.since(0) or ()] == [5, 6, 7, 8], "it begins with everything"
    assert buffer.since(9) == []


@pytest.mark.parametrize("limit", [{"max_batches": 3}, {"max_bytes": 15}])
def test_what_is_not_kept_is_missed(limit: dict[str, int]) -> None:
    buffer = ReplayBuffer(**limit)
    for number in range(5, 9):
        buffer.append(number, b"batch", clears=number == 5)
    assert (buffer.since(0), buffer.since(5), buffer.size) == (None, None, (3, 15))
    assert [sequence for sequence, _ in buffer.since(6) or ()] == [6, 7, 8]


def test_a_batch_that_clears_all_is_the_first_that_is_kept() -> None:
    buffer = ReplayBuffer(max_batches=3)
    for number in range(9):
        buffer.append(number, b"batch", clears=number == 7)
    assert [sequence for sequence, _ in buffer.since(2) or ()] == [7, 8]


def test_a_batch_larger_than_what_is_kept_is_not_kept() -> None:
    buffer = ReplayBuffer(max_bytes=3)
    buffer.append(1, b"batch", clears=True)
    assert (buffer.since(1), buffer.size) == (None, (0, 0))


def test_all_is_published_again_for_a_consumer_whose_batches_are_gone() -> None:
    chain = BlocksStored(ROOT, BLOCKS, "", b"")
    here = [TcpAddress("127.0.0.1", 0)]

    async def ask(context: zmq.asyncio.Context, publisher: PoolPublisher) -> tuple[list[bytes], list[Any]]:
        subscriber, dealer = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        subscriber.setsockopt(zmq.SUBSCRIBE, b"")
        subscriber.connect(f"tcp://{publisher.addresses[0]}")
        first = msgspec.msgpack.decode((await subscriber.recv_multipart())[2])[1]
        assert [event[0] for event in first] == ["AllBlocksCleared", "BlockStored"], "it has subscribed"
        for _ in range(MAX_KEPT_BATCHES + 1):
            publisher.publish([BlocksRemoved((ONE,))])
            await subscriber.recv_multipart()
        dealer.connect(f"tcp://{publisher.replay_addresses[0]}")
        await dealer.send_multipart([b"", (0).to_bytes(8, "big")])
        last = await dealer.recv_multipart()
        return last, msgspec.msgpack.decode((await subscriber.recv_multipart())[2])[1]

    async def main() -> tuple[list[bytes], list[Any]]:
        context = zmq.asyncio.Context()
        publisher = PoolPublisher(context, here, replay_addresses=here, everything=lambda: iter([chain]))
        serving = asyncio.create_task(publisher.serve())
        try:
            async with asyncio.timeout(DEADLINE_S):
                return await ask(context, publisher)
        finally:
            serving.cancel()
            await asyncio.wait([serving])
            context.destroy(linger=0)

    last, events = asyncio.run(main())
    assert last == [b"", b"\xff" * 8, b""]
    assert [event[0] for event in events] == ["AllBlocksCleared", "BlockStored"]


def test_the_benchmark_publishes_all_blocks(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "quire.cli", "bench", "control-plane", "kv-events", "--blocks", "2000"]
    command += ["--output", str(tmp_path)]
    subprocess.run(command, capture_output=True, timeout=DEADLINE_S, check=True)
    assert json.loads((tmp_path / "kv_events.json").read_text())["published_blocks"] == 2000
