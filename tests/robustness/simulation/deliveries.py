"""The parts of answers that callers have got, compared token by token with the answers of an undisturbed run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer. samples have their tokens, the reason of their end, and further values that must be equal."""

    samples: tuple[tuple[Tokens, str, Any], ...]


@dataclass(slots=True)
class _Sample:
    token_ids: list[int] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    finish: str | None = None


class Deliveries:
    """The answers of one gateway's requests as they come. `wrong` gets a line about each wrong one."""

    def __init__(self, wrong: Callable[[str], None], expected: Mapping[int, Answer] | None) -> None:
        """Without expected answers none is compared."""
        self._wrong = wrong
        self._expected = expected
        self._samples: dict[int, dict[int, _Sample]] = {}
        self.num_tokens = 0

    def begin_anew(self, request: int) -> None:
        """The request is sent again by a caller that has got nothing of it."""
        self._samples[request] = {}

    def take(self, request: int, sample: int, token_ids: Tokens, values: Any, finish: str | None) -> None:
        """New tokens of a sample, with their values; with finish its end."""
        known = self._samples[request].setdefault(sample, _Sample())
        if known.finish is not None:
            self._wrong(f"request {request} sample {sample} goes on after its end")
        known.token_ids += token_ids
        known.values += values
        known.finish = finish
        self.num_tokens += len(token_ids)
        if self._expected is not None:
            self._compare(request, sample, known)

    def _compare(self, request: int, sample: int, known: _Sample) -> None:
        assert self._expected is not None
        token_ids, reason, values = self._expected[request].samples[sample]
        found = tuple(known.token_ids)
        if found != token_ids[: len(found)]:
            wrong = next(at for at, token in enumerate(found) if token_ids[at : at + 1] != (token,))
            self._wrong(f"request {request} sample {sample}: token {wrong} of {found} is not that of {token_ids}")
        if known.values != list(values[: len(known.values)]):
            self._wrong(f"request {request} sample {sample}: {known.values} is not {values}")
        if known.finish is not None and (known.finish, len(found)) != (reason, len(token_ids)):
            what = f"ends by {known.finish} with {len(found)} tokens, and by {reason} with {len(token_ids)} undisturbed"
            self._wrong(f"request {request} sample {sample} {what}")

    def has_ended(self, request: int, num_samples: int) -> bool:
        """Return whether all samples of a request have ended."""
        samples = self._samples.get(request, {})
        return len(samples) == num_samples and all(sample.finish is not None for sample in samples.values())

    def answer(self, request: int) -> Answer:
        """The answer of a request that has ended."""
        samples = self._samples[request]
        return Answer(
            tuple(
                (tuple(sample.token_ids), sample.finish or "", tuple(sample.values))
                for _, sample in sorted(samples.items())
            )
        )
