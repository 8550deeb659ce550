"""Grammars of sequences: compiled off the model thread, kept by content, and followed token by token.

A grammar is compiled twice. First in a separate process (grammar_trial): it is killed when it takes too much time,
and fails when it takes too much memory or stack. Then here, on a thread. So no grammar ends the worker, and neither
the event loop nor the model thread waits for one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import queue
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import takewhile
from pathlib import Path

from llguidance import LLMatcher, LLTokenizer

from quire.worker.sampling.grammar_trial import describe, large_stacks, load_tokenizer, make_matcher

log = logging.getLogger(__name__)

MAX_GRAMMAR_BYTES = 65_536
COMPILE_TIMEOUT_S = 5.0
NUM_COMPILERS = 2
MAX_WAITING = 64
"""Grammars that wait for a compiler."""
MAX_KEPT = 256
MAX_KEPT_BYTES = 4 * 2**20
"""The most bytes of the texts of compiled grammars."""
MAX_STUCK = 2
"""Threads that may be at work that was given up; while they are so many, no other grammar is compiled."""


class GrammarRefused(Exception):
    """A grammar can't be used; the message says why. It is kept, unless another attempt may end otherwise."""

    def __init__(self, message: str, *, is_kept: bool = True) -> None:
        super().__init__(message)
        self.is_kept = is_kept


class CompilerUnavailable(Exception):
    """The worker can't compile any grammar now; limit is the number that was reached."""

    def __init__(self, message: str, *, limit: int) -> None:
        super().__init__(message)
        self.limit = limit


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar as a client sent it: kind is the field of the contract; the text of a choice is a list as JSON."""

    kind: str
    text: str

    @property
    def key(self) -> bytes:
        return sha256(f"{self.kind}\0{self.text}".encode()).digest()

    @property
    def num_bytes(self) -> int:
        return len(self.text.encode())

    def check(self) -> None:
        """Raises GrammarRefused for a text that is too long."""
        if self.num_bytes > MAX_GRAMMAR_BYTES:
            raise GrammarRefused(f"it has {self.num_bytes} bytes, at most {MAX_GRAMMAR_BYTES} are allowed")


@dataclass(slots=True, eq=False)
class Compiled:
    """A grammar's matcher at the beginning of a text, to be copied; is_slow if a token took too long to check."""

    matcher: LLMatcher
    end_token_ids: frozenset[int]
    is_slow: bool = False


@dataclass(slots=True)
class Following:
    """A sequence that follows a grammar.

    begins_at   position of its first generated token
    tokens      generated tokens as far as they are known, from there on
    consumed    how many of these the matcher has taken; it takes no end token, nor tokens after one
    has_ended   True if an end token is among those of the last advance()
    error       the reason why it can't be followed any more; "" if it can
    """

    compiled: Compiled
    matcher: LLMatcher
    begins_at: int
    tokens: list[int] = field(default_factory=list)
    consumed: int = 0
    has_ended: bool = False
    error: str = ""

    def fork(self) -> Following:
        """Return a copy for another sequence, which may continue from an earlier token."""
        matcher, tokens = self.matcher.deep_copy(), list(self.tokens)
        return Following(self.compiled, matcher, self.begins_at, tokens, self.consumed, error=self.error)

    def run(self, start: int, token_ids: Sequence[int]) -> None:
        """Record tokens that run from position `start` on."""
        new = list(token_ids[max(0, self.begins_at - start) :])
        offset = max(0, start - self.begins_at)
        if new and offset <= len(self.tokens) and self.tokens[offset : offset + len(new)] != new:
            self._truncate(offset)
            self.tokens += new

    def advance(self, position: int) -> bool:
        """Let the matcher take the tokens before a position. Returns True if the grammar restricts the next token."""
        num_tokens = position - self.begins_at
        if num_tokens < 0:
            return False
        if num_tokens > len(self.tokens):
            self.error = self.error or f"not all generated tokens before position {position} are known"
            return True
        self._truncate(num_tokens)
        if not self.error:
            self._consume(self.tokens[self.consumed :])
        return True

    def _consume(self, new: list[int]) -> None:
        text = list(takewhile(lambda token: token not in self.compiled.end_token_ids, new))
        num_taken = self.matcher.try_consume_tokens(text)
        self.consumed += num_taken
        self.has_ended = len(text) < len(new)
        if num_taken < len(text) or (self.has_ended and not self.matcher.is_accepting()):
            at = self.begins_at + self.consumed
            self.error = describe(self.matcher.get_error()) or f"the token at position {at} does not match"

    def _truncate(self, num_tokens: int) -> None:
        """Forget all generated tokens but the first num_tokens."""
        if self.consumed > num_tokens:
            if not self.matcher.rollback(self.consumed - num_tokens):
                self.error = self.error or describe(self.matcher.get_error())
            self.consumed = num_tokens
        del self.tokens[num_tokens:]


