"""Blocks that a shared prompt saves, and blocks that releases free: read from the live services.

    quire bench utilization sharing

cachemgr and a worker with the demo's model, as `quire up` starts them. Sequences are planned step by step, run by the
worker, and their blocks are read from cachemgr: block tables by GetSequence, counts by GetStatistics.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from matplotlib import pyplot
from matplotlib.figure import Figure
from report import Findings, benchmark, plain, table
from rich.progress import Progress

from quire.cache.v1 import cache_service_pb2 as pb
from quire.cli.launch import LocalServices
from quire.client.cache_client import CacheClient
from quire.client.channel import open_channel
from quire.compute.v1 import worker_service_pb2, worker_service_pb2_grpc

MODEL = Path(__file__).parents[2] / "deploy" / "demo" / "model"
BLOCK_SIZE = 16
NUM_BLOCKS = 257
SYSTEM_TOKENS, NUM_REQUESTS = 200, 10
LENGTHS = (320, 48, 160, 96, 272)
MODEL_SHAPE = "32 layers x 32 heads x 128, fp16"
BYTES_PER_TOKEN = 2 * 32 * 32 * 128 * 2
"""Keys and values of that shape: 512 KiB."""
SETTLE_S = 0.002


@dataclass(frozen=True, slots=True)
class Shared:
    """Blocks that NUM_REQUESTS with the same prompt hold."""

    how: str
    num_blocks: int
    num_unshared: int
    """Entries of all their block tables: the blocks that they would hold without sharing."""

    @property
    def saved_bytes(self) -> int:
        return (self.num_unshared - self.num_blocks) * BLOCK_SIZE * BYTES_PER_TOKEN


@dataclass(frozen=True, slots=True)
class Divergence:
    """The effect of one request's own token."""

    num_copied: int
    num_untouched: int
    """Requests with unchanged block tables."""
    num_blocks: int


class Client:
    """One lease, as the writer of a scheduler would use it: plans steps, has them run, looks."""

    def __init__(self, cache: CacheClient, worker: worker_service_pb2_grpc.WorkerServiceAsyncStub) -> None:
        self._cache = cache
        self._worker = worker
        self._lease = pb.CreateLeaseResponse()
        self._tokens: dict[int, Sequence[int]] = {}

    async def open(self) -> None:
        self._lease = await self._cache.create_lease("", ttl_s=600.0)

    async def step(self, **items: Any) -> pb.PlanStepResponse:
        """Plans a step, has it run, and returns when cachemgr knows that it has. Raises RuntimeError if refused."""
        request = pb.PlanStepRequest(lease_id=self._lease.lease_id, epoch=self._lease.epoch, **items)
        plan = await self._cache.plan(request)
        if plan.refusals:
            raise RuntimeError(f"refused: {plan.refusals[0].error.message}")
        given = [plan.run_sequence_ids[index] for index in plan.given_run_indexes]
        inputs = [
            worker_service_pb2.SequenceInput(
                sequence_id=seq_id,
                token_ids=self._tokens[seq_id][plan.run_starts[index] :][: plan.run_token_counts[index]],
            )
            for index, seq_id in zip(plan.given_run_indexes, given, strict=True)
        ]
        skip = not plan.run_sequence_ids
        await self._worker.RunStep(worker_service_pb2.RunStepRequest(grant=plan.grant, inputs=inputs, skip=skip))
        while any(lease.step_in_flight_count for lease in await self._cache.list_leases()):
            await asyncio.sleep(SETTLE_S)
        return plan

    async def admit(self, *prompts: tuple[int, Sequence[int]]) -> None:
        self._tokens.update(prompts)
        admissions = [pb.Admission(sequence_id=seq_id, token_ids=tokens) for seq_id, tokens in prompts]
        await self.step(admissions=admissions)

    async def fork(self, parent_id: int, child_ids: Sequence[int], num_tokens: int) -> None:
        self._tokens |= dict.fromkeys(child_ids, self._tokens[parent_id])
        fork = pb.Fork(parent_sequence_id=parent_id, child_sequence_ids=child_ids, token_count=num_tokens)
        await self.step(forks=[fork])

    async def extend(self, seq_id: int) -> None:
        await self.step(extends=pb.Extends(sequence_ids=[seq_id], token_counts=[1]))

    async def release(self, *seq_ids: int) -> None:
        await self.step(release_sequence_ids=seq_ids)

    async def block_table(self, seq_id: int) -> list[int]:
        return list((await self._cache.get_sequence(self._lease.lease_id, seq_id)).block_ids)

    async def statistics(self) -> pb.PoolStatistics:
        (statistics,) = await self._cache.get_statistics()
        return statistics

    async def num_active(self) -> int:
        return (await self.statistics()).block_counts.active_count

    async def num_available(self) -> int:
        """Blocks that an admission could take at once."""
        counts = (await self.statistics()).block_counts
        return counts.free_count + counts.cached_count


@asynccontextmanager
async def live_client() -> AsyncIterator[Client]:
    """A client of two services that are started for it."""
    worker_args = ("--threads", "1", "--block-size", str(BLOCK_SIZE))
    async with LocalServices(model=MODEL, num_blocks=NUM_BLOCKS, extra_worker_args=worker_args) as services:
        cache = CacheClient(services.cachemgr_address)
        try:
            async with open_channel(services.worker_address) as channel:
                client = Client(cache, worker_service_pb2_grpc.WorkerServiceStub(channel))
                await client.open()
                yield client
        finally:
            await cache.close()


