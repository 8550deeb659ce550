"""A worker's messages to cachemgr: in order while the stream is open, and no call waits after its end."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from quire.cache.v1 import attach_pb2
from quire.worker.service.attachment import Outbox, writing


class Call:
    """As much of a gRPC call as is written to; it has ended after `num_writes`."""

    def __init__(self, num_writes: int) -> None:
        self.written: list[str] = []
        self._num_writes = num_writes

    async def write(self, message: attach_pb2.AttachPoolRequest) -> None:
        if len(self.written) == self._num_writes:
            raise asyncio.InvalidStateError("RPC already finished.")
        self.written.append(message.lease_opened.lease_id)


def opened(lease_id: str) -> attach_pb2.AttachPoolRequest:
    return attach_pb2.AttachPoolRequest(lease_opened=attach_pb2.LeaseOpened(lease_id=lease_id))


@pytest.mark.parametrize(("num_writes", "written"), [(9, ["a", "b", "c"]), (1, ["a"])], ids=["alive", "ended"])
def test_messages_are_written_in_order_and_nobody_waits_afterwards(num_writes: int, written: list[str]) -> None:
    async def run() -> list[str]:
        outbox: Outbox = asyncio.Queue()
        call: Any = Call(num_writes)
        outbox.put_nowait(opened("a"))
        async with writing(outbox, call):
            outbox.put_nowait(opened("b"))
            outbox.put_nowait(opened("c"))
            while not outbox.empty() and len(call.written) < num_writes:
                await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return call.written

    assert asyncio.run(run()) == written


def test_nobody_waits_after_a_stream_that_was_broken() -> None:
    async def run() -> None:
        outbox: Outbox = asyncio.Queue()
        call: Any = Call(9)
        with pytest.raises(grpc.aio.UsageError):
            async with writing(outbox, call):
                raise grpc.aio.UsageError
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())
