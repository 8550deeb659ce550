"""A prompt compared with an earlier one: what has changed, what the cache has lost, and what is counted."""

import re
from pathlib import Path

import pytest

import quire.gateway.http
from quire.client.engine.caching import Breakpoint, CacheOutcome, Miss, MissReason
from quire.gateway.chat.conversation import Conversation, Message, OfferedTools
from quire.gateway.kept_responses import Kept
from quire.gateway.prompt_cache import CacheReport, Diagnosis, Divergence, KeptPrompt, diagnose, prompt_of

BLOCK = 4
SYSTEM: Message = {"role": "system", "content": "be kind"}
TOOLS = OfferedTools(shown=({"type": "function", "function": {"name": "weather"}},))


def prompt(
    tokens: list[int],
    *messages: str,
    system: Message = SYSTEM,
    offer: OfferedTools = TOOLS,
    model: str = "m",
    effort: str = "",
) -> KeptPrompt:
    each = [{"role": "user", "content": text} for text in messages]
    return prompt_of(model, Conversation([system, *each], offer, further={"reasoning_effort": effort}), tokens)


def found(num_cached: int, miss: Miss | None = None, *, epoch: int = 0) -> CacheOutcome:
    return CacheOutcome(num_cached, miss=miss, epoch=epoch)


BEFORE = prompt(list(range(10)), "a", "b")


def diagnosed(now: KeptPrompt, outcome: CacheOutcome) -> Diagnosis:
    return diagnose(BEFORE, now, outcome, block_size=BLOCK)


def test_what_an_earlier_prompt_left_and_is_found_is_no_miss() -> None:
    same = diagnosed(prompt([*range(10), 20, 21], "a", "b", "c"), found(8))
    assert (same.divergence, same.num_reusable, same.num_missed) == (Divergence.NONE, 8, 0)
    assert diagnosed(BEFORE, found(8)).divergence is Divergence.NONE
    assert diagnosed(prompt([0, 1, 2, 3], "a"), found(0)).num_reusable == 0, "one token is always computed"


@pytest.mark.parametrize(
    ("now", "divergence", "message"),
    [
        (prompt([0, 9, *range(2, 12)], "a", "b", system={**SYSTEM, "content": "no"}), Divergence.SYSTEM, None),
        (prompt([0, 9, *range(2, 12)], "a", "b", offer=OfferedTools()), Divergence.TOOLS, None),
        (prompt([*range(6), 9, 9, 9], "a", "x", "c"), Divergence.MESSAGES, 1),
        (prompt([0, 9, *range(2, 12)], "a", "b", effort="low"), Divergence.OTHER, None),
        (prompt([*range(10)], "a", "b", model="other"), Divergence.MODEL, None),
    ],
)
def test_the_part_that_has_changed_is_named(now: KeptPrompt, divergence: Divergence, message: int | None) -> None:
    told = diagnosed(now, found(0))
    assert (told.divergence, told.message) == (divergence, message)
    assert told.num_missed == told.num_reusable == 8
    assert told.loss is None


def test_the_first_token_that_differs_is_named() -> None:
    for index in range(10):
        now = prompt([*range(index), 99, *range(index + 1, 12)], "x")
        assert diagnosed(now, found(0)).token == index


def test_what_the_cache_has_lost_has_the_reason_that_the_books_gave() -> None:
    longer = prompt([*range(10), 20, 21], "a", "b", "c")
    miss = Miss(1, MissReason.EVICTED, lost_at_s=5.0, evicted_by_tenant="alice")
    told = diagnosed(longer, found(4, miss))
    assert (told.divergence, told.loss, told.num_missed) == (Divergence.LOST, "evicted", 4)
    assert told.detail == {
        "reason": "evicted",
        "reusable_tokens": 8,
        "missed_tokens": 4,
        "missing_block": 1,
        "lost_at": 5.0,
        "evicted_by_tenant": "alice",
    }
    assert diagnosed(longer, found(4, miss, epoch=1)).loss == "worker_restarted"
    assert diagnosed(longer, found(4)).loss == "unknown"


def test_a_change_behind_the_last_full_block_is_no_reason() -> None:
    told = diagnosed(
        prompt([*range(9), 99, 98, 97, 96], "a", "x"), found(0, Miss(0, MissReason.RESET, reset_by="alice"))
    )
    assert (told.divergence, told.loss, told.token) == (Divergence.LOST, "reset", 9)
    assert told.detail["reset_by"] == "alice"


