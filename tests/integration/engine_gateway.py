"""EngineService over one engine, as a process of its own. --name gives the model names, --other a second model.

The limits are small, so that tests reach them: 4 requests wait, and 64 generated tokens are unread, at most.
"""

from __future__ import annotations

import contextlib

import click

from quire.client.engine.config import EngineConfig
from quire.client.engine.engine import Engine
from quire.client.engine.sampling import SamplingParams
from quire.gateway.callers import Admission, Caller, NoRateLimits
from quire.gateway.errors import HttpError
from quire.gateway.gateway import Gateway
from quire.gateway.grpc.service import engine_server
from quire.gateway.metrics import GatewayMetrics
from quire.gateway.routing.backend import EngineBackend
from quire.serving.flags import option
from quire.serving.logs import configure_logging
from quire.serving.options import ServerOptions, server_options
from quire.serving.server import StopSignals, run

MAX_WAITING, MAX_UNREAD_TOKENS = 4, 64
LIMITED = "carl"


class OneTenantRefused(NoRateLimits):
    """Lets nothing of one tenant in."""

    def admit(
        self, caller: Caller, *, num_prompt_tokens: int, params: SamplingParams
    ) -> contextlib.AbstractContextManager[Admission]:
        """Raise HttpError for that tenant."""
        if caller.tenant == LIMITED:
            raise HttpError(429, "no requests may be in flight", code="rate_limit_exceeded", retry_after_s=2.0)
        return super().admit(caller, num_prompt_tokens=num_prompt_tokens, params=params)


@click.command()
@option("--cachemgr", required=True)
@option("--pool", default="")
@option("--name", "names", multiple=True)
@option("--other")
@option("--max-waiting", type=int, default=MAX_WAITING)
@option("--recovery-timeout", "recovery_timeout_s", type=float, default=30.0)
@server_options(default_listen="unix:/nowhere")
def main(
    server: ServerOptions,
    cachemgr: str,
    pool: str,
    names: tuple[str, ...],
    other: str | None,
    max_waiting: int,
    recovery_timeout_s: float,
) -> None:
    """Serve until a signal."""
    configure_logging(server.log_level, server.log_format)
    config = EngineConfig(
        pool=pool,
        max_waiting_requests=max_waiting,
        max_unread_tokens=MAX_UNREAD_TOKENS,
        recovery_timeout_s=recovery_timeout_s,
        max_recoveries=3,
    )

    async def serve(signals: StopSignals) -> None:
        async with Engine.connect(cachemgr, config=config) as engine:
            served = [names or (engine.model.model,), *([] if other is None else [(other,)])]
            backends = {name: EngineBackend(engine, each) for each in served for name in each}
            backends |= {name: backends[each[0]] for each in served for name in each}
            gateway = Gateway(backends, GatewayMetrics(), rate_limiter=OneTenantRefused())
            async with engine_server(gateway, server.listen, security=server.security) as (grpc_server, servicer):
                await grpc_server.announce_serving()
                await grpc_server.serve_until_signal(
                    signals, drain=servicer.drain, drain_timeout_s=server.drain_timeout_s
                )

    run(serve)


if __name__ == "__main__":
    main()
