"""A custom scheduling policy: first come, first served, for any priority of a request.

    python client/examples/first_come_first_served.py                     services of its own
    python client/examples/first_come_first_served.py --cachemgr unix:/run/quire/cachemgr.sock

Sends two requests to a pool with room for one at a time. The second has the higher priority and still ends last.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path

import click

import quire.client
from quire.cli.launch import LocalServices
from quire.client import Engine, Policy, PoolView, SamplingParams, in_order

MODEL = Path(__file__).parents[2] / "deploy" / "demo" / "model"
REQUESTS = {"first": 0, "second": 5}  # name: priority


class FirstComeFirstServed:
    """A quire.client.Policy. It preempts the request that arrived last, and only for running requests."""

    def rank(self, sequence: quire.client.Sequence, view: PoolView) -> tuple[int, ...]:
        """Equal for all, so the order is that of arrival."""
        return ()

    def ended(self, sequence: quire.client.Sequence) -> None:
        """Nothing was kept of it."""

    def victim(
        self,
        needy: quire.client.Sequence,
        candidates: Sequence[quire.client.Sequence],
        *,
        missing_blocks: int,
        view: PoolView,
    ) -> quire.client.Sequence | None:
        """The last to arrive of the candidates; a request that waits for admission preempts none."""
        return candidates[-1] if candidates and needy in view.running else None

    def reserve(self, newcomer: quire.client.Sequence, *, num_beside: int, view: PoolView) -> int:
        """Reserve one block for each running sequence, so that it can continue."""
        return len(view.running) + num_beside

    def admits(self, newcomer: quire.client.Sequence, view: PoolView) -> bool:
        """None while a running sequence lacks blocks."""
        return view.starved is None

    def divide(
        self, prompts: Sequence[quire.client.Sequence], newcomer: quire.client.Sequence | None, *, budget: int
    ) -> Sequence[int]:
        """The first prompt gets all that it can use, then the next one."""
        return in_order(prompts, budget)


async def show_order(cachemgr: str, policy: Policy) -> None:
    """Print the names of the requests in the order in which they end."""
    async with Engine.connect(cachemgr, policy=policy) as engine, asyncio.TaskGroup() as group:

        async def answer(name: str, priority: int) -> None:
            await engine.complete(name, SamplingParams(max_tokens=180, priority=priority, ignore_eos=True))
            click.echo(name)

        for name, priority in REQUESTS.items():
            group.create_task(answer(name, priority))


@click.command()
@click.option("--cachemgr", help="Address of a running cachemgr; without it services are started.")
def main(cachemgr: str | None) -> None:
    """Send both requests."""
    with contextlib.ExitStack() as stack:
        if cachemgr is None:
            services = stack.enter_context(LocalServices.start(model=MODEL, num_blocks=16))
            cachemgr = services.cachemgr_address
        asyncio.run(show_order(cachemgr, FirstComeFirstServed()))


if __name__ == "__main__":
    main()
