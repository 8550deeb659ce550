"""One cachemgr and two workers of the demo's model in float32, each with a pool of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from deadlines import DEADLINE_S
from grpc import insecure_channel

from quire.cache.v1 import cache_service_pb2, cache_service_pb2_grpc
from quire.cli.launch import LocalServices
from quire.cli.service_process import ServiceProcess

MODEL = Path(__file__).parents[2] / "deploy" / "demo" / "model"
POOLS = ("one", "two")
NUM_BLOCKS = 256
WORKER_ARGS = ("--dtype", "float32", "--device", "cpu", "--threads", "1")


@dataclass
class Fleet:
    """The processes; workers by pool."""

    services: LocalServices
    workers: dict[str, ServiceProcess]
    token: str | None = None  # an operator's, if cachemgr asks for one

    @property
    def address(self) -> str:
        return self.services.cachemgr_address

    @property
    def _metadata(self) -> list[tuple[str, str]]:
        return [] if self.token is None else [("authorization", f"Bearer {self.token}")]

    def pools(self) -> dict[str, cache_service_pb2.Pool]:
        with insecure_channel(self.address, options=[("grpc.enable_http_proxy", 0)]) as channel:
            stub = cache_service_pb2_grpc.CacheServiceStub(channel)
            asked, metadata = cache_service_pb2.ListPoolsRequest(), self._metadata
            answer = stub.ListPools(asked, timeout=DEADLINE_S, wait_for_ready=True, metadata=metadata)
            return {pool.name: pool for pool in answer.pools}

    def is_whole(self) -> bool:
        """Return whether all pools are attached and no lease holds blocks."""
        pools = self.pools()
        return len(pools) == len(POOLS) and all(
            pool.attached
            and not pool.lease_count
            and pool.block_counts.free_count + pool.block_counts.cached_count == NUM_BLOCKS - 1
            for pool in pools.values()
        )

    def violations(self) -> list[str]:
        with insecure_channel(self.address, options=[("grpc.enable_http_proxy", 0)]) as channel:
            stub = cache_service_pb2_grpc.CacheServiceStub(channel)
            asked = (cache_service_pb2.AuditPoolRequest(pool=pool) for pool in POOLS)
            audits = [stub.AuditPool(ask, timeout=DEADLINE_S, metadata=self._metadata) for ask in asked]
            return [each for audit in audits for each in audit.violations]

    def heal(self) -> None:
        """Start what does not run, and wait until all serve."""
        processes = [self.services.cachemgr, *self.workers.values()]
        stopped = [process for process in processes if not process.is_running]
        for process in stopped:
            process.start()
        for process in stopped:
            process.wait_serving(DEADLINE_S)


@contextlib.contextmanager
def started(
    *, cachemgr_args: Sequence[str] = (), worker_args: Sequence[str] = (), token: str | None = None
) -> Iterator[Fleet]:
    """Start a fleet; it ends with the block. token is an operator's, if the arguments let cachemgr ask for one."""
    first = (*WORKER_ARGS, *worker_args, "--pool", POOLS[0])
    with (
        LocalServices.start(
            model=MODEL, num_blocks=NUM_BLOCKS, extra_cachemgr_args=cachemgr_args, extra_worker_args=first
        ) as services,
        contextlib.ExitStack() as stack,
    ):
        address = f"unix:{services.runtime_dir}/{POOLS[1]}.sock"
        flags = (
            *("--listen", address, "--cachemgr", services.cachemgr_address, "--pool", POOLS[1]),
            *("--model", str(MODEL), "--num-blocks", str(NUM_BLOCKS), *WORKER_ARGS, *worker_args),
        )
        log_path = services.runtime_dir / f"{POOLS[1]}.log"
        second = ServiceProcess(POOLS[1], target="quire.worker", arguments=flags, address=address, log_path=log_path)
        stack.callback(second.terminate)
        second.start()
        second.wait_serving(DEADLINE_S)
        yield Fleet(services, {POOLS[0]: services.worker, POOLS[1]: second}, token)
