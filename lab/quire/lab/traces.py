"""Recorded requests, read as they are published.

    Mooncake    JSON lines with hash_ids: blocks of 512 tokens, each id standing for the whole prefix
    Quire       JSON lines with block_runs, as in benchmarks/traces: blocks of 16 tokens, runs of such ids
    Azure       a table with TIMESTAMP, ContextTokens and GeneratedTokens, or t_ms, input_tokens and output_tokens
    BurstGPT    a table with Timestamp, Request tokens and Response tokens, a dataset of vLLM's benchmarks
    ShareGPT    a JSON list of conversations, the dataset of vLLM's and SGLang's benchmarks

Files may be compressed with gzip. Only identities and lengths of blocks are known, not tokens, so tokens are derived
from them (tokens.py). An answer is found again in a later prompt only if the trace has sessions.
"""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, TextIO

import numpy as np

from quire.lab.errors import ConfigError
from quire.lab.requests import TRACE_STREAMS, Prompt, Request
from quire.lab.tokens import Content, Integers

_MOONCAKE_BLOCK, _QUIRE_BLOCK = 512, 16
_CHARACTERS_PER_TOKEN = 4
"""Of a conversation's text, when lengths are estimated; common for English and byte-pair encodings."""


@dataclass(frozen=True, slots=True)
class _Record:
    """A request of a trace: full blocks of its prompt by id, and lengths in tokens."""

    at_s: float
    num_prompt: int
    num_output: int
    block_ids: Sequence[int] = ()
    block_size: int = 1
    session: int | None = None


def read_trace(path: Path, *, most: int | None = None) -> list[Request]:
    """The first `most` requests of a file, in order of arrival; None: all. Raises ConfigError.

    A conversation of ShareGPT has no times: its first request arrives at 0, the others when the one before has ended.
    """
    with _opened(path) as (form, file):
        if form is _conversations:
            return list(islice(form(file), most))
        return _requests_of(sorted(islice(form(file), most), key=lambda record: record.at_s))


def read_prompts(path: Path) -> tuple[int, list[Prompt]]:
    """The block size of a file with ids of blocks, and its prompts in the order of the file. Raises ConfigError."""
    with _opened(path) as (form, file):
        if form is not _json_lines:
            raise ValueError("expected hash_ids or block_runs in each line")
        records = list(form(file))
        return records[0].block_size, [Prompt(record.num_prompt, list(record.block_ids)) for record in records]


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Callable[[TextIO], Iterator[Any]], TextIO]]:
    """The form of a trace, and its file. A line that can't be read becomes a ConfigError."""
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
            form = _form_of(file.read(1024))
            file.seek(0)
            yield form, file
    except OSError as error:
        raise ConfigError(f"load.trace is {str(path)!r}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: a record can't be read: {error!r}") from None


def _form_of(beginning: str) -> Callable[[TextIO], Iterator[Any]]:
    if beginning.lstrip().startswith("["):
        return _conversations
    if beginning.lstrip().startswith("{"):
        return _json_lines
    if not _columns_of(beginning.partition("\n")[0]).isdisjoint(_TABLES):
        return _table
    raise ValueError("begins like none of the known forms: Mooncake, Quire, Azure, BurstGPT, ShareGPT")


def _columns_of(header: str) -> set[str]:
    return set(header.strip().split(","))


def _json_lines(file: TextIO) -> Iterator[_Record]:
    for line in file:
        record = json.loads(line)
        at_s = record["timestamp"] / 1e3
        num_prompt, num_output = int(record["input_length"]), max(1, int(record["output_length"]))
        if "hash_ids" in record:
            ids, size = record["hash_ids"], _MOONCAKE_BLOCK
        else:
            ids, size = [i for first, count in record["block_runs"] for i in range(first, first + count)], _QUIRE_BLOCK
        num_full = num_prompt // size
        if len(ids) < num_full:
            raise ValueError(f"{num_prompt} tokens in {len(ids)} blocks of {size}")
        yield _Record(at_s, num_prompt, num_output, ids[:num_full], size, record.get("session"))


def _seconds_of_date(time: str) -> float:
    return datetime.fromisoformat(time[:26]).timestamp()


# By the column with the time: those with the tokens of the prompt and of the answer, and the time in seconds.
_TABLES: Mapping[str, tuple[str, str, Callable[[str], float]]] = MappingProxyType(
    {
        "TIMESTAMP": ("ContextTokens", "GeneratedTokens", _seconds_of_date),
        "t_ms": ("input_tokens", "output_tokens", lambda time: float(time) / 1e3),
        "Timestamp": ("Request tokens", "Response tokens", float),
    }
)


def _table(file: TextIO) -> Iterator[_Record]:
    """A request without an answer has failed (BurstGPT), and is left out."""
    first_s: float | None = None
    rows = csv.DictReader(file)
    time = next(name for name in rows.fieldnames or () if name in _TABLES)
    prompt, output, seconds = _TABLES[time]
    for row in rows:
        at_s, num_prompt, num_output = seconds(row[time]), int(row[prompt]), int(row[output])
        first_s = at_s if first_s is None else first_s
        if num_prompt and num_output:
            yield _Record(at_s - first_s, num_prompt, num_output)


def _requests_of(records: Sequence[_Record]) -> list[Request]:
    """From the last to the first: a turn's answer is what the session's next prompt has in its place."""
    requests: list[Request] = []
    following: dict[int | None, tuple[_Record, Content]] = {}
    for number in range(len(records) - 1, -1, -1):
        record = records[number]
        content = _content_of(record, TRACE_STREAMS + number, following.get(record.session))
        if record.session is not None:
            following[record.session] = record, content
        session = TRACE_STREAMS + number if record.session is None else record.session
        requests.append(Request(content, record.num_prompt, record.num_output, record.at_s, session))
    return requests[::-1]


def _content_of(record: _Record, own_stream: int, following: tuple[_Record, Content] | None) -> Content:
    ids: Integers = np.array(record.block_ids, dtype=np.int64)
    known = Content(ids, np.zeros_like(ids), np.full_like(ids, record.block_size))
    num_known, num_all = known.num_tokens, record.num_prompt + record.num_output
    if following is not None and len(ids) and list(following[0].block_ids[: len(ids)]) == list(record.block_ids):
        next_record, next_content = following
        known = known + next_content.cut(num_known, min(num_all, next_record.num_prompt))
        num_known = known.num_tokens
    return known + Content.of([(own_stream, num_known, num_all - num_known)])


def _conversations(file: TextIO) -> Iterator[Request]:
    number = 0
    for session, conversation in enumerate(json.load(file)):
        num_tokens, before = 0, None
        turns = conversation.get("conversations") or conversation.get("conversation") or []
        for asked, answered in _exchanges(turns):
            content = Content.of([(TRACE_STREAMS + session, 0, num_tokens + asked + answered)])
            yield Request(content, num_tokens + asked, answered, 0.0, session, after=before)
            num_tokens += asked + answered
            before, number = number, number + 1


def _exchanges(turns: Sequence[Mapping[str, str]]) -> Iterator[tuple[int, int]]:
    """Tokens before each answer since the one before it, and of the answer."""
    num_asked = 0
    for turn in turns:
        is_answer = turn.get("from", turn.get("role")) in ("gpt", "assistant", "chatgpt", "bard", "bing")
        text = turn.get("value") or turn.get("content") or ""
        num_tokens = -(-len(text) // _CHARACTERS_PER_TOKEN)
        if is_answer and num_asked and num_tokens:
            yield num_asked, num_tokens
            num_asked = 0
        else:
            num_asked += num_tokens
