"""Adapters by the names that a worker gives them."""

from collections.abc import Mapping

from quire.cache.v1 import attach_pb2
from quire.client.errors import InvalidRequest
from quire.compute.v1 import worker_service_pb2

_MAX_SHOWN = 8
"""In an error."""


def adapters_of(message: worker_service_pb2.GetModelResponse | attach_pb2.PoolAdapters) -> dict[str, bytes]:
    """Return the identities of a worker's adapters, by name, as it says, or as cachemgr says of its pool."""
    return {adapter.name: adapter.identity for adapter in message.adapters}


def named_adapter(adapters: Mapping[str, bytes], name: str) -> bytes:
    """Return the identity of an adapter. Raises InvalidRequest for a name that is not there."""
    if name not in adapters:
        shown = ", ".join(sorted(adapters)[:_MAX_SHOWN])
        limit = (
            f"one of the worker's {len(adapters)} adapters, like {shown}" if shown else "empty: there are no adapters"
        )
        raise InvalidRequest.of_field("adapter", name, limit)
    return adapters[name]


def check_identity(adapters: Mapping[str, bytes], identity: bytes) -> None:
    """Raises InvalidRequest for the identity of an adapter that is not there. Empty: none is asked for."""
    if identity and identity not in adapters.values():
        shown = sorted(adapters.items())[:_MAX_SHOWN]
        names = ", ".join(f"{name} ({each.hex()})" for name, each in shown)
        limit = f"one of {len(adapters)}, like {names}" if names else "empty: the worker has no adapters"
        raise InvalidRequest.of_field("adapter", identity.hex(), limit)
