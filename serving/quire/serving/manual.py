"""The text of a server's `--help`: its flags by topic, then addresses, signals, …"""

from collections.abc import Iterable

import click

# Sections by how the names of their flags begin; what begins like none of these is the server's own.
SECTIONS = (
    ("Serving", ("--listen", "--metrics-listen", "--health-listen", "--drain-timeout")),
    ("Callers", ("--tls-", "--token-", "--allow-plaintext", "--tenants", "--max-leases")),
    ("The cachemgr", ("--cachemgr",)),
    ("Logs", ("--log-",)),
    ("Help", ("-h", "--help", "--check")),
)
OWN = "Options"

SIGNALS = (
    ("SIGTERM, SIGINT", "Drain: health is NOT_SERVING, new work is refused, running calls finish; then exit."),
    ("the second one", "Exit at once."),
)
ADDRESSES = (("host:port", "Port 0 takes a free one, which the log names."),)
EXIT_STATUSES = (
    ("0", "It stopped on a signal."),
    ("1", "It could not start, or had to stop: the last line of the log has the reason."),
    ("2", "A flag is wrong."),
    ("128 + N", "Stopped at once by a second signal N."),
)


class ServerCommand(click.Command):
    """A command with a manual. `files`: important paths and their meaning."""

    files: tuple[tuple[str, str], ...] = ()

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        records: dict[str, list[tuple[str, str]]] = {OWN: []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                records.setdefault(section_of(parameter.opts), []).append(record)
        for title in (OWN, *(title for title, _ in SECTIONS)):
            write_section(formatter, title, records.get(title, ()))

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        prefix = f"{ctx.auto_envvar_prefix}_"
        write_section(formatter, "Addresses", ADDRESSES)
        write_section(formatter, "Signals", SIGNALS)
        write_section(formatter, "Exit status", EXIT_STATUSES)
        environment = [(f"{prefix}FLAG", "Stands for --flag; the flag wins. A list is separated by spaces.")]
        write_section(formatter, "Environment", environment)
        write_section(formatter, "Files", self.files)


def section_of(names: Iterable[str]) -> str:
    """The section that lists a flag."""
    for title, beginnings in SECTIONS:
        if any(name.startswith(beginnings) for name in names):
            return title
    return OWN


def write_section(formatter: click.HelpFormatter, title: str, rows: Iterable[tuple[str, str]]) -> None:
    """Write a section of the manual; nothing if there are no rows."""
    rows = list(rows)
    if rows:
        with formatter.section(title):
            formatter.write_dl(rows)
