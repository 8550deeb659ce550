"""The self-check of an adapter in a model's layers."""

from __future__ import annotations

from quire.worker.adapters.adapted_model import PreparedAdapter
from quire.worker.adapters.adapter import UnsupportedAdapter
from quire.worker.model.paged_model import PagedModel, RunsForward, run_at_once
from quire.worker.model.row_check import find_varying_step
from quire.worker.unsupported_model import first_line


def check_adapter(model: PagedModel, adapter: PreparedAdapter, *, run: RunsForward = run_at_once) -> None:
    """Compare the model with an adapter that is in its layers on its pool and by its own attention.

    In a deterministic model compare a sequence alone and beside others, too: bit for bit. run runs each forward, of
    some ten tokens. Raises UnsupportedAdapter if two differ.
    """
    try:
        reason: object = model.find_adapter_disagreement(adapter.identity, model.forward, run=run)
        if reason is None and model.is_deterministic:
            reason = find_varying_step(model, adapter=model.adapters.numbers[adapter.identity], run=run)
    except Exception as error:
        reason = f"the self-check failed with {type(error).__name__}: {first_line(error)}"
        raise UnsupportedAdapter(adapter.name, reason) from error
    if reason is not None:
        raise UnsupportedAdapter(adapter.name, str(reason))
