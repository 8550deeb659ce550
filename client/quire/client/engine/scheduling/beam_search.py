"""Beam search: choose the beams of the next step, collect the ended beams, and find the end of the search. Pure.

The rules and names are those of transformers' generate(num_beams=...). The sum of a running beam adds the
log-probabilities of its tokens, by the model's own distribution. An ended beam has the score

    sum / length ** length_penalty          length: its generated tokens, the end token included

For each beam, the beam_width + (number of end tokens) most probable tokens are enough: even if all end tokens are among
them, beam_width other tokens are left.
"""

from collections import abc
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal

from quire.client.engine.sampling import SamplingParams, checked_integer
from quire.client.engine.scheduling.sequence import FinishReason
from quire.client.errors import InvalidRequest

MAX_BEAM_WIDTH = 16
MAX_LENGTH_PENALTY = 10.0

TopTokens = abc.Sequence[tuple[int, float]]
"""Tokens with their log-probabilities, the most probable first."""


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """The parameters of a beam search. Raises InvalidRequest naming field, value and limit if one is out of range.

    beam_width       beams that run at once, 1 to 16
    max_tokens       the most tokens of a beam, at least 1; None: as many as the model and the pool hold
    length_penalty   exponent, -10 to 10: a beam's score is the sum of its log-probabilities, divided by its length to
                     this power. Above 0 favors long beams, below 0 short beams
    early_stopping   the end of the search, after beam_width beams have ended. True: at once. False: when no running
                     beam would enter the best beam_width if it ended now. "never": when none can before max_tokens
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
        """Return the sampling parameters of each beam. The sampled token is not used, only the log-probabilities."""
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
    """A beam of the next step: the index of the beam that it continues, its next token, and its sum."""

    parent: int
    token_id: int
    cumulative_logprob: float


class BeamSearch:
    """The state of one search. It begins with one beam: the prompt."""

    def __init__(self, params: BeamSearchParams, *, max_tokens: int, end_token_ids: abc.Set[int]) -> None:
        """Begin a search. A beam ends with one of end_token_ids, or after max_tokens."""
        self._params = params
        self._max_tokens = max_tokens
        self._end_token_ids = end_token_ids
        self._length = 0
        self._sums = [0.0]
        self._ended: list[Ended] = []

    @property
    def num_top(self) -> int:
        """Return the number of most probable tokens that `step` needs for each beam."""
        return self._params.beam_width + len(self._end_token_ids)

    def step(self, tops: abc.Sequence[TopTokens], outputs: abc.Sequence[abc.Sequence[int]]) -> list[Heir]:
        """Take the most probable next tokens of all beams. Return the beams of the next step, the best first.

        tops and outputs, the generated tokens, are in the order of the last answer. Returns no beam at the end of the
        search.
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
        """End all running beams now, with this reason."""
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
        """Return True if the best running beam can still enter the best ended beams."""
        if len(self._ended) < self._params.beam_width:
            return True
        if self._params.early_stopping is True:
            return False
        penalty = self._params.length_penalty
        is_patient = self._params.early_stopping == "never" and penalty > 0
        length = self._max_tokens if is_patient else self._length
        best_score: float = best.cumulative_logprob / length**penalty
        return best_score > self._ended[-1].score
