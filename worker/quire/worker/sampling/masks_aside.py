"""Masks that are made beside the steps: those that a step does not wait for, and those that a client asks for.

A step waits PATIENCE_S for a mask that a thread is at. A sequence with a later mask is put aside: it misses the step,
and the client takes it out of its plans. The mask is made all the same, and is kept here by its grammar and the tokens
before it. The client waits for it, and admits the sequence again. Then the mask is ready. So a sequence's tokens do not
depend on the time that its masks take.

The threads have the lowest priority of the system. It divides their time among the masks in work; of those that wait,
the mask of the grammar with the least time so far comes first.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

import numpy as np

from quire.worker.sampling.following import Bits, Compiled, Following, ReadyMask
from quire.worker.sampling.threads import STUCK_S, Threads, Work

PATIENCE_S = 0.01
"""A step waits this long for a mask that a thread is at, once its forward is launched and its tokens are known."""
MAX_THREADS = 8
MAX_KEPT = 512
"""Masks that are kept, each with its matcher."""
_POLL_S = 0.05

_Key = tuple[Compiled, bytes]


class MaskTooSlow(Exception):
    """A mask takes more than STUCK_S; the grammar is slow from now on."""


@dataclass(slots=True, eq=False)
class MaskAside:
    """A mask in work: `following` has taken the tokens before it when the work is done."""

    following: Following
    bits: Bits
    work: Work

    @property
    def is_made(self) -> bool:
        """True if it can be used; then following.error says if the tokens before it do not match."""
        return self.work.done() and self.work.exception() is None

    def follow(self, *, begins_at: int) -> Following:
        """Return a sequence with this mask as its next one. It must be made."""
        following = self.following.fork(begins_at=begins_at)
        if not following.error and not self.following.has_ended:
            following.ready = ReadyMask(begins_at + len(following.tokens), self.bits)
        following.is_costly = self.work.cpu_s() > PATIENCE_S
        return following


class MasksAside:
    """The masks of one model's grammars. Its methods are called on the event loop and on the model thread."""

    def __init__(self, *, vocab_size: int) -> None:
        self._num_bytes = -(-vocab_size // 32) * 4
        self._threads = Threads(max(1, min(MAX_THREADS, os.cpu_count() or 1)), "masks aside", is_aside=True)
        self._lock = threading.Lock()
        self._kept: OrderedDict[_Key, MaskAside] = OrderedDict()

    def find(self, compiled: Compiled, tokens: Sequence[int]) -> MaskAside | None:
        """Return the mask behind these generated tokens, made or in work; None if there is none."""
        with self._lock:
            return self._find(_key(compiled, tokens))

    def begin(self, compiled: Compiled, tokens: Sequence[int]) -> MaskAside:
        """Return the mask behind these generated tokens; threads begin to make it if there is none."""
        key = _key(compiled, tokens)
        with self._lock:
            found = self._find(key)
            if found is not None and not (found.work.done() and found.work.exception() is not None):
                return found
            before = self._find(_key(compiled, tokens[:-1])) if tokens else None
            if before is not None and before.is_made and not before.following.error:
                following = before.following.fork(begins_at=0)
            else:
                following = Following.begin(compiled, begins_at=0)
            num_known = len(following.tokens)
            following.run(num_known, tokens[num_known:])
            bits = np.zeros(self._num_bytes, dtype=np.uint8)

            def make() -> None:
                following.advance(len(tokens))
                following.write_mask(len(tokens), bits)

            made = MaskAside(following, bits, self._threads.submit(make, cost=compiled.aside_s))
            made.work.add_done_callback(lambda _: _count(made))
            self._keep(key, made)
            return made

    def adopt(self, following: Following, bits: Bits, work: Work, *, tokens: Sequence[int]) -> None:
        """Keep the mask behind these tokens when it is made: a thread of a step is at it, and goes on aside."""
        work.lower_priority()
        made = MaskAside(following, bits, work)
        work.add_done_callback(lambda _: _finish_adopted(made))
        with self._lock:
            self._keep(_key(following.compiled, tokens), made)

    async def make(self, compiled: Compiled, tokens: Sequence[int]) -> MaskAside:
        """Return the mask behind these generated tokens when it is made. Raises MaskTooSlow."""
        made = self.begin(compiled, tokens)
        making = asyncio.wrap_future(made.work)
        while not (await asyncio.wait([making], timeout=_POLL_S))[0]:
            if made.work.cpu_s() >= STUCK_S:
                self._give_up(made, _key(compiled, tokens))
                raise MaskTooSlow
        making.result()
        return made

    def _give_up(self, made: MaskAside, key: _Key) -> None:
        made.following.compiled.is_slow = True
        self._threads.leave()
        with self._lock:
            self._kept.pop(key, None)

    def _find(self, key: _Key) -> MaskAside | None:
        if key not in self._kept:
            return None
        self._kept.move_to_end(key)
        return self._kept[key]

    def _keep(self, key: _Key, made: MaskAside) -> None:
        self._kept[key] = made
        self._kept.move_to_end(key)
        while len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)

    def close(self) -> None:
        """End the threads after their current work."""
        self._threads.leave()


def _key(compiled: Compiled, tokens: Sequence[int]) -> _Key:
    return compiled, sha256(np.asarray(tokens, dtype=np.int32).tobytes()).digest()


def _count(made: MaskAside) -> None:
    made.following.compiled.aside_s += made.work.cpu_s()


def _finish_adopted(made: MaskAside) -> None:
    made.bits = made.bits.copy()  # of a whole step's masks
    _count(made)
