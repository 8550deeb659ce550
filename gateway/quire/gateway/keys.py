"""API keys: the tenant of a caller, by the key that it shows.

The file is of the same kind as --token-file of the services (quire.serving.access): lines of NAME ROLES SHA256HEX. NAME
is the tenant, and may have several keys. A key needs the role `client`, and to load adapters `operator`, too. Only
hashes are kept, each is compared in constant time, and the file is read again when it changes.
"""

import hmac
from collections.abc import Callable, Iterable
from pathlib import Path

from quire.client.engine.sampling import MAX_TENANT_LENGTH
from quire.gateway.callers import NOBODY, Caller
from quire.gateway.errors import HttpError
from quire.serving.access import Role, TokenFile, digest_of, read_token_file
from quire.serving.addresses import Address, AddressError, is_local
from quire.serving.watched import FileError, WatchedFiles

MAX_KEY_LENGTH = 1024
"""A longer key is refused before it is hashed."""


class KeyFile:
    """Callers by the keys of a file. Raises FileError, when it is made, if the file can't be used."""

    def __init__(self, path: Path, *, priority_of: Callable[[str], int] = lambda tenant: 0) -> None:
        """priority_of returns the number added to the priority of a tenant's requests."""
        self._file = WatchedFiles("API keys", [path], lambda: read_keys(path))
        self._priority_of = priority_of

    def caller_of(self, key: str | None) -> Caller:
        """Return the caller with this key, None being no key. Raises HttpError: 401, or 403 without the role."""
        digest = _digest_of(key)
        found = None if digest is None else self._file.current().by_token(digest)
        if found is None:
            raise _unknown_key()
        if Role.CLIENT not in found.roles:
            raise HttpError(403, f"the key of {found.name!r} has not the role client", code="role_missing")
        return Caller(
            name=found.name,
            tenant=found.name,
            priority=self._priority_of(found.name),
            is_operator=Role.OPERATOR in found.roles,
        )


class GivenKeys:
    """Callers with one of the keys of --api-key; all are one caller. Only the keys' hashes are kept."""

    def __init__(self, keys: Iterable[str]) -> None:
        """Take the keys."""
        self._digests = [digest_of(key) for key in keys]

    def caller_of(self, key: str | None) -> Caller:
        """Return the one caller. Raises HttpError: 401."""
        digest = _digest_of(key) or b""
        matches = [hmac.compare_digest(digest, each) for each in self._digests]
        if not any(matches):
            raise _unknown_key()
        return NOBODY


def _digest_of(key: str | None) -> bytes | None:
    """Return the hash of a key; None of one that is too long. Raises HttpError without a key."""
    if key is None:
        raise HttpError(401, "no API key was given: send Authorization: Bearer KEY", code="missing_api_key")
    return digest_of(key.encode(errors="replace").decode()) if len(key) <= MAX_KEY_LENGTH else None


def _unknown_key() -> HttpError:
    return HttpError(401, "the API key is not known here", code="invalid_api_key")


def read_keys(path: Path) -> TokenFile:
    """Read a file of keys. Raises FileError with the line, which quotes no key."""
    file = read_token_file(path)
    for name in (entry.name for entry in file.tokens):
        if len(name) > MAX_TENANT_LENGTH:
            raise FileError(f"{path}: a name has {len(name)} characters, must be at most {MAX_TENANT_LENGTH}")
    return file


def check_exposure(addresses: Iterable[Address], *, has_keys: bool, is_allowed: bool) -> None:
    """Raise AddressError for an address that others reach, if there are no keys and that is not allowed."""
    if has_keys or is_allowed:
        return
    for address in addresses:
        if not is_local(address):
            raise AddressError(
                f"{address}: not loopback, and there are no API keys: any client that reaches it could generate. "
                "Give --api-key KEY, --api-keys FILE or --allow-anonymous"
            )
