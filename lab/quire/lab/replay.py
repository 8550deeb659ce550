"""Prompts, driven one at a time through cachemgr's books: hits of the prefix cache under an eviction policy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from quire.cache.v1 import attach_pb2, cache_service_pb2
from quire.cachemgr._core import Ledger, PlanRequest, StepReport
from quire.cachemgr.eviction_interface import EvictionPolicy
from quire.cachemgr.geometry import Geometry, LayerGroup
from quire.cachemgr.service import messages
from quire.lab.requests import Prompt

_EPOCH = 1
_VOCABULARY = 2**31 - 1
_TAIL = _VOCABULARY - 1


@dataclass(frozen=True, slots=True)
class Outcome:
    """Blocks that were found instead of computed, and blocks that were evicted."""

    num_hits: int
    num_evicted: int


class Replay:
    """A pool of `capacity` blocks for each layer group and one for a partial tail.

    Every prompt is given a tail of one token, so that the tail's block is taken and given back each time. A prompt that
    is longer than the capacity is admitted with its first blocks only. Another salt gives all blocks other hashes.
    """

    def __init__(
        self,
        capacity: int,
        *,
        block_size: int,
        policy: str | EvictionPolicy,
        layer_groups: tuple[LayerGroup, ...] = (),
        salt: bytes = b"",
    ) -> None:
        self._capacity = capacity
        self._block_size = block_size
        self._salt = salt
        geometry = Geometry(
            block_size=block_size,
            num_blocks=max(1, len(layer_groups)) * (capacity + 1) + 1,
            block_bytes=1,
            max_sequences=2,
            max_sequence_tokens=2**31 - 1,
            vocab_size=_VOCABULARY,
            model="trace",
            model_fingerprint="trace",
            layer_groups=layer_groups,
        )
        self._ledger = Ledger("trace", _EPOCH, geometry, policy=policy)
        self._ledger.open_lease("lease", ttl_s=1.0, now=0.0)
        self._ledger.keep_contents(False)  # nothing here reads the tokens of blocks

    def run(self, prompts: Iterable[Prompt]) -> Outcome:
        """All of them, each released before the next begins."""
        num_hits = sum([self.serve(prompt) for prompt in prompts])
        return Outcome(num_hits, messages.statistics_of(self._ledger).evicted_block_count)

    def serve(self, prompt: Prompt) -> int:
        """Admit a prompt in the place of the one before it. Returns the blocks that were found.

        The last token is always computed, so its block doesn't count.
        """
        tokens = [*_tokens_of(prompt.block_ids[: self._capacity], self._block_size), _TAIL]
        step = cache_service_pb2.PlanStepRequest(lease_id="lease", epoch=_EPOCH, release_sequence_ids=[1])
        step.admissions.add(sequence_id=1, token_ids=tokens, salt=self._salt)
        plan = self._ledger.plan(PlanRequest(step.SerializeToString()), now=0.0)
        if plan.has_refusals:
            raise RuntimeError(f"a prompt was refused: {plan.refusals[0]}")
        answer = cache_service_pb2.PlanStepResponse.FromString(plan.encode_answer())
        report = attach_pb2.StepReport(
            lease_id="lease",
            step_number=answer.step_number,
            outcome=attach_pb2.STEP_OUTCOME_COMPUTED,
            sequence_ids=[1],
            computed_token_counts=[len(tokens)],
            sampled_sequence_ids=[1],
            sampled_token_ids=[0],
        )
        self._ledger.settle(StepReport(report.SerializeToString()))
        found = answer.admitted_cached_token_counts[0] // self._block_size
        return min(found, (prompt.num_tokens - 1) // self._block_size)


def _tokens_of(block_ids: list[int], block_size: int) -> list[int]:
    """Different tokens for different ids."""
    first = np.array(block_ids, dtype="<i4")[:, None] * block_size
    tokens: list[int] = (first + np.arange(block_size, dtype="<i4")).ravel().tolist()
    return tokens