class Work(Future[None]):
    """The work of a thread, and the time at which it began."""

    def __init__(self, call: Callable[[], object]) -> None:
        super().__init__()
        self._call = call
        self._begun_at: float | None = None

    def has_taken(self, seconds: float, *, since: float = 0.0) -> bool:
        """True if a thread has been at it for so long, and since that time of time.monotonic()."""
        return self._begun_at is not None and time.monotonic() - max(self._begun_at, since) >= seconds

    def run(self) -> None:
        """Do it, unless it was cancelled."""
        if not self.set_running_or_notify_cancel():
            return
        self._begun_at = time.monotonic()
        try:
            self._call()
        except BaseException as error:
            self.set_exception(error)
        else:
            self.set_result(None)


_given_up: set[Work] = set()


def num_stuck() -> int:
    """Return the number of threads of this process that are at work that was given up."""
    _given_up.difference_update([work for work in list(_given_up) if work.done()])
    return len(_given_up)


class Threads:
    """Threads for work that may never end. They don't keep the process from ending."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._num_threads = num_threads
        self._name = name
        self._queue: queue.SimpleQueue[Work | None] | None = None
        self._open: set[Work] = set()

    def submit(self, call: Callable[[], object]) -> Work:
        """Run `call` on the next free thread; the future gets its result or its exception."""
        work = Work(call)
        self._open.add(work)
        work.add_done_callback(lambda _: self._open.discard(work))
        self._put(work)
        return work

    def _put(self, work: Work) -> None:
        if self._queue is None:
            self._queue = queue.SimpleQueue()
            for _ in range(self._num_threads):
                threading.Thread(target=_work_off, args=(self._queue,), name=self._name, daemon=True).start()
        self._queue.put(work)

    def give_up(self) -> None:
        """Abandon the running threads: new ones do the queued work and later submissions."""
        left, self._queue = self._queue, None
        if left is None:
            return
        waiting: list[Work] = []
        with contextlib.suppress(queue.Empty):
            while (work := left.get_nowait()) is not None:
                waiting.append(work)
        for _ in range(self._num_threads):
            left.put(None)
        _given_up.update(work for work in list(self._open) if work.running())
        for work in waiting:
            self._put(work)


def _work_off(work: queue.SimpleQueue[Work | None]) -> None:
    while (each := work.get()) is not None:
        each.run()


def _command(arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-P", "-m", "quire.worker.sampling.grammar_trial", *arguments]


class GrammarTrial:
    """The process that compiles first; it is started when it is needed."""

    def __init__(self, arguments: Sequence[str], *, timeout_s: float) -> None:
        self._arguments = arguments
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[str] | None = None

    def translate(self, grammar: Grammar) -> str:
        """Return a grammar that can be compiled, as llguidance takes it. Raises GrammarRefused, CompilerUnavailable."""
        # A process that fails on a grammar fails again; one that was killed from outside does not.
        answer = self._ask(grammar) or self._ask(grammar)
        if answer is None:
            raise GrammarRefused("it takes too much memory or stack to compile")
        if "error" in answer:
            raise GrammarRefused(answer["error"])
        return answer["grammar"]

    def _ask(self, grammar: Grammar) -> dict[str, str] | None:
        """Return the answer of the process, None if it ends.

        Raises GrammarRefused if it takes too long, CompilerUnavailable if it does not start.
        """
        process = self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        killed = threading.Event()

        def kill() -> None:
            killed.set()
            process.kill()

        timer = threading.Timer(self._timeout_s, kill)
        timer.start()
        try:
            process.stdin.write(json.dumps({"kind": grammar.kind, "text": grammar.text}) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        if not line:
            self.close()
            if killed.is_set():
                raise GrammarRefused(f"it takes more than {self._timeout_s:g} s to compile", is_kept=False)
            return None
        answer: dict[str, str] = json.loads(line)
        return answer

    def _start(self) -> subprocess.Popen[str]:
        """Return the process, when it has its tokenizer."""
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                _command(self._arguments),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                encoding="utf-8",
            )
            assert self._process.stdout is not None
            if not self._process.stdout.readline():  # the first line says that it is ready
                self.close()
                raise CompilerUnavailable("a process that compiles grammars does not start", limit=NUM_COMPILERS)
        return self._process

    def close(self) -> None:
        """End the process."""
        if self._process is None:
            return
        self._process.kill()
        self._process.communicate()
        self._process = None


Result = Compiled | GrammarRefused | CompilerUnavailable


class Grammars:
    """The compiled grammars of one model, and the threads that compile. Lives on the event loop."""

    def __init__(
        self, tokenizer: LLTokenizer, trial_arguments: Sequence[str], *, timeout_s: float = COMPILE_TIMEOUT_S
    ) -> None:
        self.tokenizer = tokenizer
        self._timeout_s = timeout_s
        self._replays = Threads(NUM_COMPILERS, "replays")
        self._kept: OrderedDict[bytes, tuple[int, Result]] = OrderedDict()
        self._kept_bytes = 0
        self._compiling: dict[bytes, asyncio.Future[Result]] = {}
        self._queue: queue.SimpleQueue[tuple[Grammar, Future[Result]] | None] = queue.SimpleQueue()
        self._trials = [GrammarTrial(trial_arguments, timeout_s=timeout_s) for _ in range(NUM_COMPILERS)]
        with large_stacks():
            for trial in self._trials:
                threading.Thread(target=self._compile_all, args=(trial,), name="grammars", daemon=True).start()

    async def compile(self, grammar: Grammar) -> Compiled:
        """Return a grammar when it is compiled. Raises GrammarRefused, CompilerUnavailable."""
        grammar.check()
        key = grammar.key
        kept = self._find(key)
        if kept is None and num_stuck() >= MAX_STUCK:
            raise CompilerUnavailable(f"{MAX_STUCK} threads are at tokens of grammars given up", limit=MAX_STUCK)
        compiled = await asyncio.shield(self._begin(key, grammar)) if kept is None else kept
        if isinstance(compiled, GrammarRefused):
            raise GrammarRefused(str(compiled))
        if isinstance(compiled, CompilerUnavailable):
            raise CompilerUnavailable(str(compiled), limit=compiled.limit)
        if compiled.is_slow:
            raise GrammarRefused("its tokens take too long to check")
        return compiled

    async def follow(self, grammar: Grammar, *, begins_at: int, tokens: Sequence[int]) -> Following:
        """Return a matcher that has taken these generated tokens. Raises GrammarRefused, CompilerUnavailable."""
        compiled = await self.compile(grammar)
        following = Following(compiled, compiled.matcher.deep_copy(), begins_at, list(tokens))
        if tokens:
            await self._replay(following)
        if following.error:
            raise GrammarRefused(f"the tokens generated so far do not match: {following.error}")
        return following

    async def _replay(self, following: Following) -> None:
        """Let the matcher take the tokens generated so far. Raises GrammarRefused if that takes too long."""
        position = following.begins_at + len(following.tokens)
        work = self._replays.submit(lambda: following.advance(position))
        replaying = asyncio.wrap_future(work)
        while not (await asyncio.wait([replaying], timeout=self._timeout_s))[0]:
            if work.has_taken(self._timeout_s):
                self._replays.give_up()
                following.compiled.is_slow = True
                raise GrammarRefused(f"the tokens generated so far take more than {self._timeout_s:g} s to check")
        replaying.result()

    def _find(self, key: bytes) -> Result | None:
        if key not in self._kept:
            return None
        self._kept.move_to_end(key)
        return self._kept[key][1]

    def _begin(self, key: bytes, grammar: Grammar) -> asyncio.Future[Result]:
        if key in self._compiling:
            return self._compiling[key]
        if len(self._compiling) >= MAX_WAITING:
            raise CompilerUnavailable(f"{MAX_WAITING} grammars are being compiled", limit=MAX_WAITING)
        compiling: Future[Result] = Future()
        self._compiling[key] = asyncio.wrap_future(compiling)
        self._compiling[key].add_done_callback(lambda future: self._keep(key, grammar, future.result()))
        self._queue.put((grammar, compiling))
        return self._compiling[key]

    def _keep(self, key: bytes, grammar: Grammar, compiled: Result) -> None:
        del self._compiling[key]
        if isinstance(compiled, CompilerUnavailable) or (isinstance(compiled, GrammarRefused) and not compiled.is_kept):
            return
        self._kept[key] = (grammar.num_bytes, compiled)
        self._kept_bytes += grammar.num_bytes
        while len(self._kept) > MAX_KEPT or self._kept_bytes > MAX_KEPT_BYTES:
            _, (num_bytes, _) = self._kept.popitem(last=False)
            self._kept_bytes -= num_bytes

    def _compile_all(self, trial: GrammarTrial) -> None:
        while (work := self._queue.get()) is not None:
            grammar, compiling = work
            try:
                compiling.set_result(self._compile(trial, grammar))
            except (GrammarRefused, CompilerUnavailable) as refused:
                compiling.set_result(refused)
            except BaseException as error:  # of starting a process, for instance
                log.error("a grammar could not be compiled: %r", error)
                unavailable = CompilerUnavailable(f"grammars can't be compiled: {error!r}", limit=NUM_COMPILERS)
                compiling.set_result(unavailable)
        trial.close()

    def _compile(self, trial: GrammarTrial, grammar: Grammar) -> Compiled:
        matcher = make_matcher(self.tokenizer, trial.translate(grammar))
        if matcher.is_error():
            raise GrammarRefused(describe(matcher.get_error()))
        return Compiled(matcher, frozenset(self.tokenizer.eos_tokens))

    def close(self) -> None:
        """End the threads and their processes after their current work."""
        for _ in self._trials:
            self._queue.put(None)
        self._replays.give_up()


class NoGrammars:
    """Stands for Grammars where none can be followed."""

    def __init__(self, reason: str) -> None:
        self.reason = reason


def load_grammars(
    tokenizer_path: Path | None,
    *,
    vocab_size: int,
    end_token_ids: Sequence[int],
    timeout_s: float = COMPILE_TIMEOUT_S,
) -> Grammars | NoGrammars:
    """Return what compiles a model's grammars, or the reason why nothing can."""
    if tokenizer_path is None:
        return NoGrammars("the model has no tokenizer.json")
    if not end_token_ids:
        return NoGrammars("the model has no end token, so a text could not end")
    try:
        tokenizer = load_tokenizer(tokenizer_path, vocab_size=vocab_size, end_token_ids=list(end_token_ids))
    except (OSError, ValueError) as error:
        return NoGrammars(f"the model's tokenizer can't be used: {str(error)[:200]}")
    arguments = [str(tokenizer_path), str(vocab_size), json.dumps(list(end_token_ids))]
    return Grammars(tokenizer, arguments, timeout_s=timeout_s)
