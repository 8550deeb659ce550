"""Beam search: which beams go on with which tokens, which have ended, and when the search is over. Pure.

The rules are those of transformers' generate(num_beams=...), and so are the names. Scores of running beams are sums of
log-probabilities of the model's own distribution. An ended beam has the score

    sum / length ** length_penalty          length: its generated tokens, the end token included

Of each beam, the beam_width + (number of end tokens) most probable tokens are enough: at most the end tokens of these
end the beam, so at least beam_width of them go on.
"""

from collections import abc
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal

from quire.client.engine.sampling import SamplingParams, checked_integer
from quire.client.engine.sequence import FinishReason
from quire.client.errors import InvalidRequest

MAX_BEAM_WIDTH = 16
MAX_LENGTH_PENALTY = 10.0

TopTokens = abc.Sequence[tuple[int, float]]
"""Tokens with their log-probabilities, the most probable first."""


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """The parameters of a beam search. Raises InvalidRequest naming field, value and limit if one is out of range.

    beam_width       beams that run at once, 1 to 16
    max_tokens       most tokens to generate, at least 1; None: as many as the model and the pool hold
    length_penalty   a beam's score is the sum of its log-probabilities, divided by its length to the power of this,
                     -10 to 10. Above 0 favors long beams, below 0 short ones
    early_stopping   True: the search ends when beam_width beams have ended. False: when no running beam would have a
                     better score if it ended now. "never": when none can get a better score up to max_tokens
    n                beams to return, the best first, 1 to beam_width
    ignore_eos, stop_token_ids, skip_special_tokens, include_stop_str_in_output, priority, tenant, timeout_s
                     as in SamplingParams
    """

    beam_width: int = 4
    max_tokens: int | None = 128
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    n: int = 1
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    priority: int = 0
    tenant: str = ""
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        checked = {
            "beam_width": checked_integer("beam_width", self.beam_width, 1, MAX_BEAM_WIDTH),
            "length_penalty": _length_penalty(self.length_penalty),
        }
        for field, value in checked.items():
            object.__setattr__(self, field, value)
        object.__setattr__(self, "n", checked_integer("n", self.n, 1, self.beam_width))
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise InvalidRequest.of_field("early_stopping", self.early_stopping, 'True, False or "never"')
        object.__setattr__(self, "stop_token_ids", self.sampling(num_logprobs=0).stop_token_ids)

    def sampling(self, *, num_logprobs: int) -> SamplingParams:
        """Return how each beam is sampled. Its token is dropped; its log-probabilities count."""
        return SamplingParams(
            temperature=0.0,
            max_tokens=self.max_tokens,
            logprobs=num_logprobs,
            ignore_eos=self.ignore_eos,
            stop_token_ids=self.stop_token_ids,
            skip_special_tokens=self.skip_special_tokens,
            include_stop_str_in_output=self.include_stop_str_in_output,
            priority=self.priority,
            tenant=self.tenant,
            timeout_s=self.timeout_s,
        )


def _length_penalty(value: Any) -> float:
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not abs(float(value)) <= MAX_LENGTH_PENALTY:
        limit = f"a number from {-MAX_LENGTH_PENALTY:g} to {MAX_LENGTH_PENALTY:g}"
        raise InvalidRequest.of_field("length_penalty", value, limit)
    return float(value)


@dataclass(frozen=True, slots=True)
class Ended:
    """A beam that has ended: its generated tokens, the sum of their log-probabilities, and its score."""

    token_ids: tuple[int, ...]
    cumulative_logprob: float
    score: float
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class Heir:
    """A beam of the next step: the beam that it continues, by index, its next token, and its sum."""

    parent: int
    token_id: int
    cumulative_logprob: float


class BeamSearch:
    """One search. It begins with one beam: the prompt."""

    def __init__(self, params: BeamSearchParams, *, max_tokens: int, end_token_ids: abc.Set[int]) -> None:
        """max_tokens are those that the request may generate; end_token_ids end a beam."""
        self._params = params
        self._max_tokens = max_tokens
        self._end_token_ids = end_token_ids
        self._length = 0
        self._sums = [0.0]
        self._ended: list[Ended] = []

    @property
    def num_top(self) -> int:
        """Most probable tokens that each beam has to say."""
        return self._params.beam_width + len(self._end_token_ids)

    def step(self, tops: abc.Sequence[TopTokens], outputs: abc.Sequence[abc.Sequence[int]]) -> list[Heir]:
        """Take the most probable next tokens of all beams; return the beams that go on, the best first.

        outputs are the generated tokens of the beams, in the same order: that of the last answer. Returns no beam
        when the search is over.
        """
        width = self._params.beam_width
        heirs = [
            Heir(parent, token_id, self._sums[parent] + logprob)
            for parent, top in enumerate(tops)
            for token_id, logprob in top
        ]
        heirs.sort(key=lambda heir: -heir.cumulative_logprob)
        self._length += 1
        is_last = self._length >= self._max_tokens
        for heir in heirs[:width]:
            if heir.token_id in self._end_token_ids:
                self._end(outputs[heir.parent], heir, FinishReason.STOP)
            elif is_last:
                self._end(outputs[heir.parent], heir, FinishReason.LENGTH)
        running = [heir for heir in heirs if heir.token_id not in self._end_token_ids][:width]
        if is_last or not running or not self._can_improve(running[0]):
            return []
        self._sums = [heir.cumulative_logprob for heir in running]
        return running

    def stop(self, outputs: abc.Sequence[abc.Sequence[int]], reason: FinishReason) -> None:
        """End the running beams as they are, for this reason."""
        for parent, output in enumerate(outputs):
            if output:
                self._end(output[:-1], Heir(parent, output[-1], self._sums[parent]), reason)
            else:
                self._ended.append(Ended((), 0.0, 0.0, reason))

    def best(self) -> list[Ended]:
        """Return the n ended beams with the highest scores, the best first."""
        return self._ended[: self._params.n]

    def _end(self, output: abc.Sequence[int], heir: Heir, reason: FinishReason) -> None:
        token_ids = (*output, heir.token_id)
        score = heir.cumulative_logprob / len(token_ids) ** self._params.length_penalty
        self._ended.append(Ended(token_ids, heir.cumulative_logprob, score, reason))
        self._ended.sort(key=lambda ended: -ended.score)
        del self._ended[self._params.beam_width :]

    def _can_improve(self, best: Heir) -> bool:
        """Return True if the best running beam may still get among the ended ones."""
        if len(self._ended) < self._params.beam_width:
            return True
        if self._params.early_stopping is True:
            return False
        penalty = self._params.length_penalty
        is_patient = self._params.early_stopping == "never" and penalty > 0
        length = self._max_tokens if is_patient else self._length
        best_score: float = best.cumulative_logprob / length**penalty
        return best_score > self._ended[-1].score
