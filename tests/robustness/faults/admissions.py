"""The admissions that cachemgr answers, as the links see them, beside its books and what clients are told.

A link sees each plan that reaches cachemgr, and each answer that leaves it, whatever becomes of both. So exactly this
is known of a pool in its present epoch. A kill of a worker begins a new one, as a kill of cachemgr does without a state
directory, and the counters begin with it.

    books   a tenant's counters of admitted, found and written tokens are the sums over its accepted admissions that are
            not resumed. If cachemgr was killed before it answered, a plan was accepted or not: its admissions may count
    told    the outcome that a client is told is that of one accepted admission of its prompt, and of no other's
    all     each accepted admission of the lease in which a client's work ends is told. Those of a client that was
            killed, and of leases that were lost on the way, may not be
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from typing import Any

from robustness.faults.proxy import UP
from robustness.faults.workload import Request
from robustness.simulation.admissions import Accepted, Sums

from quire.cache.v1 import cache_service_pb2

POOL = "default"
ONE, STREAM = "/PlanStep", "/PlanSteps"
Plan = cache_service_pb2.PlanStepRequest


class Admissions:
    """Admissions that links have seen since the processes began, and outcomes that clients were told."""

    def __init__(self, requests: list[Request]) -> None:
        self.failures: list[str] = []
        self._requests = requests
        self._asked: dict[object, deque[Plan]] = defaultdict(deque)
        self._unanswered: dict[tuple[str, str], Plan] = {}
        """By lease and request id: plans that reached cachemgr, as long as no answer has left it."""
        self._accepted: dict[tuple[int, str, int], Accepted] = {}
        """By epoch, lease and sequence."""
        self._told: Counter[Accepted] = Counter()
        self._leases: dict[str, str] = {}
        """The last one of each client."""
        self._ended: set[str] = set()
        """Leases in which the work of a client has ended."""

    # -- links

    def observe(self, client: str, call: object, method: str, way: str, message: bytes) -> None:
        """A message of a call has reached cachemgr, or has left it."""
        if not method.endswith((ONE, STREAM)):
            return
        if way == UP:
            is_alone = method.endswith(ONE)
            plan = Plan.FromString(message) if is_alone else cache_service_pb2.PlanStepsRequest.FromString(message).plan
            self._ask(client, call, plan)
        elif method.endswith(ONE):
            self._answer(self._asked[call].popleft(), cache_service_pb2.PlanStepResponse.FromString(message))
        else:
            self._answer(self._asked[call].popleft(), cache_service_pb2.PlanStepsResponse.FromString(message).plan)

    def _ask(self, client: str, call: object, plan: Plan) -> None:
        self._asked[call].append(plan)
        self._leases[client] = plan.lease_id
        if any(not admission.resumed for admission in plan.admissions):
            self._unanswered[plan.lease_id, plan.request_id] = plan

    def _answer(self, plan: Plan, answer: cache_service_pb2.PlanStepResponse) -> None:
        self._unanswered.pop((plan.lease_id, plan.request_id), None)
        admissions = {admission.sequence_id: admission for admission in plan.admissions}
        counts = (answer.admitted_cached_token_counts, answer.admitted_written_token_counts)
        for seq_id, num_cached, num_written in zip(answer.admitted_sequence_ids, *counts, strict=True):
            admission = admissions[seq_id]
            if admission.resumed:
                continue
            place, prompt = (POOL, plan.epoch), tuple(admission.token_ids)
            accepted = Accepted(place, admission.tenant, prompt, num_cached, num_written)
            known = self._accepted.setdefault((plan.epoch, plan.lease_id, seq_id), accepted)
            if known != accepted:
                self.failures.append(f"a plan that is asked for again admits {accepted}, and {known} before")

    # -- clients

    def take(self, event: dict[str, Any]) -> None:
        """One event of a request: it may have the outcome of its admission."""
        outcome = event.get("outcome")
        if outcome is not None:
            request = self._requests[event["rehearsed" if "rehearsed" in event else "request"]]
            place, counts = (POOL, outcome["epoch"]), (outcome["cached"], outcome["written"])
            self._told[Accepted(place, request.params.tenant, request.prompt, *counts)] += 1

    def killed(self, client: str) -> None:
        """A client was killed: what it was told, and did not say, is lost."""
        self._leases.pop(client, None)

    def ended(self, client: str) -> None:
        """The work of a client has ended, and all of its requests."""
        self._ended |= {self._leases.pop(client)} if client in self._leases else set()

    # -- the end of a schedule

    def compare(self, epoch: int, tenants: Iterable[cache_service_pb2.Tenant]) -> list[str]:
        """Violations of the law by the books of the pool, at rest in an epoch, and by what was told so far."""
        left = [
            Accepted((POOL, plan.epoch), admission.tenant, tuple(admission.token_ids), 0, 0)
            for (lease, _), plan in self._unanswered.items()
            for admission in plan.admissions
            if not admission.resumed and (plan.epoch, lease, admission.sequence_id) not in self._accepted
        ]
        wrong = [*self.failures, *self._wrong_answers(left)]
        for tenant in tenants:
            own = [each for each in self._accepted.values() if (each.place[1], each.tenant) == (epoch, tenant.name)]
            least = Sums(*(sum(counts) for counts in zip(*map(counts_of, own), strict=True))) if own else Sums()
            open_ = sum(len(each.prompt) for each in left if (each.place[1], each.tenant) == (epoch, tenant.name))
            found = Sums(tenant.admitted_token_count, tenant.cached_token_count, tenant.written_token_count)
            if not is_between(least, found, open_):
                wrong.append(
                    f"the books count {found} for {tenant.name!r}, and its admissions are {least}, and {open_} "
                    "tokens of prompts without an answer"
                )
            if tenant.kept_block_count > tenant.keep_limit_block_count:
                wrong.append(f"{tenant.kept_block_count} blocks are kept for {tenant.name!r}, beyond its limit")
        return wrong

    def _wrong_answers(self, left: list[Accepted]) -> list[str]:
        open_ = Counter((each.place, each.tenant, each.prompt) for each in left)
        told_wrongly = self._told - Counter(self._accepted.values())
        for told, count in told_wrongly.items():
            if count > open_[told.place, told.tenant, told.prompt]:
                return [f"{count} answers tell of {told}, and no admission is such a one"]
        last = Counter(each for (_, lease, _), each in self._accepted.items() if lease in self._ended)
        return [f"{count} clients were not told of {each}" for each, count in (last - self._told).items()]


def counts_of(accepted: Accepted) -> tuple[int, int, int]:
    return len(accepted.prompt), accepted.num_cached, accepted.num_written


def is_between(least: Sums, found: Sums, num_open: int) -> bool:
    """True if each count is the least one, or more by no more tokens than those without an answer."""
    pairs = (
        (least.admitted, found.admitted),
        (least.cached, found.cached),
        (least.written, found.written),
    )
    return all(fewest <= count <= fewest + num_open for fewest, count in pairs)
