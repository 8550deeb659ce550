"""The output of one sample, between the engine's task, which adds to it, and the caller's task, which takes it."""

from quire.client.engine.outputs import Chunk, SampleText
from quire.client.engine.prompt_logprobs import TokenLogprobs
from quire.client.engine.scheduling.sequence import FinishReason, Sequence


class SampleOutput:
    """The tokens that a caller may read, up to num_shown, and those that it has taken. They lie in the sequence alone.

    Text is made when it is taken, of many tokens at once. Where stop strings are looked for it is made token by token,
    by the engine's task, since it decides where the sample ends.
    """

    __slots__ = (
        *("_is_over", "_logprobs", "_num_before", "_num_taken", "_pieces", "_sequence", "_text"),
        *("finish_reason", "index", "is_whole", "num_shown"),
    )

    def __init__(self, sequence: Sequence, text: SampleText, *, has_logprobs: bool, is_whole: bool) -> None:
        """The tokens that the sequence has are no output: its prompt, and those that another engine delivered.

        is_whole: the caller wants the tokens behind the first one when the sample ends.
        """
        self.index = sequence.index
        self._sequence = sequence
        self._num_before = self._num_taken = self.num_shown = len(sequence.token_ids)
        self._logprobs: list[TokenLogprobs] | None = [] if has_logprobs else None
        self._pieces: list[str] | None = [] if text.has_stop else None
        self._text = text
        self.is_whole = is_whole
        self._is_over = False  # the caller has the finish_reason
        self.finish_reason: FinishReason | None = None

    @property
    def num_generated(self) -> int:
        """Return the number of tokens that the caller has taken or may take."""
        return self.num_shown - self._num_before

    @property
    def next_token_id(self) -> int:
        """Return the first token that is not shown yet."""
        return self._sequence.token_ids[self.num_shown]

    def show_one(self, finish_reason: FinishReason | None, logprobs: TokenLogprobs | None) -> None:
        """Let the caller read one token more; finish_reason if it is the last one, unless a stop string says so."""
        if self._pieces is not None:
            self._pieces.append(self._text.push((self.next_token_id,), finish_reason))
            if self._text.stop_string is not None:
                finish_reason = FinishReason.STOP
        self.num_shown += 1
        self.finish_reason = finish_reason
        if self._logprobs is not None and logprobs is not None:
            self._logprobs.append(logprobs)

        if self.is_whole and self._pieces is None and self._logprobs is None and self._sequence.params.grammar is None:
            self._sequence.is_silent = True

    def show_all(self, finish_reason: FinishReason | None) -> int:
        """Let the caller read every token of a silent sequence. Returns the number of new ones."""
        num_new = len(self._sequence.token_ids) - self.num_shown
        self.num_shown += num_new
        self.finish_reason = finish_reason
        return num_new

    def time_out(self) -> None:
        """End the sample with the tokens that are shown."""
        self.finish_reason = FinishReason.TIMEOUT
        if self._pieces is not None:
            self._pieces.append(self._text.flush())

    @property
    def is_long(self) -> bool:
        """Return whether read takes longer than 1 ms now."""
        return self._pieces is None and self._text.takes_long(self.num_shown - self._num_taken)

    def read(self) -> Chunk | None:
        """Return everything that is shown and was not read; None if there is nothing. Any thread may call it.

        Raises whatever the tokenizer raises.
        """
        # The reason first: what is shown after it is not behind it.
        reason, num_shown = None if self._is_over else self.finish_reason, self.num_shown
        if self._num_taken == num_shown and reason is None:
            return None
        token_ids = tuple(self._sequence.token_ids[self._num_taken : num_shown])
        if self._pieces is None:
            text = self._text.push(token_ids, reason)
        else:
            text = "".join(self._pieces)
            self._pieces.clear()
        logprobs = None
        if self._logprobs is not None:
            logprobs = tuple(self._logprobs)
            self._logprobs.clear()
        self._num_taken = num_shown
        self._is_over = reason is not None
        stop_string = None if reason is None else self._text.stop_string
        return Chunk(self.index, text, token_ids, logprobs, reason, stop_string=stop_string)
