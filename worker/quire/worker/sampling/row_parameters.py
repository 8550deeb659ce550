"""Sampling parameters of the sequence table's rows, and the same numbers in columns.

A batch changes with each sequence that begins or ends. So what it needs of its rows is picked from columns, and not
from one object after the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.worker.sampling.parameters import SamplingParams

NO_LOGPROBS = -1
"""The number of log-probabilities of a row that asked for none."""

COLUMNS = np.dtype(
    [
        ("temperature", np.float64),
        ("top_k", np.int64),
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("repetition_penalty", np.float64),
        ("presence_penalty", np.float64),
        ("frequency_penalty", np.float64),
        ("seed", np.int64),
        ("num_logprobs", np.int64),
        ("is_constrained", np.bool_),
        ("is_set", np.bool_),
    ],
    align=True,
)
"""The fields of SamplingParams by name. is_set is False for a row without parameters."""

Columns = np.ndarray[tuple[int, ...], np.dtype[np.void]]
"""[n] COLUMNS: one number of each column for each row of a batch."""
IsRow = np.ndarray[tuple[int, ...], np.dtype[np.bool_]]
"""[n]: True for some rows of a batch."""


class RowParameters:
    """The parameters of rows 0 .. max_num_seqs - 1, for those that have some."""

    def __init__(self, max_num_seqs: int) -> None:
        self._params: dict[int, SamplingParams] = {}
        self._columns: Columns = np.zeros(max_num_seqs, dtype=COLUMNS)

    def set(self, row: int, params: SamplingParams) -> None:
        """Give a row parameters, valid ones, in place of those that it has."""
        self._params[row] = params
        self._columns[row] = (
            params.temperature,
            params.top_k,
            params.top_p,
            params.min_p,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
            params.seed,
            NO_LOGPROBS if params.num_logprobs is None else params.num_logprobs,
            params.constraints is not None,
            True,
        )

    def clear(self, row: int) -> None:
        """Forget a row's parameters, if it has some."""
        if self._params.pop(row, None) is not None:
            self._columns[row]["is_set"] = False

    def get(self, row: int) -> SamplingParams | None:
        """Return a row's parameters, None if it has none."""
        return self._params.get(row)

    def of(self, rows: Sequence[int]) -> Columns:
        """Return the columns of a batch. Raises KeyError for a row without parameters."""
        columns: Columns = self._columns[np.asarray(rows, dtype=np.int64)]
        if not columns["is_set"].all():
            raise KeyError(next(row for row in rows if row not in self._params))
        return columns

    def __len__(self) -> int:
        return len(self._params)

    def check_invariants(self) -> None:
        """Raises AssertionError if the columns are not those of the parameters."""
        assert np.flatnonzero(self._columns["is_set"]).tolist() == sorted(self._params), (
            "a row is set in one place only"
        )


def is_greedy(columns: Columns) -> IsRow:
    """Tell the rows that take the greatest logit."""
    return np.asarray(columns["temperature"] == 0)


def has_penalties(columns: Columns) -> IsRow:
    """Tell the rows with a penalty that has an effect."""
    is_penalised = (columns["presence_penalty"] != 0) | (columns["frequency_penalty"] != 0)
    return np.asarray(is_penalised | (columns["repetition_penalty"] != 1))


def is_drawn_by_kernels(columns: Columns) -> IsRow:
    """Tell the rows with tokens that kernels can choose: nothing is to be known but the logits, a draw is all."""
    is_followed = (columns["num_logprobs"] != NO_LOGPROBS) | columns["is_constrained"]
    return ~np.asarray(is_followed | has_penalties(columns))
