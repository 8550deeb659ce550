"""One request of a caller: its sequences, and what the caller has not read of their output."""

import asyncio
from collections import abc
from dataclasses import replace

from quire.client.engine.caching import CacheOutcome
from quire.client.engine.metrics import RequestTimes
from quire.client.engine.outputs import Chunk
from quire.client.engine.prompt_logprobs import PromptLogprobs
from quire.client.engine.sample_output import SampleOutput
from quire.client.engine.scheduling.beam_search import BeamSearch
from quire.client.engine.scheduling.sequence import BeamGroup, Delivered, FinishReason, Sequence
from quire.client.engine.tracing import RequestSpan
from quire.client.errors import QuireError, RequestFailed, after_delivery


class Request:
    """A caller's request: the output of its samples, and a signal that there is more of it.

    The caller is woken once for all that came meanwhile.
    """

    __slots__ = (
        *("_has_news", "_loop", "_num_unread", "_of_prompt", "_unread", "_waiter", "delivered", "error", "finished"),
        *("first", "is_whole", "mask_s", "open", "outputs", "sequences", "span", "tells_of_prompt", "timer", "times"),
        "waits",
    )

    def __init__(
        self,
        sequences: list[Sequence],
        outputs: abc.Iterable[SampleOutput],
        times: RequestTimes,
        span: RequestSpan | None,
        *,
        num_samples: int = 1,
        is_whole: bool = False,
        delivered: abc.Sequence[Delivered] | None = None,
    ) -> None:
        """is_whole: the caller reads the first token of each sample, and then their ends."""
        self.sequences = sequences
        self.first = sequences[0]
        self.outputs = {output.index: output for output in outputs}
        self.span = span
        self.times = times
        self.is_whole = is_whole
        self.finished: dict[int, FinishReason] = {}  # reasons that the caller has got, by sample
        self.open = set(self.outputs)  # indexes of samples without a finish_reason
        self.waits = True  # for its first token
        self.timer: asyncio.TimerHandle | None = None
        self.error: QuireError | None = None
        self.mask_s = 0.0  # of the worker's processors, for the masks that no step waited for
        self.tells_of_prompt = delivered is None  # with the first token
        self.delivered = [len(sample.token_ids) for sample in delivered or ()] or [0] * num_samples
        self._unread: dict[int, SampleOutput] = {}  # in the order in which they got something to read
        self._of_prompt: tuple[PromptLogprobs | None, CacheOutcome | None] | None = None
        self._num_unread = 0
        self._has_news = False
        self._waiter: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()

    # For the engine's task.

    def tell_of_prompt(self, logprobs: PromptLogprobs | None) -> None:
        """Add results for the prompt to the chunk that is taken next."""
        self._of_prompt = logprobs, self.first.cache_outcome
        self.tells_of_prompt = False

    def put(self, output: SampleOutput, num_tokens: int) -> int:
        """Count so many more tokens of a sample as unread. Returns the unread tokens of all samples."""
        self._unread[output.index] = output
        self._num_unread += num_tokens
        return self._num_unread

    def wake(self) -> None:
        """Let the caller read."""
        self._has_news = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def fail(self, error: QuireError) -> None:
        self.error = self.error or error
        self._show_silent()
        self.wake()

    def _show_silent(self) -> None:
        """Let the caller read the tokens that were to be read at the end."""
        for sequence in self.sequences:
            if sequence.is_silent and sequence.index in self.open:
                output = self.outputs[sequence.index]
                self.put(output, output.show_all(None))

    def finish_one(self, index: int, reason: FinishReason) -> None:
        """Take a sample as ended. The scheduler may learn of it later."""
        self.finished[index] = reason
        self.open.discard(index)

    def time_out(self) -> None:
        """End the open samples with the tokens generated so far."""
        self._show_silent()
        for index in sorted(self.open):
            output = self.outputs[index]
            output.time_out()
            self.put(output, 0)
            self.finish_one(index, FinishReason.TIMEOUT)
        self.wake()

    @property
    def num_generated(self) -> int:
        """Return the tokens that the caller has or may take, of all samples."""
        return sum(output.num_generated for output in self.outputs.values())

    def outcome(self) -> tuple[int, list[FinishReason | None]]:
        """Return the generated tokens of all samples, and why each has ended."""
        num_tokens = sum(len(sequence.token_ids) - sequence.num_prompt_tokens for sequence in self.sequences)
        return num_tokens, [self.finished.get(each.index, each.finish_reason) for each in self.sequences]

    @property
    def lacks_end(self) -> bool:
        """True if a sequence has ended, and the caller's chunks do not say so. When nothing is left to deliver."""
        return self.error is None and any(
            sequence.finish_reason is not None and sequence.index in self.open for sequence in self.sequences
        )

    # For the caller's task.

    async def news(self) -> None:
        """Wait until there is something to read since the last call."""
        if not self._has_news:
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._has_news = False

    @property
    def has_more(self) -> bool:
        """False once all samples have ended and everything is read."""
        return bool(self.open) or self._has_news

    def unread(self) -> abc.Iterable[SampleOutput]:
        """Return the outputs that got something to read since the last call."""
        unread, self._unread, self._num_unread = self._unread, {}, 0
        return unread.values()

    def read(self, output: SampleOutput) -> Chunk | None:
        """Return what the caller has not read of a sample; None if there is nothing.

        If the tokenizer makes no text of the tokens, this is the request's error.
        """
        try:
            chunk = output.read()
        except Exception as error:
            self.error = self.error or undeliverable(error)
            return None
        if chunk is None:
            return None
        self.delivered[chunk.index] += len(chunk.token_ids)
        if self._of_prompt is not None:
            logprobs, outcome = self._of_prompt
            self._of_prompt = None
            return replace(chunk, prompt_logprobs=logprobs, cache_outcome=outcome)
        return chunk


class BeamRequest(Request):
    """A caller's beam search. It has no samples: it returns its result when it has ended."""

    __slots__ = ("group", "has_ended", "search")

    def __init__(self, group: BeamGroup, search: BeamSearch, times: RequestTimes, span: RequestSpan | None) -> None:
        super().__init__(group.members, (), times, span)
        self.group = group
        self.search = search
        self.has_ended = False

    def outcome(self) -> tuple[int, list[FinishReason | None]]:
        best = self.search.best() if self.has_ended else []
        return sum(len(ended.token_ids) for ended in best), [ended.finish_reason for ended in best]

    @property
    def is_over(self) -> bool:
        """True if its caller has the result or the error. The scheduler may learn of it later."""
        return self.has_ended or self.error is not None

    @property
    def lacks_end(self) -> bool:
        return not self.is_over and not self.sequences

    def end(self) -> None:
        self.has_ended = True
        self.wake()

    def time_out(self) -> None:
        self.search.stop([beam.output_token_ids for beam in self.sequences], FinishReason.TIMEOUT)
        self.end()

    async def wait(self, num_beams: int) -> None:
        """Wait for the end of the search. Raises its error."""
        while not self.has_ended and self.error is None:
            await self.news()
        if self.error is not None:
            raise after_delivery(self.error, [0] * num_beams)


def undeliverable(error: Exception) -> RequestFailed:
    """Return the error of a request with tokens that the tokenizer makes no text of."""
    failed = RequestFailed(f"the tokens can't be made a text: {error!r}")
    failed.__cause__ = error
    return failed
