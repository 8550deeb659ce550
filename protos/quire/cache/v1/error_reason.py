"""The type of a reason of errors. The reasons of each API are in its reasons.py. No gRPC: any side may import this."""

from enum import StrEnum
from typing import Self


class ErrorReason(StrEnum):
    """A reason why a server refuses: a value of the API's ErrorReason, by its name without the prefix.

    status_code    the gRPC code of a status with this reason, by its name
    retry_delay_s  the time to wait before a retry; None: a retry alone does not help
    """

    status_code: str
    retry_delay_s: float | None

    def __new__(cls, name: str, status_code: str, retry_delay_s: float | None = None) -> Self:
        reason = str.__new__(cls, name)
        reason._value_, reason.status_code, reason.retry_delay_s = name, status_code, retry_delay_s
        return reason
