"""Certificates made for a test, in files as a server or a client takes them."""

from __future__ import annotations

import datetime
import hashlib
from dataclasses import dataclass
from pathlib import Path

import trustme

YEAR = datetime.timedelta(days=365)


@dataclass(frozen=True)
class Pair:
    """A certificate's chain and its key."""

    cert: Path
    key: Path

    def replace_by(self, other: Pair) -> None:
        """The other's content in these files."""
        self.cert.write_bytes(other.cert.read_bytes())
        self.key.write_bytes(other.key.read_bytes())

    def flags(self, prefix: str = "--tls") -> tuple[str, ...]:
        """For a command."""
        return (f"{prefix}-cert", str(self.cert), f"{prefix}-key", str(self.key))


class Authority:
    """A CA with files in a folder."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._ca = trustme.CA()
        self._folder = folder
        self._name = name
        self.path = folder / f"{name}.pem"
        self._ca.cert_pem.write_to_path(str(self.path))

    def issue(self, *names: str, common_name: str | None = None, days: int = 365) -> Pair:
        """A certificate for these SAN names; days may be negative: it has expired since then."""
        now = datetime.datetime.now(datetime.UTC)
        issued = self._ca.issue_cert(
            *names, common_name=common_name, not_before=now - YEAR, not_after=now + datetime.timedelta(days=days)
        )
        stem = hashlib.sha256(issued.cert_chain_pems[0].bytes()).hexdigest()[:8]
        pair = Pair(self._folder / f"{self._name}-{stem}.pem", self._folder / f"{self._name}-{stem}.key")
        pair.cert.write_bytes(b"".join(pem.bytes() for pem in issued.cert_chain_pems))
        issued.private_key_pem.write_to_path(str(pair.key))
        return pair


def sha256(token: str) -> str:
    """As it stands in a token file."""
    return hashlib.sha256(token.encode()).hexdigest()
