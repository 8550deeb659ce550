"""Grammars: compiled under limits, kept by content, followed token by token, and masks of their next tokens."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent import futures
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deadlines import DEADLINE_S
from llguidance import LLTokenizer
from text_model import END, make_tokenizer

from quire.worker.memory.sequence_table import SequenceTable
from quire.worker.sampling import grammars
from quire.worker.sampling import threads as work_threads
from quire.worker.sampling.following import Bits, Compiled, Following
from quire.worker.sampling.grammar_masks import NO_MASKS, GrammarRows, MaskedRun, Masks
from quire.worker.sampling.grammar_trial import load_tokenizer, make_matcher, translate
from quire.worker.sampling.grammars import (
    CompilerUnavailable,
    Grammar,
    GrammarRefused,
    Grammars,
    NoGrammars,
    load_grammars,
)
from quire.worker.sampling.masks_aside import MasksAside
from quire.worker.sampling.parameters import SamplingParams
from quire.worker.sampling.sampler import Sampler
from quire.worker.sampling.threads import MAX_STUCK, STUCK_S, Threads, num_stuck

TOKENIZER = make_tokenizer()
VOCAB_SIZE = TOKENIZER.get_vocab_size() + 5
END_ID = TOKENIZER.token_to_id(END)
BEGINS_AT = 3

# llguidance takes minutes for it: 25 patterns, all of which one string has to match.
SLOW_TO_COMPILE = json.dumps(
    {"allOf": [{"type": "string", "pattern": f"(.*{chr(97 + i)}.*){{{i + 1}}}"} for i in range(25)]}
)
# As many rules, each of which is the next one, overflow a stack of 8 MiB.
DEEP = "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(4000)) + '\nr4000: "a"'


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    TOKENIZER.save(str(path))
    return path


@pytest.fixture(autouse=True)
def no_work_of_other_tests() -> None:
    """Wait for threads that earlier tests left to their work: they are counted in the whole process.

    They have the lowest priority, so on a busy machine they end long after their tests.
    """
    left = work_threads._given_up | work_threads._left
    assert not futures.wait(left, DEADLINE_S).not_done


@pytest.fixture(scope="module")
def tokenizer(tokenizer_path: Path) -> LLTokenizer:
    return load_tokenizer(tokenizer_path, vocab_size=VOCAB_SIZE, end_token_ids=[END_ID])


def load(path: Path, *, timeout_s: float) -> Grammars:
    loaded = load_grammars(path, vocab_size=VOCAB_SIZE, end_token_ids=[END_ID], timeout_s=timeout_s)
    assert isinstance(loaded, Grammars)
    return loaded


@pytest.fixture
def patient(tokenizer_path: Path) -> Iterator[Grammars]:
    loaded = load(tokenizer_path, timeout_s=DEADLINE_S)
    yield loaded
    loaded.close()


def follow(tokenizer: LLTokenizer, regex: str, *, aside: MasksAside | None = None) -> Following:
    compiled = Compiled(make_matcher(tokenizer, translate("regex", regex)), frozenset({END_ID}), aside)
    return Following.begin(compiled, begins_at=BEGINS_AT)


def ids_of(text: str) -> list[int]:
    ids: list[int] = TOKENIZER.encode(text).ids
    return ids


def allowed(bits: np.ndarray[Any, Any]) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist())


# -- compiling ----------------------------------------------------------------------------------------------------


def refusal(loaded: Grammars, kind: str, text: str) -> str:
    with pytest.raises(GrammarRefused) as caught:
        asyncio.run(loaded.compile(Grammar(kind, text)))
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("json_schema", "{", "line 1 column 2"),
        ("json_schema", '{"type": "strng"}', "Invalid type: strng"),
        ("json_schema", "false", "nothing matches"),
        ("json_schema", "[]", "an object"),
        ("json_schema", '{"type": "string", "minLength": 3, "maxLength": 2}', "minLength"),
        ("json_schema", '{"not": {}}', '"not"'),
        ("json_schema", "[" * 30_000, "recursion"),
        ("regex", "([", "unclosed"),
        ("regex", r"a[^\s\S]", "no token can continue"),
        ("lark", "start: nothing", "nothing"),
        ("ebnf", "root ::= other", "other"),
        ("regex", "a" * 65_537, "65536"),
    ],
)
def test_a_grammar_that_is_wrong_or_matches_nothing_is_refused(
    patient: Grammars, kind: str, text: str, message: str
) -> None:
    assert message in refusal(patient, kind, text)


def test_a_grammar_that_takes_long_is_ended_and_others_are_compiled_meanwhile(tokenizer_path: Path) -> None:
    loaded = load(tokenizer_path, timeout_s=5.0)

    async def main() -> None:
        slow = asyncio.create_task(loaded.compile(Grammar("json_schema", SLOW_TO_COMPILE)))
        for number in range(3):
            await loaded.compile(Grammar("regex", f"a{{{number + 1}}}"))
            assert not slow.done()
        with pytest.raises(GrammarRefused, match="more than 5 s to compile"):
            await slow
        await loaded.compile(Grammar("regex", "b"))

    asyncio.run(main())
    loaded.close()


def test_a_grammar_that_a_usual_stack_is_too_small_for_is_compiled(patient: Grammars) -> None:
    asyncio.run(patient.compile(Grammar("lark", DEEP)))


def test_a_trial_that_was_killed_is_started_again(patient: Grammars) -> None:
    for trial in patient._trials:
        trial._start().kill()
    asyncio.run(patient.compile(Grammar("regex", "a")))


def test_a_trial_that_does_not_start_is_no_mistake_of_the_grammar(
    patient: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "_command", lambda _: ["false"])
    with pytest.raises(CompilerUnavailable, match="does not start"):
        asyncio.run(patient.compile(Grammar("regex", "d")))
    monkeypatch.setattr(grammars, "_command", lambda _: ["/no such program"])
    with pytest.raises(CompilerUnavailable, match="No such file"):
        asyncio.run(patient.compile(Grammar("regex", "d")))
    monkeypatch.undo()
    asyncio.run(patient.compile(Grammar("regex", "d")))


def test_a_grammar_that_its_trial_dies_of_is_refused_and_the_next_one_is_compiled(
    patient: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As one that overflows its stack: it reads the grammar, and does not answer.
    dying = [sys.executable, "-c", "print('{}', flush=True); input(); import os; os.abort()"]
    monkeypatch.setattr(grammars, "_command", lambda _: dying)
    assert "memory or stack" in refusal(patient, "regex", "b")
    monkeypatch.undo()
    asyncio.run(patient.compile(Grammar("regex", "c")))


def test_grammars_are_kept_by_content_and_dropped_when_they_are_too_many(
    patient: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "MAX_KEPT", 2)

    async def main() -> None:
        first = await patient.compile(Grammar("regex", "a"))
        assert await patient.compile(Grammar("regex", "a")) is first
        assert await patient.compile(Grammar("lark", 'start: "a"')) is not first
        await patient.compile(Grammar("regex", "b"))
        assert await patient.compile(Grammar("regex", "a")) is not first
        monkeypatch.setattr(grammars, "MAX_KEPT_BYTES", 3)
        long = await patient.compile(Grammar("regex", "abcd"))
        assert await patient.compile(Grammar("regex", "abcd")) is not long

    asyncio.run(main())


def test_too_many_grammars_at_once_are_refused(patient: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "MAX_WAITING", 1)

    async def main() -> None:
        outcomes = await asyncio.gather(
            *(patient.compile(Grammar("regex", text)) for text in ("a", "a", "b")), return_exceptions=True
        )
        assert outcomes[0] is outcomes[1]
        assert isinstance(outcomes[2], CompilerUnavailable)
        assert outcomes[2].limit == 1

    asyncio.run(main())


def test_what_a_model_lacks_for_grammars_is_named(tokenizer_path: Path, tmp_path: Path) -> None:
    def reason(path: Path | None, end_token_ids: Sequence[int]) -> str:
        loaded = load_grammars(path, vocab_size=VOCAB_SIZE, end_token_ids=end_token_ids)
        assert isinstance(loaded, NoGrammars)
        return loaded.reason

    assert "no tokenizer" in reason(None, [1])
    assert "end token" in reason(tokenizer_path, [])
    broken = tmp_path / "tokenizer.json"
    broken.write_text("{}")
    assert "can't be used" in reason(broken, [1])


@pytest.mark.parametrize("texts", [["a", "b"], ["", "x"], ['q"uo\n\\te\x01é日/', "%", "/a/"]])
def test_a_choice_allows_its_texts_and_no_other(tokenizer: LLTokenizer, texts: list[str]) -> None:
    grammar = translate("choice", json.dumps(texts))
    for text in texts:
        matcher = make_matcher(tokenizer, grammar)
        assert matcher.consume_tokens(ids_of(text)), matcher.get_error()
        assert matcher.is_accepting()
    assert make_matcher(tokenizer, grammar).try_consume_tokens(ids_of("other")) == 0


# -- following ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "space", "is_allowed"),
    [
        ({}, "", True),
        ({}, " ", True),
        ({}, " " * 2, False),
        ({}, "\n", False),
        ({"x-guidance": {"whitespace_flexible": True}}, "\n" + " " * 31, True),
        ({"x-guidance": {"whitespace_flexible": True}}, " " * 33, False),
        ({"x-guidance": {"whitespace_flexible": False}}, "", True),
        ({"x-guidance": {"whitespace_flexible": False}}, " ", False),
        ({"x-guidance": {"whitespace_pattern": "[x]"}}, "x", True),
    ],
)
def test_a_schema_says_which_white_space_is_allowed(
    tokenizer: LLTokenizer, options: dict[str, Any], space: str, is_allowed: bool
) -> None:
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]} | options
    matcher = make_matcher(tokenizer, translate("json_schema", json.dumps(schema)))
    token_ids = ids_of(f'{{"a":{space}1')
    assert (matcher.try_consume_tokens(token_ids) == len(token_ids)) is is_allowed


def test_tokens_before_the_output_say_nothing_and_those_behind_are_taken(tokenizer: LLTokenizer) -> None:
    following = follow(tokenizer, "xyz")
    x, y, z = ids_of("xyz")
    following.run(0, [7, 7])
    assert not following.advance(2)
    following.run(2, [7, x, y])
    assert following.advance(BEGINS_AT + 2)
    assert (following.error, following.tokens, following.consumed) == ("", [x, y], 2)
    assert following.matcher.validate_tokens([z]) == 1


def test_a_fork_goes_on_from_an_earlier_token_with_others(tokenizer: LLTokenizer) -> None:
    following = follow(tokenizer, "x(yz|zy)")
    x, y, z = ids_of("xyz")
    following.run(BEGINS_AT, [x, y])
    assert following.advance(BEGINS_AT + 2)
    child = following.fork()
    child.run(BEGINS_AT + 1, [z])
    assert child.advance(BEGINS_AT + 2)
    assert (child.error, child.matcher.validate_tokens([y]), following.matcher.validate_tokens([z])) == ("", 1, 1)
    youngest = following.fork()
    assert youngest.advance(BEGINS_AT)
    assert youngest.matcher.validate_tokens([x]) == 1


def test_a_chunk_of_known_tokens_that_runs_again_leaves_those_behind_it(tokenizer: LLTokenizer) -> None:
    following = follow(tokenizer, "x{9}")
    (x,) = ids_of("x")
    following.tokens = [x] * 4
    following.run(1, [7, 7, x])
    following.run(4, [x, x, x])
    assert following.advance(7)
    assert (following.error, following.consumed) == ("", 4)


def test_what_does_not_match_or_is_not_known_is_an_error_that_stays(tokenizer: LLTokenizer) -> None:
    following = follow(tokenizer, "xy")
    following.run(BEGINS_AT, ids_of("q"))
    assert following.advance(BEGINS_AT + 1)
    assert following.error
    assert following.fork().error
    unknown = follow(tokenizer, "xy")
    assert unknown.advance(BEGINS_AT + 1)
    assert "not all generated tokens" in unknown.error


def test_tokens_given_at_the_beginning_have_to_match(patient: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "PATIENCE_S", DEADLINE_S)  # the threads have the lowest priority
    grammar = Grammar("regex", "xy")
    following = asyncio.run(patient.follow(grammar, begins_at=4, tokens=ids_of("x")))
    assert following.consumed == 1
    with pytest.raises(GrammarRefused, match="do not match"):
        asyncio.run(patient.follow(grammar, begins_at=4, tokens=ids_of("q")))


# -- masks --------------------------------------------------------------------------------------------------------


@pytest.fixture
def rows() -> GrammarRows:
    table = SequenceTable(max_num_seqs=4, max_blocks_per_seq=4, device="cpu")
    for _ in range(4):
        table.add()
    return GrammarRows(table, vocab_size=VOCAB_SIZE, end_token_ids=[END_ID], patience_s=DEADLINE_S)


def test_a_mask_allows_what_continues_the_text_and_the_end_token_behind_it(
    rows: GrammarRows, tokenizer: LLTokenizer
) -> None:
    (x,) = ids_of("x")
    rows.set(1, follow(tokenizer, "x"))
    assert rows.follows([0, 1])
    assert not rows.follows([0, 2])
    masks = rows.finish(rows.begin([MaskedRun(0, 0, 3, [1, 2, 3], True), MaskedRun(1, 0, BEGINS_AT, [7, 7, 7], True)]))
    assert masks.rows == (1,)
    assert allowed(masks.bits[0]) == {x}
    rows._table.store_sampled([1], torch.tensor([x]), [BEGINS_AT])
    masks = rows.finish(rows.begin([MaskedRun(1, BEGINS_AT, 1, None, True)]))
    assert allowed(masks.bits[0]) == {END_ID}
    rows._table.store_sampled([1], torch.tensor([END_ID]), [BEGINS_AT + 1])
    masks = rows.finish(rows.begin([MaskedRun(1, BEGINS_AT + 1, 1, None, True)]))
    assert (allowed(masks.bits[0]), masks.failures) == ({END_ID}, {})


def test_a_row_that_can_not_follow_gets_an_end_token_and_says_why(rows: GrammarRows, tokenizer: LLTokenizer) -> None:
    rows.set(1, follow(tokenizer, "xx"))
    masks = rows.finish(rows.begin([MaskedRun(1, 0, BEGINS_AT + 1, [7, 7, 7, *ids_of("q")], True)]))
    assert allowed(masks.bits[0]) == {END_ID}
    assert masks.failures[1]


PROMPT = [7] * BEGINS_AT


class Held:
    """Masks of some sequences that are not made before release()."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *held: Following) -> None:
        self._held, self._released = held, threading.Event()
        in_time = Following.write_mask

        def write_mask(following: Following, position: int, bits: Bits) -> None:
            if any(following is each for each in self._held):
                assert self._released.wait(DEADLINE_S)
            in_time(following, position, bits)

        monkeypatch.setattr(Following, "write_mask", write_mask)

    def release(self) -> None:
        self._released.set()


