"""Grammars of sequences: compiled off the model thread, and kept by content.

A grammar is compiled twice. First in a separate process (grammar_trial): it is killed when it takes too much time,
and fails when it takes too much memory or stack. Then here, on a thread. So no grammar ends the worker, and neither
the event loop nor the model thread waits for one.
"""

from __future__ import annotations

import asyncio
import json
import logging
import queue
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from llguidance import LLTokenizer

from quire.compute.v1.sampling_ranges import MAX_GRAMMAR_BYTES
from quire.worker.sampling.following import Compiled, Following
from quire.worker.sampling.grammar_trial import describe, large_stacks, load_tokenizer, make_matcher
from quire.worker.sampling.masks_aside import PATIENCE_S, MasksAside, MaskTooSlow
from quire.worker.sampling.threads import MAX_STUCK, STUCK_S, num_stuck

log = logging.getLogger(__name__)

COMPILE_TIMEOUT_S = 5.0
NUM_COMPILERS = 2
MAX_WAITING = 64
"""Grammars that wait for a compiler."""
MAX_KEPT = 256
MAX_KEPT_BYTES = 4 * 2**20
"""The most bytes of the texts of compiled grammars."""


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
        self._aside = MasksAside(vocab_size=tokenizer.vocab_size)
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

    async def prepare(self, grammar: Grammar, tokens: Sequence[int]) -> float:
        """Make the mask behind these generated tokens, so that no step waits for it.

        Returns the seconds of a processor that it has taken. Raises GrammarRefused, CompilerUnavailable.
        """
        compiled = await self.compile(grammar)
        try:
            made = await self._aside.make(compiled, tokens)
        except MaskTooSlow:
            raise GrammarRefused(f"a token takes more than {STUCK_S:g} s to check") from None
        _refuse_unmatched(made.following, tokens)
        return made.work.cpu_s()

    async def follow(self, grammar: Grammar, *, begins_at: int, tokens: Sequence[int]) -> Following:
        """Return a matcher that takes the tokens behind these generated ones.

        Raises GrammarRefused, CompilerUnavailable. A sequence with tokens that take longer to check than a step waits
        misses its step.
        """
        compiled = await self.compile(grammar)
        made = self._aside.begin(compiled, tokens) if tokens else self._aside.find(compiled, tokens)
        if made is None:
            return Following.begin(compiled, begins_at=begins_at)
        if not made.work.done():
            await asyncio.wait([asyncio.wrap_future(made.work)], timeout=PATIENCE_S)
        if made.is_made:
            _refuse_unmatched(made.following, tokens)
            return made.follow(begins_at=begins_at)
        following = Following.begin(compiled, begins_at=begins_at, tokens=tokens)
        following.is_costly = True
        return following

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
        return Compiled(matcher, frozenset(self.tokenizer.eos_tokens), self._aside)

    def close(self) -> None:
        """End the threads and their processes after their current work."""
        for _ in self._trials:
            self._queue.put(None)
        self._aside.close()


def _refuse_unmatched(following: Following, tokens: Sequence[int]) -> None:
    """Raises GrammarRefused if the tokens generated so far do not match."""
    if following.error and tokens:
        raise GrammarRefused(f"the tokens generated so far do not match: {following.error}")
    if following.error:
        raise GrammarRefused(following.error)


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
