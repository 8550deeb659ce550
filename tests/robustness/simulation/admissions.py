"""The admissions that cachemgr has accepted, and what answers say of them: sums of both are compared with its books.

The law: an admission that counts, because it is not resumed, is of the prompt of a request that was sent, and a lease
has no more of these than such requests were sent. So no prompt counts twice, whatever an engine says is resumed. In
each epoch of a pool its counters of found, written and admitted tokens, and those of each tenant, are the sums over
the admissions that the books accepted in this epoch, without those that are resumed. A plan that is asked for again,
and one without an answer, counts once. An answer's outcome is that of one accepted admission of its prompt, and no
two answers have the same one; beam searches tell none. Any other admission without an answer is that of a caller that
has left, of a gateway that was killed, or of a pool or an epoch that a request left before its first token.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quire.cache.v1 import cache_service_pb2
from quire.cachemgr._core import GrantedStep, Ledger, PlanRequest
from quire.client.engine.caching import CacheOutcome

Prompt = tuple[int, ...]
Place = tuple[str, int]
"""A pool and its epoch."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """An admission that counts: a request's first one."""

    place: Place
    tenant: str
    prompt: Prompt
    num_cached: int
    num_written: int


@dataclass(slots=True)
class Sums:
    """Tokens of admissions."""

    admitted: int = 0
    cached: int = 0
    written: int = 0


class Admissions:
    """The accepted admissions and the answers of one schedule. It outlives all starts of its processes."""

    def __init__(self, wrong: Callable[[str], None], sent: Counter[tuple[str, Prompt]]) -> None:
        """`wrong` gets a line about each violation of the law. sent: the prompts of all requests, by tenant."""
        self._wrong = wrong
        self._sent = sent
        self._of_leases: Counter[tuple[str, str, Prompt]] = Counter()
        self._accepted: dict[tuple[Place, str, int], Accepted] = {}
        self._answered: Counter[Accepted] = Counter()
        self._sums: dict[tuple[Place, str], Sums] = defaultdict(Sums)
        self._kept: dict[Place, dict[int, int]] = {}

    def accept(self, asked: cache_service_pb2.PlanStepRequest, plan: GrantedStep, ledger: Ledger) -> None:
        """Count what a plan admits, and compare the books with it."""
        answer = cache_service_pb2.PlanStepResponse.FromString(plan.encode_answer())
        place = (ledger.pool, ledger.epoch)
        admissions = {admission.sequence_id: admission for admission in asked.admissions}
        counts = (answer.admitted_cached_token_counts, answer.admitted_written_token_counts)
        for seq_id, num_cached, num_written in zip(answer.admitted_sequence_ids, *counts, strict=True):
            admission = admissions[seq_id]
            if admission.resumed:
                if num_written:
                    self._wrong(f"a resumed admission is told to write {num_written} tokens")
                continue
            prompt = tuple(admission.token_ids)
            accepted = Accepted(place, admission.tenant, prompt, num_cached, num_written)
            self._count((place, asked.lease_id, seq_id), accepted)
        self._compare(ledger)

    def _count(self, key: tuple[Place, str, int], accepted: Accepted) -> None:
        known = self._accepted.setdefault(key, accepted)
        if known is not accepted:
            if known != accepted:
                self._wrong(f"the plan that is asked for again admits {accepted}, and {known} before")
            return
        self._require_sent(key[1], accepted)
        sums = self._sums[accepted.place, accepted.tenant]
        sums.admitted += len(accepted.prompt)
        sums.cached += accepted.num_cached
        sums.written += accepted.num_written

    def _require_sent(self, lease_id: str, accepted: Accepted) -> None:
        """Require that an admission of a lease counts a prompt that was sent, and no more often than it was sent."""
        tenant, prompt = accepted.tenant, accepted.prompt
        self._of_leases[lease_id, tenant, prompt] += 1
        num_counted, num_sent = self._of_leases[lease_id, tenant, prompt], self._sent[tenant, prompt]
        if num_counted > num_sent:
            self._wrong(f"a lease counts {prompt} of {tenant!r} {num_counted} times, and it was sent {num_sent} times")

    def _compare(self, ledger: Ledger) -> None:
        """Compare the books' sums, by tenant and as a whole, with those of the accepted admissions; and the limits."""
        place, whole = (ledger.pool, ledger.epoch), Sums()
        for use in ledger.inspector.tenants():
            found = Sums(use.num_admitted_tokens, use.num_cached_tokens, use.num_written_tokens)
            if found != (expected := self._sums[place, use.name]):
                self._wrong(f"the books count {found} for {use.name!r} in {place}, and its admissions are {expected}")
            if use.num_kept > use.keep_limit:
                self._wrong(f"{use.num_kept} blocks are kept for {use.name!r}, with a limit of {use.keep_limit}")
        for (at, _), sums in self._sums.items():
            if at == place:
                whole.admitted += sums.admitted
                whole.cached += sums.cached
                whole.written += sums.written
        counted = cache_service_pb2.PoolStatistics.FromString(ledger.inspector.statistics())
        found = Sums(counted.admitted_token_count, counted.cached_token_count, counted.written_token_count)
        if found != whole:
            self._wrong(f"the books count {found} in {place}, and the admissions are {whole}")
        for what in ledger.inspector.audit_promises():
            self._wrong(f"a floor or a reservation is not held: {what}")

    def answer(self, tenant: str, prompt: Prompt, outcome: CacheOutcome) -> None:
        """An answer has told its outcome: that of an admission that no other answer has."""
        place = (outcome.pool, outcome.epoch)
        told = Accepted(place, tenant, prompt, outcome.num_cached_tokens, outcome.num_written_tokens)
        self._answered[told] += 1
        num_accepted = sum(accepted == told for accepted in self._accepted.values())
        if self._answered[told] > num_accepted:
            self._wrong(f"{self._answered[told]} answers tell of {told}, and {num_accepted} admissions are such ones")

    def require_all_answered(self, searched: Counter[tuple[str, Prompt]]) -> None:
        """Without faults and callers that leave each accepted admission has its answer.

        Beam searches tell no outcome: each of the searched prompts, by tenant, has one admission without an answer.
        """
        left = Counter(self._accepted.values()) - self._answered
        found = Counter({(each.tenant, each.prompt): count for each, count in left.items()})
        if found != searched:
            self._wrong(f"admissions without an answer: {left}; beam searches: {searched}")

    # -- restarts

    def stop(self, ledgers: list[Ledger]) -> None:
        """Remember what is kept when cachemgr ends."""
        for ledger in ledgers:
            self._kept[ledger.pool, ledger.epoch] = kept_blocks(ledger)

    def restore(self, ledgers: list[Ledger], *, now: float) -> None:
        """Require that an epoch that goes on after a restart keeps what it kept, until the same times."""
        for ledger in ledgers:
            before = self._kept.get((ledger.pool, ledger.epoch))
            if before is None:
                continue
            before = {block: until for block, until in before.items() if until > now * 1000}
            after = {block: until for block, until in kept_blocks(ledger).items() if until > now * 1000}
            if before != after:
                self._wrong(f"{before} is kept before a restart, and {after} after it")
            self._compare(ledger)