async def as_samples(client: Client) -> tuple[Shared, Divergence]:
    """Ten samples of one prompt; then one of them goes its own way."""
    first, *others = seq_ids = list(range(1, NUM_REQUESTS + 1))
    await client.admit((first, prompt(0, SYSTEM_TOKENS)))
    await client.fork(first, others, SYSTEM_TOKENS)
    before = [await client.block_table(seq_id) for seq_id in seq_ids]
    shared = Shared("samples of one prompt (fork)", await client.num_active(), sum(map(len, before)))
    copied = (await client.statistics()).copied_block_count
    await client.extend(others[0])
    after = [await client.block_table(seq_id) for seq_id in seq_ids]
    statistics = await client.statistics()
    divergence = Divergence(
        statistics.copied_block_count - copied,
        sum(map(list.__eq__, before, after)),
        statistics.block_counts.active_count,
    )
    await client.release(*seq_ids)
    return shared, divergence


async def as_requests(client: Client) -> Shared:
    """Ten requests that know nothing of one another, each with a token of its own behind the same system prompt."""
    seq_ids = list(range(101, 101 + NUM_REQUESTS))
    for seq_id in seq_ids:
        await client.admit((seq_id, [*prompt(1, SYSTEM_TOKENS), seq_id]))
    tables = [await client.block_table(seq_id) for seq_id in seq_ids]
    shared = Shared("ten requests, one by one (prefix cache)", await client.num_active(), sum(map(len, tables)))
    await client.release(*seq_ids)
    return shared


async def lengths_and_freeing(client: Client) -> tuple[list[int], int]:
    """Blocks of LENGTHS, and how many more can be taken at once when the second is released."""
    prompts = [(201 + index, prompt(2 + index, length)) for index, length in enumerate(LENGTHS)]
    await client.admit(*prompts)
    held = [len(await client.block_table(seq_id)) for seq_id, _ in prompts]
    before = await client.num_available()
    await client.release(prompts[1][0])
    freed = await client.num_available() - before
    await client.release(*(seq_id for seq_id, _ in prompts if seq_id != prompts[1][0]))
    return held, freed


def prompt(number: int, length: int) -> list[int]:
    """Tokens that no prompt of another number begins with."""
    return [(3 + 7 * number + position) % 2000 for position in range(length)]


async def run() -> tuple[list[Shared], Divergence, list[int], int]:
    async with live_client() as client:
        samples, divergence = await as_samples(client)
        requests = await as_requests(client)
        held, freed = await lengths_and_freeing(client)
        return [samples, requests], divergence, held, freed


def measure(quick: bool, progress: Progress) -> Findings:
    """Has one size, quick or not: it takes seconds, most of them to start the services."""
    progress.add_task("asking the services", total=None)
    shared, divergence, held, freed = asyncio.run(run())
    first = table(
        f"{NUM_REQUESTS} requests with a {SYSTEM_TOKENS}-token system prompt, blocks of {BLOCK_SIZE}",
        *("", "blocks held", "without sharing", f"saved at {MODEL_SHAPE}"),
    )
    for row in shared:
        first.add_row(row.how, str(row.num_blocks), str(row.num_unshared), f"{row.saved_bytes / 2**20:.0f} MiB")
    second = table("one of the samples generates a token of its own", "", "blocks")
    second.add_row("copied", str(divergence.num_copied))
    second.add_row("held by all ten now", str(divergence.num_blocks))
    second.add_row("samples with unchanged block tables", str(divergence.num_untouched))
    third = table("blocks by length", "tokens", *map(str, LENGTHS), "back at once when the second is released")
    third.add_row("blocks", *map(str, held), str(freed))
    figures = {
        "shared": [asdict(row) | {"saved_bytes": row.saved_bytes} for row in shared],
        "divergence": asdict(divergence),
        "lengths": LENGTHS,
        "blocks_by_length": held,
        "blocks_back_at_once": freed,
    }
    block_mib = BLOCK_SIZE * BYTES_PER_TOKEN / 2**20
    note = f"Saved memory is blocks times {block_mib:.0f} MiB, what a block takes at that shape."
    return Findings([first, second, third], figures, lambda: plot(shared), [note])


def plot(shared: Sequence[Shared]) -> Figure:
    """Blocks held beside blocks without sharing."""
    figure, axes = pyplot.subplots(figsize=(7.5, 2.4))
    for place, row in enumerate(shared):
        axes.barh(place, row.num_unshared, 0.6, color="0.85", label="without sharing" if not place else None)
        held = axes.barh(place, row.num_blocks, 0.6, color="tab:blue", label="held" if not place else None)
        axes.bar_label(held, fmt="%d", padding=3, fontsize=9)
    axes.set_yticks(range(len(shared)), [row.how for row in shared], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("blocks")
    axes.set_title(f"{NUM_REQUESTS} requests with the same {SYSTEM_TOKENS}-token system prompt", fontsize=10)
    axes.legend(fontsize=8)
    plain(axes)
    return figure


main = benchmark("utilization sharing", measure, packages=("grpcio", "torch", "transformers"))

if __name__ == "__main__":
    main()
