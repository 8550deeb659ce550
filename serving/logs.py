"""Log lines: on stderr, one per event, plain text.

    2026-01-31T12:00:00.123Z INFO quire.cachemgr serving addresses=unix:/run/quire/cachemgr.sock

Whoever logs puts what varies in key=value pairs behind a fixed text. Nothing logs token ids, so an exception out of a
handler is logged by type and place, not by its text.
"""

import logging
import sys
import time
import traceback

LEVELS = ("debug", "info", "warning", "error")


class OneLineFormatter(logging.Formatter):
    """UTC time, level, logger and message; line breaks escaped, an exception behind its message."""

    converter = staticmethod(time.gmtime)
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        return super().format(record).replace("\r", "\\r").replace("\n", "\\n")

    def formatException(self, ei: object) -> str:  # noqa: N802
        error = ei[1] if isinstance(ei, tuple) else None
        return "" if error is None else f"error={describe_exception(error)}"


def configure_logging(level: str) -> None:
    """Sends this process's log lines of `level` (one of LEVELS) and above to stderr, and nowhere else."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(OneLineFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # gRPC's own: a line for each exception it answers, with its text.
    logging.getLogger("grpc").setLevel(logging.CRITICAL)


def describe_exception(error: BaseException) -> str:
    """Type and place of an exception, innermost call first: "IndexError at pool.py:33 acquire < servicer.py:12 plan".

    Its text is left out: it may quote what a client sent.
    """
    frames = traceback.extract_tb(error.__traceback__)
    places = [f"{frame.filename.rpartition('/')[2]}:{frame.lineno} {frame.name}" for frame in reversed(frames)]
    described = f"{type(error).__name__} at {' < '.join(places) or 'an unknown place'}"
    cause = error.__cause__
    return described if cause is None else f"{described}; from {describe_exception(cause)}"
