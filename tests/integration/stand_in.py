"""A small server on quire.serving that takes the flags of cachemgr and worker; run as a process by the tests beside it.

Its service, quire.test.StandIn, speaks google.protobuf.StringValue:
    Echo        the same text back; "defect" and "broken" raise
    Hold        answers when something has been written to the FIFO that the text names
    WhoAmI      name and roles of the caller
    EchoStream  the texts back, as an async generator
    EchoWrites  the texts back, by context.write
`--model` says how it behaves: "fail" ends with status 3, "mute" never becomes healthy, "fifo:PATH" becomes healthy when
something has been written to the FIFO, "drain:PATH" has a drain that waits for the FIFO; anything else just serves.
"""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import click
import grpc
from google.protobuf.wrappers_pb2 import StringValue
from prometheus_client.metrics_core import CounterMetricFamily, Metric

from quire.serving.access import Role, caller
from quire.serving.errors import CallEnded, ErrorStatus
from quire.serving.flags import command_settings, option
from quire.serving.logs import configure_logging
from quire.serving.metrics import MetricsPage
from quire.serving.options import ServerOptions, server_options
from quire.serving.receiving import MAX_MESSAGE_BYTES
from quire.serving.server import Server, StopSignals, run

SERVICE = "quire.test.StandIn"
# EchoWrites is missing: the operator's.
ROLES = {
    f"/{SERVICE}/{method}": frozenset({role})
    for method, role in (
        ("Echo", Role.CLIENT),
        ("EchoStream", Role.CLIENT),
        ("Hold", Role.WORKER),
        ("WhoAmI", Role.CLIENT),
    )
}
Context = grpc.aio.ServicerContext[Any, Any]


class BrokenInvariant(Exception):
    """After this the process must end."""


async def read_fifo(path: str) -> None:
    await asyncio.to_thread(Path(path).read_bytes)


async def echo(request: StringValue, context: Context) -> StringValue:
    if request.value == "defect":
        raise KeyError("the secret that a client sent")
    if request.value == "broken":
        raise BrokenInvariant("block 7 has two owners")
    if request.value == "refuse":
        error = ErrorStatus(grpc.StatusCode.NOT_FOUND, "POOL_NOT_FOUND", "no pool 'a'", "test.quire.dev", {"pool": "a"})
        raise CallEnded(error)
    return request


async def who_am_i(request: StringValue, context: Context) -> StringValue:
    return StringValue(value=f"{caller().name} {','.join(sorted(caller().roles))}")


async def hold(request: StringValue, context: Context) -> StringValue:
    await read_fifo(request.value)
    return request


async def echo_stream(requests: AsyncIterator[StringValue], context: Context) -> AsyncIterator[StringValue]:
    async for request in requests:
        yield await echo(request, context)


async def echo_writes(requests: AsyncIterator[StringValue], context: Context) -> None:
    async for request in requests:
        await context.write(await echo(request, context))


def families() -> list[Metric]:
    return [CounterMetricFamily("quire_stand_in_pages", "Pages asked for", value=7)]


def handlers() -> grpc.GenericRpcHandler:
    coding = {"request_deserializer": StringValue.FromString, "response_serializer": StringValue.SerializeToString}
    methods = {
        "Echo": grpc.unary_unary_rpc_method_handler(echo, **coding),
        "WhoAmI": grpc.unary_unary_rpc_method_handler(who_am_i, **coding),
        "Hold": grpc.unary_unary_rpc_method_handler(hold, **coding),
        "EchoStream": grpc.stream_stream_rpc_method_handler(echo_stream, **coding),
        "EchoWrites": grpc.stream_stream_rpc_method_handler(echo_writes, **coding),
    }
    return grpc.method_handlers_generic_handler(SERVICE, methods)


async def serve(signals: StopSignals, options: ServerOptions, model: str) -> None:
    behaviour, _, fifo = model.partition(":")
    if behaviour == "fail":
        sys.stderr.write("this model has no attention\n")
        sys.exit(3)
    async with contextlib.AsyncExitStack() as stack:
        security = options.secure(roles=ROLES, domain="test.quire.dev")
        server = Server(
            service_names=[SERVICE],
            domain="test.quire.dev",
            fatal=(BrokenInvariant,),
            security=security,
            message_limits={f"/{SERVICE}/Echo": MAX_MESSAGE_BYTES},
        )
        await stack.enter_async_context(server)
        server.grpc.add_generic_rpc_handlers((handlers(),))
        if options.metrics_listen is not None:
            stack.enter_context(MetricsPage(options.metrics_listen, families, security=security))
        await server.start(options.listen)
        if behaviour == "fifo":
            await read_fifo(fifo)
        if behaviour != "mute":
            await server.announce_serving()
        drain = (lambda: read_fifo(fifo)) if behaviour == "drain" else None
        await server.serve_until_signal(signals, drain=drain, drain_timeout_s=options.drain_timeout_s)


@click.command(context_settings=command_settings("QUIRE_STAND_IN"))
@server_options(default_listen="127.0.0.1:0")
@option("--cachemgr")
@option("--model", default="")
@option("--num-blocks", type=int)
def main(server: ServerOptions, cachemgr: str, model: str, num_blocks: int) -> None:
    """Stands in for cachemgr and worker."""
    configure_logging(server.log_level, server.log_format)
    run(lambda signals: serve(signals, server, model))


if __name__ == "__main__":
    main()
