"""cachemgr's books without its server: sequences of given lengths are admitted, as a plan of a client would."""

from __future__ import annotations

import csv
import gzip
from pathlib import Path

import numpy as np
import numpy.typing as npt

from quire.cache.v1 import attach_pb2, cache_service_pb2, grant_pb2
from quire.cachemgr._core import GrantedStep, Ledger, PlanRequest, StepReport
from quire.cachemgr.geometry import Geometry, LayerGroup
from quire.cachemgr.service import messages

AZURE = Path(__file__).parents[1] / "traces" / "azure2023_conv.csv.gz"
VOCAB = 2**31 - 1
LEASE, EPOCH = "lease", 1

Lengths = npt.NDArray[np.int64]


def azure_lengths() -> tuple[Lengths, Lengths]:
    """Prompt and output tokens of every request of the Azure conversation trace, in order of arrival."""
    with gzip.open(AZURE, "rt", newline="") as lines:
        rows = [(int(row["input_tokens"]), int(row["output_tokens"])) for row in csv.DictReader(lines)]
    prompts, outputs = np.array(rows, dtype=np.int64).T
    return prompts, outputs


def normal_lengths(generator: np.random.Generator, count: int) -> Lengths:
    """Tokens of requests, prompt and output together: N(500, 200) clipped to [200, 2048]."""
    return np.clip(np.rint(generator.normal(500, 200, count)), 200, 2048).astype(np.int64)


def report_of(grant: grant_pb2.StepGrant, *, number: int = 0, token: int = 0) -> attach_pb2.StepReport:
    """Return the report of a step in which everything was computed, and this token sampled by each run that samples."""
    runs = zip(grant.run_sequence_ids, grant.run_samples, strict=True)
    sampled = [seq_id for seq_id, samples in runs if samples]
    return attach_pb2.StepReport(
        report_number=number,
        lease_id=LEASE,
        step_number=grant.step_number,
        outcome=attach_pb2.STEP_OUTCOME_COMPUTED,
        sequence_ids=grant.run_sequence_ids,
        computed_token_counts=[a + b for a, b in zip(grant.run_starts, grant.run_token_counts, strict=True)],
        sampled_sequence_ids=sampled,
        sampled_token_ids=[token] * len(sampled),
    )


class Books:
    """A pool of num_blocks blocks, perhaps with a host tier, and one lease on it."""

    def __init__(
        self, num_blocks: int, *, block_size: int, num_host_blocks: int = 0, layer_groups: tuple[LayerGroup, ...] = ()
    ) -> None:
        geometry = Geometry(
            block_size=block_size,
            num_blocks=num_blocks + 1,
            num_host_blocks=num_host_blocks,
            block_bytes=1,
            max_sequences=2**20,
            max_sequence_tokens=2**20,
            vocab_size=VOCAB,
            model="benchmark",
            model_fingerprint="benchmark",
            layer_groups=layer_groups,
        )
        self.ledger = Ledger("benchmark", EPOCH, geometry)
        self.ledger.open_lease(LEASE, ttl_s=1.0, now=0.0)
        self._num_admitted = 0

    def admit(self, num_tokens: int) -> bool:
        """One more sequence, like none before, computed at once; whether there was room."""
        plan = self.plan_admission(num_tokens)
        self.settle(plan)
        return not plan.has_refusals

    def plan_admission(self, num_tokens: int, *, most: int = 0) -> GrantedStep:
        """One more sequence, like none before: its first `most` tokens, 0: all. A refused one is not counted."""
        tokens = np.arange(num_tokens, dtype="<i4")
        tokens[0] = VOCAB - 1 - self._num_admitted
        request = cache_service_pb2.PlanStepRequest(lease_id=LEASE, epoch=EPOCH)
        request.admissions.add(sequence_id=self._num_admitted, token_ids=tokens.tolist(), max_compute_token_count=most)
        plan = self.ledger.plan(PlanRequest(request.SerializeToString()), now=0.0)
        self._num_admitted += not plan.has_refusals
        return plan

    def plan_more(self, num_tokens: int) -> GrantedStep:
        """So many more tokens of the last sequence."""
        request = cache_service_pb2.PlanStepRequest(lease_id=LEASE, epoch=EPOCH)
        request.extends.sequence_ids.append(self._num_admitted - 1)
        request.extends.token_counts.append(num_tokens)
        return self.ledger.plan(PlanRequest(request.SerializeToString()), now=0.0)

    def settle(self, plan: GrantedStep) -> None:
        """Enters the worker's report of a step: everything computed, and a token for every run that samples."""
        grant = grant_pb2.StepGrant.FromString(plan.encode_grant("benchmark", EPOCH, 1, LEASE))
        self.ledger.settle(StepReport(report_of(grant).SerializeToString()))

    @property
    def num_computed_tokens(self) -> int:
        """Tokens of all sequences, which share no block; the token sampled last has no keys and values yet."""
        return sum(
            sequence.num_computed for sequence in self.ledger.inspector.sequences_from(LEASE, 0, self._num_admitted)
        )

    @property
    def num_active_blocks(self) -> int:
        return messages.counts_of(self.ledger).active_count
