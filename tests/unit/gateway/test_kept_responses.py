"""Responses are kept for a time, up to a number of bytes of each tenant."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from quire.gateway.kept_responses import ENTRY_BYTES, KeptResponse, KeptResponses

KEEP_S = 10.0
PLACES = 3
"""Responses of a tenant that have room."""


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def made(clock: Clock, *, keep_s: float = KEEP_S) -> KeptResponses:
    return KeptResponses(keep_s=keep_s, max_tenant_bytes=PLACES * (ENTRY_BYTES + 10), clock=clock)


def response(name: str, previous: str | None = None, *, size: int = 10) -> KeptResponse:
    return KeptResponse(name, b"x" * (size // 2), b"y" * (size - size // 2), previous)


def names(kept: KeptResponses, tenant: str, *candidates: str) -> list[str]:
    kept.check_invariants()
    return [name for name in candidates if kept.find(tenant, name) is not None]


def test_a_response_is_its_tenants_own() -> None:
    kept = made(Clock())
    kept.keep("alice", response("a"))
    assert kept.find("alice", "a") == response("a")
    assert kept.find("bob", "a") is kept.conversation("bob", "a") is None
    assert not kept.forget("bob", "a")
    assert kept.forget("alice", "a")
    assert names(kept, "alice", "a") == []


def test_a_response_is_dropped_after_its_time_and_not_before() -> None:
    clock = Clock()
    kept = made(clock)
    kept.keep("alice", response("a"))
    clock.now = KEEP_S - 0.001
    assert names(kept, "alice", "a") == ["a"]
    clock.now = KEEP_S
    assert kept.statistics().num_responses == 0
    assert kept.statistics().num_expired == 1
    assert names(kept, "alice", "a") == []


def test_a_conversation_lives_from_its_last_use() -> None:
    clock = Clock()
    kept = made(clock)
    kept.keep("alice", response("a"))
    clock.now = 8
    kept.keep("alice", response("b", "a"))
    clock.now = 16
    assert kept.conversation("alice", "b") == [response("a"), response("b", "a")]
    clock.now = 24
    assert names(kept, "alice", "a", "b") == ["a", "b"]


def test_room_is_made_of_the_tenants_own_that_were_used_longest_ago() -> None:
    clock = Clock()
    kept = made(clock)
    kept.keep("bob", response("other"))
    for name, previous in (("a", None), ("b", None), ("c", "a"), ("d", None)):
        kept.keep("alice", response(name, previous))
    assert names(kept, "alice", "a", "b", "c", "d") == ["a", "c", "d"]
    kept.keep("alice", response("e"))
    assert names(kept, "alice", "a", "c", "d", "e") == ["a", "d", "e"], "the end of a conversation goes first"
    assert names(kept, "bob", "other") == ["other"]
    assert kept.statistics().num_evicted == 2


def test_a_conversation_without_its_beginning_is_none() -> None:
    kept = made(Clock())
    kept.keep("alice", response("a"))
    kept.keep("alice", response("b", "a"))
    kept.forget("alice", "a")
    assert kept.conversation("alice", "b") is None
    assert kept.find("alice", "b") is not None


def test_what_is_too_large_drops_nothing() -> None:
    kept = made(Clock())
    kept.keep("alice", response("a"))
    kept.keep("alice", response("b", size=10_000))
    assert names(kept, "alice", "a", "b") == ["a"]


def test_nothing_is_kept_for_no_time() -> None:
    kept = made(Clock(), keep_s=0)
    kept.keep("alice", response("a"))
    assert names(kept, "alice", "a") == []


class Machine(RuleBasedStateMachine):
    """A tenant's responses are, of those used within the time, the ones used last that have room."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.kept = made(self.clock)
        self.number = 0

    @rule(tenant=st.sampled_from("ab"), size=st.integers(0, 20), back=st.integers(1, 4))
    def keep(self, tenant: str, size: int, back: int) -> None:
        self.number += 1
        previous = f"{tenant}{self.number - back}"
        goes_on = self.kept.find(tenant, previous) is not None
        self.kept.keep(tenant, response(f"{tenant}{self.number}", previous if goes_on else None, size=size))
        assert self.kept.find("a" if tenant == "b" else "b", f"{tenant}{self.number}") is None

    @rule(tenant=st.sampled_from("ab"), back=st.integers(0, 4))
    def go_on(self, tenant: str, back: int) -> None:
        found = self.kept.conversation(tenant, f"{tenant}{self.number - back}")
        for earlier, later in zip(found or (), (found or ())[1:], strict=False):
            assert later.previous == earlier.id

    @rule(tenant=st.sampled_from("ab"), back=st.integers(0, 4))
    def forget(self, tenant: str, back: int) -> None:
        name = f"{tenant}{self.number - back}"
        was_there = self.kept.find(tenant, name) is not None
        assert self.kept.forget(tenant, name) == was_there
        assert self.kept.find(tenant, name) is None

    @rule(seconds=st.floats(0, 2 * KEEP_S))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @invariant()
    def agrees(self) -> None:
        self.kept.check_invariants()


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=50, stateful_step_count=30, deadline=None, derandomize=True)
