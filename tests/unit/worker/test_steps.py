"""A step from its grant to its report and its answer."""

from __future__ import annotations

import asyncio
import hmac
from hashlib import sha256

import model_zoo as zoo

from quire.cache.v1 import attach_pb2, grant_pb2
from quire.compute.v1 import worker_service_pb2
from quire.worker.grant.gate import Gate
from quire.worker.model.preparing import prepare_model
from quire.worker.run.executor import Executor
from quire.worker.run.model_thread import ModelThread
from quire.worker.service.steps import StepLimits, Steps

KEY = b"key"
PROMPT = [5, 9, 2]
GRANT = grant_pb2.StepGrant(
    pool="pool",
    epoch=7,
    lease_id="lease",
    step_number=1,
    write_sequence_ids=[1],
    write_first_indexes=[0],
    write_block_counts=[1],
    write_block_ids=[3],
    run_sequence_ids=[1],
    run_starts=[0],
    run_token_counts=[3],
    run_samples=[True],
    given_run_indexes=[0],
    given_token_digests=sha256(b"".join(token.to_bytes(4, "little") for token in PROMPT)).digest()[:16],
)


def test_a_step_is_reported_before_it_is_answered() -> None:
    """So the plan that a client makes of the answer finds the outcome in cachemgr's books, as a rule."""
    model = prepare_model(zoo.build("llama"), max_model_len=32)
    executor = Executor(model, model.make_pool(num_blocks=8, block_size=4), max_num_seqs=2)
    gate = Gate("pool", 7)
    gate.attach(1, KEY, ["lease"])
    limits = StepLimits(
        vocab_size=model.vocab_size, max_sequence_tokens=32, max_step_tokens=8, max_logprobs=0, max_grant_bytes=1000
    )
    happened: list[str] = []

    async def run() -> None:
        steps = Steps(gate, executor, ModelThread(asyncio.get_running_loop()), limits)
        steps.reports.send = lambda report: happened.append(f"reported {list(report.computed_token_counts)}")
        message = GRANT.SerializeToString()
        signed = grant_pb2.SignedGrant(grant=message, signature=hmac.digest(KEY, message, "sha256"))
        entry = worker_service_pb2.SequenceInput(sequence_id=1, token_ids=PROMPT)
        ended = steps.accept(worker_service_pb2.RunStepRequest(grant=signed, inputs=[entry]))
        ended.add_done_callback(lambda _: happened.append("answered"))
        result = (await ended).result
        assert steps.reports.kept()[0].sampled_token_ids == result.sampled_tokens
        assert steps.reports.kept()[0].outcome == attach_pb2.STEP_OUTCOME_COMPUTED

    asyncio.run(run())
    assert happened == ["reported [3]", "answered"]
