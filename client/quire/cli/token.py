"""`quire token`: a new token, and the line by which a server knows it."""

import hashlib
import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

import click

PREFIX = "quire_"
NUM_RANDOM_BYTES = 32


def make_token() -> str:
    """256 random bits, with a prefix that scanners for leaked secrets recognise."""
    return PREFIX + secrets.token_urlsafe(NUM_RANDOM_BYTES)


def entry(name: str, roles: Sequence[str], token: str) -> str:
    """The token's line in a server's token file."""
    return f"{name} {','.join(roles)} {hashlib.sha256(token.encode()).hexdigest()}"


def run_token(name: str, roles: Sequence[str], out: Path | None) -> None:
    """Prints the line; the token goes to a file of its own, or to stderr. Raises click.ClickException."""
    token = make_token()
    if out is None:
        click.echo(f"token (shown once): {token}", err=True)
    else:
        _write_secret(out, token)
    click.echo(entry(name, roles, token))
    sys.stdout.flush()


def _write_secret(path: Path, token: str) -> None:
    """Write a file that only its owner can read. An existing file is replaced."""
    fresh = path.with_name(f"{path.name}.new")
    try:
        fresh.unlink(missing_ok=True)
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(f"{token}\n")
        fresh.replace(path)
    except OSError as error:
        raise click.ClickException(f"{path}: {error.strerror}") from error