def report(prompts: Kept[KeptPrompt], tenant: str, compared_with: str | None, *breakpoints: Breakpoint) -> CacheReport:
    return CacheReport(prompts, tenant, BEFORE, breakpoints=breakpoints, compared_with=compared_with, block_size=BLOCK)


def test_any_value_of_a_body_has_a_digest() -> None:
    """A request with an integer of more than 64 bits in `chat_template_kwargs` failed with 500."""
    further = {"big": 2**70, "odd": float("nan"), "surrogate": "\ud800"}
    one, other = (prompt_of("m", Conversation([SYSTEM], further=each), [1]) for each in (further, {}))
    assert one.further != other.further


def test_an_answer_of_another_tenant_is_not_known() -> None:
    prompts: Kept[KeptPrompt] = Kept(keep_s=60.0, max_tenant_bytes=10_000, clock=lambda: 0.0)
    first = report(prompts, "alice", None)
    first.take(found(0), "msg_1")
    assert first.diagnosis is None
    for tenant, divergence in (("alice", Divergence.NONE), ("bob", Divergence.NOT_FOUND)):
        compared = report(prompts, tenant, "msg_1")
        compared.take(None, "msg_2")
        assert compared.diagnosis is None
        compared.take(found(8), "msg_2")
        assert compared.diagnosis is not None
        assert compared.diagnosis.divergence is divergence


def test_a_prompt_that_may_not_be_kept_is_compared_and_forgotten() -> None:
    prompts: Kept[KeptPrompt] = Kept(keep_s=60.0, max_tenant_bytes=10_000, clock=lambda: 0.0)
    report(prompts, "alice", None).take(found(0), "msg_1")
    private = CacheReport(prompts, "alice", BEFORE, compared_with="msg_1", block_size=BLOCK, keeps=False)
    private.take(found(8), "msg_2")
    assert private.diagnosis is not None
    assert private.diagnosis.divergence is Divergence.NONE
    assert prompts.find("alice", "msg_2") is None


def test_a_prompt_that_is_neither_kept_nor_compared_has_its_counts() -> None:
    prompts: Kept[KeptPrompt] = Kept(keep_s=60.0, max_tenant_bytes=10_000, clock=lambda: 0.0)
    private = CacheReport(prompts, "alice", None, block_size=BLOCK, keeps=False)
    private.take(found(8), "msg_1")
    assert private.outcome == found(8)
    assert private.diagnosis is None
    assert prompts.find("alice", "msg_1") is None


def test_created_tokens_are_those_computed_up_to_what_is_kept_by_their_longest_time() -> None:
    prompts: Kept[KeptPrompt] = Kept(keep_s=0, max_tenant_bytes=0, clock=lambda: 0.0)
    cases = [
        ((), CacheOutcome(0, 8, 0), (0, 0)),
        ((Breakpoint(10, 300),), CacheOutcome(0, 8, 8), (8, 0)),
        ((Breakpoint(10, 300),), CacheOutcome(4, 4, 8), (4, 0)),
        ((Breakpoint(5, 3600), Breakpoint(10, 300)), CacheOutcome(0, 8, 8), (4, 4)),
        ((Breakpoint(5, 300), Breakpoint(10, 3600)), CacheOutcome(0, 8, 8), (0, 8)),
        ((Breakpoint(5, 3600), Breakpoint(10, 300)), CacheOutcome(8, 0, 8), (0, 0)),
    ]
    for breakpoints, outcome, created in cases:
        told = report(prompts, "", None, *breakpoints)
        told.take(outcome, "x")
        assert told.num_created_tokens == created


def test_the_prompts_of_a_tenant_take_bounded_memory() -> None:
    prompts: Kept[KeptPrompt] = Kept(keep_s=60.0, max_tenant_bytes=5_000, clock=lambda: 0.0)
    for number in range(100):
        report(prompts, "alice", None).take(found(0), f"msg_{number}")
    assert prompts.find("alice", "msg_99") is not None
    assert prompts.find("alice", "msg_0") is None
    assert prompts.statistics().num_bytes <= 5_000
    prompts.check_invariants()


def test_the_page_has_words_for_every_reason() -> None:
    page = Path(quire.gateway.http.__path__[0], "page/prompt_bar.js").read_text()
    words = page[page.index("const REASONS = {") : page.index("};")]
    assert {reason.value for reason in MissReason} <= set(re.findall(r"(\w+): \"", words))
