"""Malformed messages against EngineService: each answer is a message or one of its reasons; no block stays held."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
from deadlines import DEADLINE_S
from integration.protocol_client import CHANNEL_OPTIONS, Pair, await_that
from robustness.fuzz.drive import LANES, Answer, judge
from robustness.fuzz.messages import Generator, Message
from robustness.fuzz.surface import GATEWAY, Method, methods

from quire.cli.launch import LocalServices
from quire.cli.service_process import ServiceProcess

ROOT = Path(__file__).parents[3]
PROGRAM = str(ROOT / "tests/integration/engine_gateway.py")
NUM_MESSAGES = 1_500


async def exchange(channel: Any, message: Message) -> Answer:
    """Sends a message and returns all that is answered. Raises Broken."""
    method = message.method
    try:
        if not method.server_streaming:
            data = await channel.unary_unary(method.path)(message.data, timeout=DEADLINE_S)
            return Answer((data,), grpc.StatusCode.OK)
        parts = [part async for part in channel.unary_stream(method.path)(message.data, timeout=DEADLINE_S)]
        return Answer(tuple(parts), grpc.StatusCode.OK)
    except grpc.aio.AioRpcError as error:
        return Answer.of(error)


async def drive(address: str) -> tuple[Counter[Method], Counter[Method]]:
    """Sends all messages, some at a time. Returns how many were accepted and refused, by method."""
    generator, numbers = Generator(1, GATEWAY), iter(range(NUM_MESSAGES))
    accepted: Counter[Method] = Counter()
    refused: Counter[Method] = Counter()

    async def lane(channel: Any) -> None:
        for number in numbers:
            message = generator.message(number)
            answer = await exchange(channel, message)
            judge(message.method, answer)
            (accepted if answer.code is grpc.StatusCode.OK else refused)[message.method] += 1

    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel, asyncio.TaskGroup() as lanes:
        for _ in range(LANES):
            lanes.create_task(lane(channel))
    return accepted, refused


def test_malformed_messages_break_nothing() -> None:
    with LocalServices.start(
        model=ROOT / "deploy/demo/model", num_blocks=16, extra_worker_args=("--threads", "1")
    ) as services:
        address, log = f"unix:{services.runtime_dir}/gateway.sock", services.runtime_dir / "gateway.log"
        flags = ("--cachemgr", services.cachemgr_address, "--listen", address, "--max-waiting", "1000")
        gateway = ServiceProcess("gateway", target=PROGRAM, arguments=flags, address=address, log_path=log)
        gateway.start()
        pair = Pair(services)
        try:
            gateway.wait_serving(DEADLINE_S)
            accepted, refused = asyncio.run(drive(address))
            await_that("no sequence is left", lambda: not pair.pool().block_counts.active_count)
            assert pair.violations() == []
            assert gateway.is_running
        finally:
            pair.close()
            gateway.terminate()
        lines = [line for line in log.read_text().splitlines() if "handler failed" in line or "Traceback" in line]
    assert lines == []
    assert set(accepted) == set(refused) == set(methods(GATEWAY))
