"""Log lines as text and as JSON, and their calls."""

from __future__ import annotations

import contextvars
import json
import logging
import re

import pytest

from quire.serving.logs import JsonFormatter, TextFormatter, begin_call, current_call

SECRET = "the secret that a client sent"


def record(message: str, *args: object, exception: BaseException | None = None) -> logging.LogRecord:
    info = (type(exception), exception, exception.__traceback__) if exception else None
    made = logging.LogRecord("quire.x", logging.INFO, __file__, 1, message, args, info)
    made.created, made.msecs = 1_769_860_800.123, 123.0
    return made


def line(formatter: logging.Formatter, *args: object, metadata: object = None, **fields: BaseException) -> str:
    """A line, of a call with this metadata if there is any."""

    def formatted() -> str:
        if metadata is not None:
            begin_call(metadata)  # type: ignore[arg-type]
        return formatter.format(record(*args, **fields))  # type: ignore[arg-type]

    return contextvars.copy_context().run(formatted)


def as_json(*args: object, **fields: object) -> dict[str, object]:
    text = line(JsonFormatter(), *args, **fields)  # type: ignore[arg-type]
    assert "\n" not in text
    content = json.loads(text)
    assert (content.pop("time"), content.pop("level")) == ("2026-01-31T12:00:00.123Z", "INFO")
    assert content.pop("logger") == "quire.x"
    return content


def test_a_line_of_text() -> None:
    written = line(TextFormatter(), "lease ended lease=%s pool=%s", "abc", "p")
    assert written == "2026-01-31T12:00:00.123Z INFO quire.x lease ended lease=abc pool=p"


def test_a_line_of_text_of_a_call_says_which() -> None:
    written = line(TextFormatter(), "lease ended lease=%s", "abc", metadata=[("x-request-id", "r-1")])
    assert written.endswith(" quire.x lease ended lease=abc request_id=r-1")


@pytest.mark.parametrize("break_", ["\n", "\r", "\r\n"])
def test_nobody_writes_a_line_of_his_own(break_: str) -> None:
    written = line(TextFormatter(), "refused caller=%s", f"x{break_}2026 INFO quire.x serving")
    assert len(written.splitlines()) == 1
    assert as_json("refused caller=%s", f"x{break_}y")["caller"] == f"x{break_}y"


def test_json_has_the_pairs_by_their_keys() -> None:
    assert as_json("lease created lease=%s pool=%s ttl_s=%g n=%d", "a b=c", "p", 1.5, 3) == {
        "event": "lease created",
        "lease": "a b=c",
        "pool": "p",
        "ttl_s": 1.5,
        "n": 3,
    }
    assert as_json("took ms=%.3f", 0.25, metadata=[("x-request-id", "r-1")]) == {
        "event": "took",
        "ms": 0.25,
        "request_id": "r-1",
    }


@pytest.mark.parametrize(
    ("message", "args", "event"),
    [
        ("model %s (%s), on %s", ("m", "a", "cpu"), "model m (a), on cpu"),
        ("stopped", (), "stopped"),
        ("what=%s: %s", ("a", "b"), "what=a: b"),
    ],
)
def test_json_of_other_lines_has_the_text(message: str, args: tuple[object, ...], event: str) -> None:
    assert as_json(message, *args) == {"event": event}


def test_a_pair_can_not_pass_itself_off_as_what_the_line_says() -> None:
    text = line(JsonFormatter(), "x level=%s event=%s request_id=%s", "a", "b", "c", metadata=[("x-request-id", "r-1")])
    content = json.loads(text)
    assert (content["level"], content["event"], content["request_id"]) == ("INFO", "x", "r-1")


def test_an_exception_is_its_type_and_place_and_not_its_text() -> None:
    try:
        raise KeyError(SECRET)
    except KeyError as error:
        text = line(TextFormatter(), "failed", exception=error)
        content = as_json("failed", exception=error)
    assert "error=KeyError at test_logs.py:" in text
    assert str(content["error"]).startswith("KeyError at test_logs.py:")
    assert SECRET not in text
    assert SECRET not in str(content)


def test_outside_of_calls_there_is_no_id() -> None:
    assert current_call() is None
    assert "request_id" not in as_json("x")


@pytest.mark.parametrize("given", ["r-1", "!", "~" * 64, "a=b,c"])
def test_a_callers_id_is_kept(given: str) -> None:
    metadata = [("user-agent", "x"), ("x-request-id", given)]
    assert contextvars.copy_context().run(begin_call, metadata).request_id == given


@pytest.mark.parametrize("given", [None, "", "a b", "a\nb", "é", "x" * 65, b"r-1", "\x7f"])
def test_what_can_be_no_id_is_replaced(given: str | bytes | None) -> None:
    metadata = [] if given is None else [("x-request-id", given)]
    drawn = {contextvars.copy_context().run(begin_call, metadata).request_id for _ in range(20)}
    assert len(drawn) == 20
    assert all(re.fullmatch("[0-9a-f]{16}", each) for each in drawn)
