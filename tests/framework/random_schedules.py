"""Random schedules of a few sequences on a worker's executor, and the logits of each sequence alone.

A schedule draws which sequences run in a step, in which order, and how many tokens of each; and now and then it
preempts one, moves one to the host tier and back, begins one with blocks of another, or forks one. Sequences that
decode have drafts now and then, right ones and wrong ones.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from executor_driver import BLOCK_SIZE, ExecutorDriver, Stream
from model_zoo import VOCAB_SIZE
from torch import Tensor

from quire.worker.memory.kv_pool import KVPool
from quire.worker.memory.step_batch import StepBatch
from quire.worker.model.paged_model import PagedModel
from quire.worker.run.executor import Outcome

MAX_NUM_SEQS = 20
SHARED = 4 * BLOCK_SIZE
# Six short ones run beside others. The last two begin with the same blocks as the first one.
PROMPT_LENGTHS = (30, 19, 5, 2, 3, 1, 4, 6, 2, SHARED + 3, SHARED + 9)
NUM_NEW = 5


class WatchedDriver(ExecutorDriver):
    """A driver that keeps the logits of its last step, [L, vocab_size], in the order of the step."""

    def __init__(self, model: PagedModel) -> None:
        super().__init__(model, max_num_seqs=MAX_NUM_SEQS)
        forward = type(model).forward

        def watched(batch: StepBatch, pool: KVPool) -> Tensor:
            self.logits = forward(model, batch, pool)
            return self.logits

        model.forward = watched  # type: ignore[method-assign]


def make_prompts() -> list[list[int]]:
    draw = random.Random(3)
    prompts = [[draw.randrange(VOCAB_SIZE) for _ in range(length)] for length in PROMPT_LENGTHS]
    return [*prompts[:-2], *(prompts[0][:SHARED] + prompt[SHARED:] for prompt in prompts[-2:])]


@dataclass(frozen=True)
class Alone:
    """A sequence by itself, a token a step: its tokens, and the logits behind each of them but the last."""

    tokens: list[int]
    logits: list[Tensor]


def run_alone(model: PagedModel, prompt: list[int]) -> Alone:
    driver = WatchedDriver(model)
    stream, logits = driver.admit(prompt), []
    while len(stream.tokens) < len(prompt) + NUM_NEW:
        assert driver.step([(stream, 1)]) is Outcome.COMPUTED
        logits.append(driver.logits[0].clone())
    return Alone(stream.tokens, logits)


class Schedule:
    """One schedule on a pool of its own."""

    def __init__(self, model: PagedModel, alone: list[Alone], seed: int) -> None:
        self._draw, self._draw_drafts = random.Random(seed), random.Random(seed)
        self._driver = WatchedDriver(model)
        self._has_states = model.has_recurrent_state
        self._is_offloaded = not self._has_states and not any(self._driver.pool.windowed)
        self._alone = alone
        self._waiting = list(range(len(alone)))
        self._draw.shuffle(self._waiting)
        self._live: list[tuple[int, Stream]] = []
        self._offloaded: list[tuple[int, Stream]] = []
        self._known: set[int] = set()
        """Ids of sequences that have run."""
        self._num_forks = 0
        self.num_drafts = 0

    def run(self) -> Iterator[tuple[int, int]]:
        """Run it to its end; yield sequence and position of each token with logits that differ from those alone."""
        while self._waiting or self._live or self._offloaded:
            self._admit()
            self._disturb()
            counts = self._counts()
            if not counts:
                continue
            drafts = {stream.seq_id: self._guess(seq, stream) for seq, stream, _ in counts}
            firsts = [stream.num_computed + count - 1 for _, stream, count in counts]
            assert (
                self._driver.step([(stream, count) for _, stream, count in counts], drafts=drafts) is Outcome.COMPUTED
            )
            self._known.update(stream.seq_id for _, stream, _ in counts)
            rows = iter(self._driver.logits)
            for (seq, stream, _), first in zip(counts, firsts, strict=True):
                own = list(islice(rows, 1 + len(drafts[stream.seq_id])))
                for position in range(first, stream.num_computed):
                    if not torch.equal(own[position - first], self._alone[seq].logits[position]):
                        yield seq, position
            self._finish()

    def _guess(self, seq: int, stream: Stream) -> list[int]:
        """Return drafts for one that decodes, of its next tokens; the last one may be wrong."""
        length = len(stream.tokens)
        room = PROMPT_LENGTHS[seq] + NUM_NEW - length - 1
        if (
            self._has_states
            or room < 1
            or stream.sampled_at != stream.num_computed
            or length != stream.num_computed + 1
        ):
            return []
        drafts = self._alone[seq].tokens[length : length + self._draw_drafts.randint(0, min(3, room))]
        if drafts and self._draw_drafts.random() < 0.5:
            drafts[-1] = (drafts[-1] + 1) % VOCAB_SIZE
        self.num_drafts += len(drafts)
        return drafts

    def _admit(self) -> None:
        while self._waiting and len(self._live) < 14 and self._draw.random() < 0.6:
            seq = self._waiting.pop()
            stream = self._driver.admit(self._alone[seq].tokens[: PROMPT_LENGTHS[seq]])
            self._share(seq, stream)
            self._live.append((seq, stream))

    def _share(self, seq: int, stream: Stream) -> None:
        """Begin with the blocks of another sequence with the same first tokens, if they are there."""
        family = (0, len(self._alone) - 1, len(self._alone) - 2)
        owners = [each for number, each in self._live if number in family and each.num_computed >= SHARED]
        if self._has_states or seq not in family or not owners or any(map(self._passes, owners)):
            return
        self._driver.share(self._draw.choice(owners), stream, self._draw.randint(1, 4) * BLOCK_SIZE)

    def _passes(self, stream: Stream) -> bool:
        """True if blocks at its beginning are given up already."""
        return any(group.count_passed(stream.num_computed, BLOCK_SIZE) for group in self._driver.pool.groups)

    def _disturb(self) -> None:
        disturbed = self._draw.choice(self._live) if self._live else None
        if self._offloaded and self._draw.random() < 0.5:
            seq, stream = self._offloaded.pop()
            self._driver.restore(stream)
            self._live.append((seq, stream))
        if disturbed is None:
            return
        seq, stream = disturbed
        choice = self._draw.random() if stream.seq_id in self._known else 1
        if choice < 0.08:
            self._driver.preempt(stream)
            self._share(seq, stream)
        elif choice < 0.14 and len(self._live) > 1 and self._is_offloaded:
            self._live.remove(disturbed)
            self._driver.offload(stream)
            self._offloaded.append(disturbed)
        elif choice < 0.2 and stream.num_computed == len(stream.tokens) - 1 and self._num_forks < 4:
            self._num_forks += 1
            self._live.append((seq, self._driver.fork(stream)))

    def _counts(self) -> list[tuple[int, Stream, int]]:
        """New ones always run: forks are copied, and shared blocks are given, in the step that runs them."""
        chosen = []
        for seq, stream in self._live:
            left = len(stream.tokens) - stream.num_computed
            is_new = stream.seq_id not in self._known
            if is_new or self._draw.random() < 0.8:
                chosen.append((seq, stream, self._draw.choice((left, self._draw.randint(1, left)))))
        if self._live and not chosen:
            chosen = [(*self._live[0], 1)]
        self._draw.shuffle(chosen)
        return chosen

    def _finish(self) -> None:
        for seq, stream in list(self._live):
            if len(stream.tokens) == PROMPT_LENGTHS[seq] + NUM_NEW:
                self._live.remove((seq, stream))
                self._driver.end(stream)
