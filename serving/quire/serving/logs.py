"""Log lines on stderr, one per event, as text or as JSON, with the request id of their call.

    2026-01-31T12:00:00.123Z INFO quire.cachemgr serving term=7 addresses=unix:/run/quire/cachemgr.sock
    {"time": "2026-01-31T12:00:00.123Z", "level": "INFO", "logger": "quire.cachemgr", "event": "serving", "term": 7, …}

A line has a fixed text and then its variables as key=value pairs. Lines of a call end with its request_id, which the
caller has sent or the server has made. No line has token ids, so an exception of a handler is logged by type and
place, not by its text, and a refusal by its reason, not by its message.
"""

from __future__ import annotations

import contextvars
import json
import logging
import random
import re
import sys
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # flags.py reads the levels, and `quire --help` answers at once
    import grpc

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")
REQUEST_ID_KEY = "x-request-id"
"""The metadata key with a call's id, in requests and in answers."""

# Graphic ASCII: no space, which would end the value in a line of text.
_REQUEST_ID = re.compile(r"[!-~]{1,64}")
_FIELD = re.compile(r"(\w+)=%[-+ #0]*\d*(?:\.\d+)?[a-z]")
_FIELDS_AT_THE_END = re.compile(rf"(?P<event>[^%=]*?)(?:(?:^| ){_FIELD.pattern})+")


@dataclass(slots=True)
class Call:
    """A call that is being answered.

    begun    by time.perf_counter
    refused  the status and the reason that it has been answered with, if any
    """

    request_id: str
    begun: float
    refused: tuple[grpc.StatusCode, str] | None = None


_call: contextvars.ContextVar[Call | None] = contextvars.ContextVar("call", default=None)


def current_call() -> Call | None:
    """The call that the running handler answers, or that what runs was begun for."""
    return _call.get()


def begin_call(metadata: Iterable[tuple[str, Any]]) -> Call:
    """Note the call that this task answers, for the interceptor. Its id is the caller's own if it can be one."""
    given = dict(metadata).get(REQUEST_ID_KEY)
    if not isinstance(given, str) or not _REQUEST_ID.fullmatch(given):
        given = f"{random.getrandbits(64):016x}"
    call = Call(given, time.perf_counter())
    _call.set(call)
    return call


class _LineFormatter(logging.Formatter):
    """UTC time; no traceback, since its last line may quote the client."""

    converter = staticmethod(time.gmtime)
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def formatException(self, ei: object) -> str:  # noqa: N802
        error = ei[1] if isinstance(ei, tuple) else None
        return "" if error is None else f"error={describe_exception(error)}"


class TextFormatter(_LineFormatter):
    """Time, level, logger, message, request_id; line breaks escaped, an exception behind it."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        line, call = super().formatMessage(record), current_call()
        return line if call is None else f"{line} request_id={call.request_id}"

    def format(self, record: logging.LogRecord) -> str:
        return super().format(record).replace("\r", "\\r").replace("\n", "\\n")


class JsonFormatter(_LineFormatter):
    """One object: time, level, logger, event, the pairs of the message by their keys, request_id, error."""

    def format(self, record: logging.LogRecord) -> str:
        event, fields = split_message(record)
        line: dict[str, object] = {
            "time": self.formatTime(record),
            "level": record.levelname,
            "logger": record.name,
            "event": event,
        }
        call = current_call()
        if call is not None:
            line["request_id"] = call.request_id
        if record.exc_info and record.exc_info[1] is not None:
            line["error"] = describe_exception(record.exc_info[1])
        return json.dumps(fields | line)


def split_message(record: logging.LogRecord) -> tuple[str, dict[str, object]]:
    """The fixed text of a line, and its key=value pairs; all of it and none if it is not made like this."""
    template, values = str(record.msg), record.args
    match = _FIELDS_AT_THE_END.fullmatch(template)
    keys = _FIELD.findall(template)
    if match is None or not isinstance(values, tuple) or len(keys) != len(values):
        return record.getMessage(), {}
    plain = (value if isinstance(value, (int, float)) else str(value) for value in values)
    return match["event"], dict(zip(keys, plain, strict=True))


def configure_logging(level: str, form: str = FORMATS[0]) -> None:
    """Sends this process's log lines of `level` (one of LEVELS) and above to stderr, and nowhere else.

    `form` is one of FORMATS.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.captureWarnings(True)
    # gRPC's own: a line for each exception it answers, with its text.
    logging.getLogger("grpc").setLevel(logging.CRITICAL)


def describe_exception(error: BaseException) -> str:
    """Type and place of an exception, innermost call first: "IndexError at pool.py:33 acquire < servicer.py:12 plan".

    Its text is left out: it may quote the client.
    """
    frames = traceback.extract_tb(error.__traceback__)
    places = [f"{frame.filename.rpartition('/')[2]}:{frame.lineno} {frame.name}" for frame in reversed(frames)]
    described = f"{type(error).__name__} at {' < '.join(places) or 'an unknown place'}"
    cause = error.__cause__
    return described if cause is None else f"{described}; from {describe_exception(cause)}"