def masks_of(rows: GrammarRows, *runs: MaskedRun) -> dict[int, tuple[str, set[int]]]:
    """Return for each row "late", "failed" or "", and its allowed tokens."""
    masks = rows.finish(rows.begin(runs))
    kinds = {row: "late" if row in masks.late else "failed" if row in masks.failures else "" for row in masks.rows}
    return {row: (kinds[row], allowed(bits)) for row, bits in zip(masks.rows, masks.bits, strict=True)}


def test_a_row_with_a_late_mask_misses_its_step_and_the_others_do_not(
    rows: GrammarRows, tokenizer: LLTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    aside = MasksAside(vocab_size=VOCAB_SIZE)
    slow = follow(tokenizer, "x{1,5}", aside=aside)
    held = Held(monkeypatch, slow)
    rows._patience_s = 0.01
    rows.set(1, slow)
    rows.set(2, follow(tokenizer, "y"))
    runs = [MaskedRun(row, 0, BEGINS_AT, PROMPT, True) for row in (1, 2)]
    assert masks_of(rows, *runs) == {1: ("late", {END_ID}), 2: ("", set(ids_of("y")))}
    rows._patience_s = DEADLINE_S
    rows._table.store_sampled([1, 2], torch.tensor([END_ID, *ids_of("y")]), [BEGINS_AT] * 2)
    behind = [MaskedRun(row, BEGINS_AT, 1, None, True) for row in (1, 2)]
    assert masks_of(rows, *behind) == {1: ("late", {END_ID}), 2: ("", {END_ID})}, "the token before it means nothing"
    making = aside.find(slow.compiled, [])
    assert making is not None
    assert not making.is_made
    held.release()
    making.work.result(DEADLINE_S)
    rows.set(1, making.follow(begins_at=BEGINS_AT))
    assert masks_of(rows, runs[0]) == {1: ("", set(ids_of("x")))}
    made = asyncio.run(aside.make(slow.compiled, ids_of("x")))
    assert (made.following.tokens, allowed(made.bits)) == (ids_of("x"), {*ids_of("x"), END_ID})


def test_a_row_whose_last_mask_was_late_waits_for_none_in_a_step(rows: GrammarRows, tokenizer: LLTokenizer) -> None:
    following = follow(tokenizer, "xy")
    following.is_costly = True
    rows.set(1, following)
    run = MaskedRun(1, 0, BEGINS_AT, PROMPT, True)
    in_work = rows.begin([run])
    assert not in_work.work
    assert rows.finish(in_work).late == {1}


def test_a_token_that_means_nothing_can_be_taken_back(
    rows: GrammarRows, tokenizer: LLTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = follow(tokenizer, "xx")
    held = Held(monkeypatch, slow)
    rows._patience_s = 0.01
    rows.set(1, slow)
    assert masks_of(rows, MaskedRun(1, 0, BEGINS_AT, PROMPT, True)) == {1: ("late", {END_ID})}
    rows.fork(1, 2)
    rows._patience_s = DEADLINE_S
    for row in (1, 2):
        rows._following[row].is_costly = False
        assert masks_of(rows, MaskedRun(row, BEGINS_AT - 1, 1, [7], True)) == {row: ("", set(ids_of("x")))}
    held.release()


def test_rows_that_wait_behind_late_masks_are_not_late(
    rows: GrammarRows, tokenizer: LLTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = follow(tokenizer, "x{1,5}")
    sample = slow.fork()
    held = Held(monkeypatch, slow, sample)
    rows._patience_s = 0.01
    rows._threads = Threads(1, "masks")
    for row, following in enumerate((slow, follow(tokenizer, "y"), sample, follow(tokenizer, "z"))):
        rows.set(row, following)
    found = masks_of(rows, *(MaskedRun(row, 0, BEGINS_AT, PROMPT, True) for row in range(4)))
    late = ("late", {END_ID})
    assert found == {0: late, 1: ("", set(ids_of("y"))), 2: late, 3: ("", set(ids_of("z")))}
    held.release()


# -- masks made aside ---------------------------------------------------------------------------------------------


def test_a_mask_made_aside_is_the_one_of_the_step_that_follows(patient: Grammars, rows: GrammarRows) -> None:
    grammar = Grammar("regex", "xy|xz")
    asyncio.run(patient.prepare(grammar, ids_of("x")))
    following = asyncio.run(patient.follow(grammar, begins_at=BEGINS_AT, tokens=ids_of("x")))
    assert following.has_ready(BEGINS_AT + 1)
    rows.set(1, following)
    run = MaskedRun(1, 0, BEGINS_AT + 1, PROMPT + ids_of("x"), True)
    assert masks_of(rows, run) == {1: ("", {*ids_of("y"), *ids_of("z")})}


def test_a_mask_aside_begins_behind_the_one_before_it(patient: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    grammar, taken = Grammar("regex", "x*"), []
    consume = Following._consume

    def count(following: Following, new: list[int]) -> None:
        taken.append(len(new))
        consume(following, new)

    monkeypatch.setattr(Following, "_consume", count)
    for length in (5, 6, 7):
        asyncio.run(patient.prepare(grammar, ids_of("x" * length)))
    assert taken == [5, 1, 1]


def test_a_sequence_with_tokens_that_take_long_to_check_is_put_aside_and_others_are_not(
    patient: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()
    advance = Following.advance

    def slow_for_x(following: Following, position: int) -> bool:
        if following.tokens == ids_of("x"):
            assert goes_on.wait(DEADLINE_S)
        return advance(following, position)

    async def main() -> None:
        grammar = Grammar("regex", "[xyz]")
        slow = await patient.follow(grammar, begins_at=4, tokens=ids_of("x"))
        assert slow.is_costly
        assert not slow.has_ready(5)
        await patient.prepare(grammar, ids_of("y"))
        assert (await patient.follow(grammar, begins_at=4, tokens=ids_of("y"))).has_ready(5)

    monkeypatch.setattr(Following, "advance", slow_for_x)
    patient._aside._threads = Threads(2, "masks aside", is_aside=True)
    asyncio.run(main())
    goes_on.set()


def test_a_mask_that_takes_more_than_its_time_ends_its_grammar(
    patient: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Event()

    def spin(following: Following, position: int, bits: Bits) -> None:
        begun_at = time.thread_time()
        while time.thread_time() - begun_at < 2 * STUCK_S and not ended.is_set():
            pass

    monkeypatch.setattr(Following, "write_mask", spin)
    with pytest.raises(GrammarRefused, match="more than 1 s to check"):
        asyncio.run(patient.prepare(Grammar("regex", "x"), []))
    assert num_stuck() == 1
    ended.set()
    assert "take too long" in refusal(patient, "regex", "x")


def test_of_masks_that_wait_that_of_the_cheapest_grammar_is_made_first() -> None:
    goes_on, made = threading.Event(), []
    threads = Threads(1, "masks aside", is_aside=True)
    first = threads.submit(lambda: goes_on.wait(DEADLINE_S))
    works = [threads.submit(partial(made.append, cost), cost=cost) for cost in (3.0, 1.0, 2.0, 1.0)]
    goes_on.set()
    for work in (first, *works):
        work.result(DEADLINE_S)
    assert made == [1.0, 1.0, 2.0, 3.0]


def test_while_threads_are_at_what_was_given_up_no_other_grammar_is_compiled(patient: Grammars) -> None:
    goes_on, begun = threading.Event(), threading.Semaphore(0)
    asyncio.run(patient.compile(Grammar("regex", "kept")))

    def stick() -> None:
        begun.release()
        assert goes_on.wait(DEADLINE_S)

    threads = [Threads(1, "stuck") for _ in range(MAX_STUCK)]
    works = [each.submit(stick) for each in threads]
    assert all(begun.acquire(timeout=DEADLINE_S) for _ in works)
    for each in threads:
        each.give_up()
    with pytest.raises(CompilerUnavailable, match="given up"):
        asyncio.run(patient.compile(Grammar("regex", "another")))
    asyncio.run(patient.compile(Grammar("regex", "kept")))
    goes_on.set()
    for work in works:
        work.result(DEADLINE_S)
    asyncio.run(patient.compile(Grammar("regex", "another")))


def test_a_grammar_found_slow_is_refused_from_then_on(patient: Grammars) -> None:
    grammar = Grammar("regex", "x")
    asyncio.run(patient.compile(grammar)).is_slow = True
    assert "take too long" in refusal(patient, "regex", "x")


def test_masks_come_before_every_other_filter_and_leave_other_rows_and_log_probabilities() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(3, VOCAB_SIZE, generator=generator)
    sampler = Sampler(max_num_seqs=3, vocab_size=VOCAB_SIZE, device="cpu")

    def set_params(row: int) -> None:
        params = SamplingParams(temperature=0.9, top_k=3, top_p=0.9, seed=row, num_logprobs=2, repetition_penalty=1.2)
        sampler.set_params(row, params, prompt_token_ids=[5])

    for row in range(3):
        set_params(row)
    least = logits[1].argsort()[:2].tolist()
    bits = np.zeros((1, -(-VOCAB_SIZE // 32) * 4), dtype=np.uint8)
    for token in least:
        bits[0, token // 8] |= 1 << token % 8
    before = logits.clone()
    free = sampler.sample(logits, [0, 1, 2], [9, 9, 9])
    for row in range(3):  # which forgets what was sampled
        set_params(row)
    bound = sampler.sample(logits, [0, 1, 2], [9, 9, 9], Masks((1,), bits))
    assert torch.equal(logits, before)
    assert bound.tokens[1].item() in least
    assert bound.tokens[[0, 2]].tolist() == free.tokens[[0, 2]].tolist()
    assert torch.equal(bound.top_logprobs, free.top_logprobs)  # type: ignore[arg-type]
    assert bound.chosen_logprobs is not None
    assert bound.chosen_logprobs[1] == pytest.approx(logits[1].log_softmax(-1)[bound.tokens[1]].item(), abs=1e-5)
    NO_MASKS.apply(logits, [0, 1, 2])
    assert torch.equal(logits, before)


def test_a_mask_is_written_into_the_rows_that_have_one() -> None:
    """Not a copy of the batch: only log-probabilities need the logits as they were."""
    logits = torch.randn(4, VOCAB_SIZE, generator=torch.Generator().manual_seed(4))
    logits[2, 0], logits[2, 9] = torch.inf, -torch.inf
    allowed = [torch.randperm(VOCAB_SIZE)[: VOCAB_SIZE // 2].tolist() for _ in range(2)]
    bits = np.zeros((2, -(-VOCAB_SIZE // 32) * 4), dtype=np.uint8)
    expected = logits.clone()
    for place, row in enumerate((2, 0)):
        np.bitwise_or.at(
            bits[place], [token // 8 for token in allowed[place]], [1 << token % 8 for token in allowed[place]]
        )
        expected[row, [token for token in range(VOCAB_SIZE) if token not in allowed[place]]] = -torch.inf
    Masks((7, 5), bits).apply(logits, [5, 6, 7, 8])
    assert torch.equal(logits, expected)
