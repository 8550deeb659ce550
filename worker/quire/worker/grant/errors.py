"""Refusals of the worker. The code and the retry delay of each reason are options in worker_service.proto."""

from __future__ import annotations

from quire.compute.v1.reasons import DOMAIN as DOMAIN
from quire.compute.v1.reasons import Reason as Reason
from quire.serving.errors import ErrorStatus


class Refused(Exception):
    """A call or a step was refused; `metadata` holds every number of the message."""

    def __init__(self, reason: Reason, message: str, **metadata: object) -> None:
        super().__init__(message)
        self.reason = reason
        self.metadata = {name: str(value) for name, value in metadata.items()}

    @property
    def status(self) -> ErrorStatus:
        return ErrorStatus.of(self.reason, str(self), DOMAIN, self.metadata)


def invalid(name: str, value: object, limit: object, **metadata: object) -> Refused:
    """Refuse a field that is out of range: names the field, its value and the limit.

    metadata has the sequence_id if the field is the input of one sequence: the client fails that sequence alone.
    """
    message = f"{name} is {value}; must be {limit}"
    return Refused(Reason.INVALID_ARGUMENT, message, field=name, value=value, limit=limit, **metadata)
