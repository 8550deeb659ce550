"""A worker under a cachemgr that hands out a block twice: with QUIRE_VERIFY=1 it stops rather than run such a step."""

from __future__ import annotations

import hmac
import queue
from collections.abc import Iterator
from concurrent import futures
from hashlib import sha256
from pathlib import Path
from typing import Any

import grpc
import pytest
from deadlines import DEADLINE_S
from integration.protocol_client import WORKER_ARGS, RefusedError, ask

from quire.cache.v1 import attach_pb2, cache_service_pb2_grpc, grant_pb2
from quire.cli.service_process import ServiceProcess
from quire.compute.v1 import worker_service_pb2, worker_service_pb2_grpc

KEY = b"k" * 32
LEASES = ("lease-of-alice", "lease-of-bob")


class LyingCachemgr(cache_service_pb2_grpc.CacheServiceServicer):
    """Opens two leases and keeps no books: its key is known, so a test signs any grant."""

    def __init__(self) -> None:
        self.epoch = 0
        self.reports: queue.SimpleQueue[attach_pb2.StepReport] = queue.SimpleQueue()

    def AttachPool(self, request_iterator: Any, context: Any) -> Iterator[attach_pb2.AttachPoolResponse]:  # noqa: N802
        for request in request_iterator:
            if request.HasField("register_pool"):
                self.epoch = request.register_pool.epoch
                attached = attach_pb2.Attached(term=1, signing_key=KEY, open_lease_ids=LEASES)
                yield attach_pb2.AttachPoolResponse(attached=attached)
            elif request.HasField("step_report"):
                self.reports.put(request.step_report)


@pytest.fixture
def cachemgr(tmp_path: Path) -> Iterator[LyingCachemgr]:
    cachemgr = LyingCachemgr()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    cache_service_pb2_grpc.add_CacheServiceServicer_to_server(cachemgr, server)
    server.add_insecure_port(f"unix:{tmp_path}/c.sock")
    server.start()
    yield cachemgr
    server.stop(None).wait()


@pytest.fixture
def worker(cachemgr: LyingCachemgr, model_dir: Path, tmp_path: Path) -> Iterator[ServiceProcess]:
    address = f"unix:{tmp_path}/w.sock"
    arguments = ("--listen", address, "--cachemgr", f"unix:{tmp_path}/c.sock", "--model", str(model_dir))
    worker = ServiceProcess(
        "worker",
        target="quire.worker",
        arguments=(*arguments, "--num-blocks", "8", *WORKER_ARGS),
        address=address,
        log_path=tmp_path / "worker.log",
    )
    worker.start()
    try:
        worker.wait_serving(DEADLINE_S)
        yield worker
    finally:
        worker.terminate()


def run_step(
    worker: ServiceProcess, epoch: int, lease_id: str, number: int, *, tokens: list[int], start: int, blocks: list[int]
) -> worker_service_pb2.RunStepResponse:
    """Sequence 1 of the lease is given these blocks, from the first on, and runs these tokens. Raises RefusedError."""
    grant = grant_pb2.StepGrant(
        pool="default",
        epoch=epoch,
        term=1,
        lease_id=lease_id,
        step_number=number,
        known_step_number=number - 1,
        write_sequence_ids=[1] if blocks else [],
        write_first_indexes=[0] if blocks else [],
        write_block_counts=[len(blocks)] if blocks else [],
        write_block_ids=blocks,
        run_sequence_ids=[1],
        run_starts=[start],
        run_token_counts=[len(tokens)],
        run_samples=[False],
        given_run_indexes=[0],
        given_token_digests=sha256(b"".join(token.to_bytes(4, "little") for token in tokens)).digest()[:16],
    ).SerializeToString()
    signed = grant_pb2.SignedGrant(grant=grant, signature=hmac.digest(KEY, grant, "sha256"))
    inputs = [worker_service_pb2.SequenceInput(sequence_id=1, token_ids=tokens)]
    with grpc.insecure_channel(worker.address) as channel:
        stub: Any = worker_service_pb2_grpc.WorkerServiceStub(channel)
        return ask(stub.RunStep, worker_service_pb2.RunStepRequest(grant=signed, inputs=inputs))


def hand_out_twice(worker: ServiceProcess, epoch: int) -> None:
    """Alice fills block 1 and begins block 2; bob is given block 1 as his first, and writes in it."""
    alice, bob = LEASES
    run_step(worker, epoch, alice, 1, tokens=[1, 2, 3, 4, 5], start=0, blocks=[1, 2])
    run_step(worker, epoch, bob, 1, tokens=[9, 9], start=0, blocks=[1])


def test_a_block_handed_out_twice_ends_the_worker(cachemgr: LyingCachemgr, worker: ServiceProcess) -> None:
    hand_out_twice(worker, cachemgr.epoch)
    # Read before the worker ends: what a failing process has not yet written is lost with its streams.
    assert [cachemgr.reports.get(timeout=DEADLINE_S).lease_id for _ in range(2)] == list(LEASES)
    with pytest.raises(RefusedError) as caught:
        run_step(worker, cachemgr.epoch, LEASES[0], 2, tokens=[6], start=5, blocks=[])
    assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.UNAVAILABLE, "SHUTTING_DOWN")
    assert worker.wait_exited(DEADLINE_S)
    assert worker.returncode == 1
    said = (
        "I5 violated: block 1 does not have the content of the sequence (position 0); lease lease-of sequence 1 step 2"
    )
    assert said in worker.log_tail()
    assert cachemgr.reports.empty()


@pytest.fixture
def unverified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_VERIFY", "0")


@pytest.mark.usefixtures("unverified")
def test_nothing_is_checked_unless_it_is_asked_for(cachemgr: LyingCachemgr, worker: ServiceProcess) -> None:
    hand_out_twice(worker, cachemgr.epoch)
    run_step(worker, cachemgr.epoch, LEASES[0], 2, tokens=[6], start=5, blocks=[])
    assert worker.is_running
