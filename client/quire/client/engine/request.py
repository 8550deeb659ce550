"""One request of a caller: its sequences, their texts, and the chunks that the caller has not read."""

import asyncio
from collections import abc

from quire.client.engine.metrics import RequestTimes
from quire.client.engine.outputs import Chunk, Mailbox, SampleText
from quire.client.engine.scheduling.beam_search import BeamSearch
from quire.client.engine.scheduling.sequence import BeamGroup, Delivered, FinishReason, Sequence
from quire.client.engine.tracing import RequestSpan
from quire.client.errors import QuireError, RequestFailed, after_delivery


class Request:
    """A caller's request: its samples' texts, and the unread chunks."""

    __slots__ = (
        *("delivered", "error", "finished", "first", "mailbox", "mask_s", "news", "open", "sequences", "span"),
        *("tells_of_prompt", "texts", "timer", "times", "waits"),
    )

    def __init__(
        self,
        sequences: list[Sequence],
        texts: list[SampleText],
        times: RequestTimes,
        span: RequestSpan | None,
        *,
        has_logprobs: bool,
        delivered: abc.Sequence[Delivered] | None = None,
    ) -> None:
        self.sequences = sequences
        self.first = sequences[0]
        self.delivered = [len(sample.token_ids) for sample in delivered or ()] or [0] * len(texts)
        self.span = span
        self.texts = texts
        self.times = times
        self.mailbox = Mailbox(has_logprobs=has_logprobs)
        self.news = asyncio.Event()
        self.finished: dict[int, FinishReason] = {}  # reasons that the caller has got, by sample
        self.open = {sequence.index for sequence in sequences}  # indexes of samples without a finish_reason
        self.waits = True  # for its first token
        self.timer: asyncio.TimerHandle | None = None
        self.error: QuireError | None = None
        self.mask_s = 0.0  # of the worker's processors, for the masks that no step waited for
        self.tells_of_prompt = delivered is None  # with the first token

    def fail(self, error: QuireError) -> None:
        self.error = self.error or error
        self.news.set()

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

    def finish_one(self, index: int, reason: FinishReason) -> None:
        """Take a sample as ended. The scheduler may learn of it later."""
        self.finished[index] = reason
        self.open.discard(index)

    def time_out(self) -> None:
        """End the open samples with the tokens generated so far."""
        for index in sorted(self.open):
            text = self.texts[index].flush()
            self.mailbox.put(index, text=text, token_ids=(), finish_reason=FinishReason.TIMEOUT)
            self.finish_one(index, FinishReason.TIMEOUT)
        self.news.set()

    async def chunks(self) -> abc.AsyncGenerator[Chunk, None]:
        while self.open or self.news.is_set():
            await self.news.wait()
            self.news.clear()
            for chunk in self.mailbox.take():
                self.delivered[chunk.index] += len(chunk.token_ids)
                yield chunk
            if self.error is not None:
                raise after_delivery(self.error, self.delivered)


class BeamRequest(Request):
    """A caller's beam search. It has no samples: it returns its result when it has ended."""

    __slots__ = ("group", "has_ended", "search")

    def __init__(self, group: BeamGroup, search: BeamSearch, times: RequestTimes, span: RequestSpan | None) -> None:
        super().__init__(group.members, [], times, span, has_logprobs=False)
        self.open.clear()
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
        self.news.set()

    def time_out(self) -> None:
        self.search.stop([beam.output_token_ids for beam in self.sequences], FinishReason.TIMEOUT)
        self.end()

    async def wait(self, num_beams: int) -> None:
        """Wait for the end of the search. Raises its error."""
        while not self.has_ended and self.error is None:
            await self.news.wait()
            self.news.clear()
        if self.error is not None:
            raise after_delivery(self.error, [0] * num_beams)


def undeliverable(error: Exception) -> RequestFailed:
    """Return the error of a request with tokens that the tokenizer makes no text of."""
    failed = RequestFailed(f"the tokens can't be made a text: {error!r}")
    failed.__cause__ = error
    return failed
