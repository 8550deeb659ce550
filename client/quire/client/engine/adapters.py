"""Adapters by the names that a worker gives them."""

from collections.abc import Mapping

from quire.client.errors import InvalidRequest

_MAX_SHOWN = 8


def named_adapter(adapters: Mapping[str, bytes], name: str) -> bytes:
    """Return the identity of an adapter. Raises InvalidRequest for a name that is not there."""
    if name not in adapters:
        shown = ", ".join(sorted(adapters)[:_MAX_SHOWN])
        limit = (
            f"one of the worker's {len(adapters)} adapters, like {shown}" if shown else "empty: there are no adapters"
        )
        raise InvalidRequest.of_field("adapter", name, limit)
    return adapters[name]
