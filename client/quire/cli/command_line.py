"""The group of all commands: its order, and each expected error as one message and an exit status."""

import signal
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import click

from quire.cli.ending import EXIT_INTERRUPTED, end_process, raise_on_interrupt
from quire.client.errors import InvalidRequest, QuireError, Unavailable


class CommandLine(click.Group):
    """The group of all commands, in the order they are declared; every error becomes one message and a status."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands in the order of this file, the first ones to use first."""
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:
        """Runs a command. Expected errors end without a traceback."""
        try:
            raise_on_interrupt()
            return super().invoke(ctx)
        except KeyboardInterrupt as interrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the exit itself is not to be interrupted
            click.echo(str(interrupt) or "Interrupted.", err=True)
            end_process(EXIT_INTERRUPTED)
        except QuireError as error:
            raise explain(error) from error


def explain(error: QuireError, *, flags: Mapping[str, str] = MappingProxyType({})) -> click.ClickException:
    """Return the error as the command line shows it. A wrong value names its flag; flags has those of other names."""
    field, limit = error.metadata.get("field", ""), error.metadata.get("limit", "")
    if isinstance(error, InvalidRequest) and field and limit:
        what = "PROMPT" if field == "prompt" else flags.get(field, f"--{field.replace('_', '-')}")
        if error.reason == "INVALID_ARGUMENT" and not field.endswith("grammar"):
            return click.BadParameter(f"{error.metadata.get('value')} must be {limit}", param_hint=f"'{what}'")
        return click.BadParameter(error.message, param_hint=f"'{what}'")
    if error.reason == "UNREACHABLE":
        return click.ClickException(error.message)
    for away in (error, error.__cause__):
        if isinstance(away, Unavailable):
            return click.ClickException(_describe_away(error, away))
    return click.ClickException(f"{error.message} ({error.reason})")


def _describe_away(error: QuireError, away: Unavailable) -> str:
    """Describe a service that failed meanwhile, in one line; only the cause is kept of gRPC's text."""
    from quire.cli.snapshot import cause_of

    cause = "no answer in time" if away.reason == "DEADLINE_EXCEEDED" else cause_of(away)
    told = error.message.replace(str(away), cause).replace(away.message, cause)
    return f"a service is unavailable: {told}. `quire stats` shows if cachemgr answers, and which worker is attached."