def kept_blocks(ledger: Ledger) -> dict[int, int]:
    """The blocks that breakpoints keep, with their ends in milliseconds."""
    names = [use.name for use in ledger.inspector.tenants()]
    return {block: until for name in names for block, until, _ in ledger.probe.kept_blocks(name)}


class ObservedPlans:
    """Notes what cachemgr is asked to plan, since the core's requests do not show it, and counts what it accepts."""

    def __init__(self, admissions: Admissions, plan: Callable[[PlanRequest], Any]) -> None:
        """`plan` makes a plan, and returns its pool and the granted step."""
        self._admissions = admissions
        self._plan = plan
        self._asked: dict[int, cache_service_pb2.PlanStepRequest] = {}

    def alone(self, body: bytes) -> PlanRequest:
        """Decode a request of PlanStep."""
        return self._note(PlanRequest(body), cache_service_pb2.PlanStepRequest.FromString(body))

    def on_stream(self, body: bytes) -> PlanRequest:
        """Decode a request of PlanSteps."""
        return self._note(PlanRequest.on_stream(body), cache_service_pb2.PlanStepsRequest.FromString(body).plan)

    def _note(self, request: PlanRequest, asked: cache_service_pb2.PlanStepRequest) -> PlanRequest:
        if request.has_admissions:
            self._asked[id(request)] = asked
        return request

    def plan(self, request: PlanRequest) -> Any:
        """Plan, and count what is admitted."""
        asked = self._asked.pop(id(request), None)
        pool, granted = self._plan(request)
        if asked is not None:
            self._admissions.accept(asked, granted, pool.ledger)
        return pool, granted
