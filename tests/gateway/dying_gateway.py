"""A gateway with a seeded mistake: its engine's state is broken by the request with this seed."""

from typing import Any

from quire.client.engine.scheduling.faults import BrokenInvariantError
from quire.client.engine.scheduling.scheduler import Scheduler
from quire.gateway.__main__ import main

SEED = 1313


class MistakenScheduler(Scheduler):
    """A scheduler that finds its state broken when a sequence has the seed."""

    def add(self, sequences: Any) -> None:
        if sequences[0].params.seed == SEED:
            raise BrokenInvariantError("a seeded mistake")
        super().add(sequences)


if __name__ == "__main__":
    import quire.client.engine.engine as engine

    engine.Scheduler = MistakenScheduler  # type: ignore[misc]
    main(prog_name="quire serve")
