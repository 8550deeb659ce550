"""Authentication of callers, and authorization of their calls.

    Evidence   a caller's credentials: the hash of a token, the name in a verified certificate
    TokenFile  the callers' names and roles, by evidence; read again when it changes
    Access     method x evidence -> Identity | ErrorStatus

A token takes precedence over a certificate; an unknown token is refused. Without a token the certificate identifies
the caller. A server with neither a token file nor an authority for client certificates authenticates nobody: every
caller is ANYBODY, with every role.
"""

import contextvars
import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import grpc

from quire.cache.v1.reasons import Reason
from quire.serving.errors import ErrorStatus
from quire.serving.watched import FileError, WatchedFiles, read_bytes


class Role(StrEnum):
    """A role of a caller."""

    CLIENT = "client"
    WORKER = "worker"
    OPERATOR = "operator"
    CONTENT = "content"
    GATEWAY = "gateway"
    """A client that serves many tenants: it may name the tenant of a sequence."""


Roles = frozenset[Role]
EVERY_ROLE: Roles = frozenset(Role)
# The roles of a verified certificate without a line in the token file.
ROLES_WITHOUT_FILE: Roles = frozenset({Role.CLIENT})
# Methods of these services disclose nothing about blocks: health, and the published protos.
OPEN_SERVICES = frozenset({"grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"})
ANY_CERTIFICATE = "*"

_DIGEST = re.compile(r"[0-9a-f]{64}")
_BEARER = re.compile(r"bearer +(?P<token>\S+) *", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Identity:
    """A caller: its name from the token file or the certificate, "" for ANYBODY, and its roles."""

    name: str
    roles: Roles


ANYBODY = Identity("", EVERY_ROLE)
_caller: contextvars.ContextVar[Identity] = contextvars.ContextVar("caller", default=ANYBODY)


def caller() -> Identity:
    """The caller of the call that the running handler answers."""
    return _caller.get()


def set_caller(identity: Identity) -> None:
    """Sets the caller of the call that this task answers; for the interceptor."""
    _caller.set(identity)


@dataclass(frozen=True, slots=True)
class Evidence:
    """A caller's credentials.

    shows_token        True if an authorization was sent, of any form
    token_digest       sha256 of the bearer token; None if there is none
    certificate_name   of the verified client certificate; None if there is none
    """

    shows_token: bool = False
    token_digest: bytes | None = field(default=None, repr=False)
    certificate_name: str | None = None


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """A line of the token file: the caller of the token with this sha256."""

    name: str
    roles: Roles
    digest: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class TokenFile:
    """The callers. `certificates` is by name; ANY_CERTIFICATE stands for those without a line."""

    tokens: tuple[TokenEntry, ...] = ()
    certificates: Mapping[str, Roles] = field(default_factory=dict)

    def by_token(self, digest: bytes) -> Identity | None:
        """The caller with this token. Compares with every entry, each in constant time."""
        found = None
        for entry in self.tokens:
            if hmac.compare_digest(entry.digest, digest):
                found = entry
        return None if found is None else Identity(found.name, found.roles)

    def by_certificate(self, name: str) -> Identity:
        """A verified certificate's; without roles if no line is about it."""
        return Identity(name, self.certificates.get(name, self.certificates.get(ANY_CERTIFICATE, frozenset())))


def read_token_file(path: Path) -> TokenFile:
    """Reads lines of `NAME ROLES SHA256HEX` or `NAME ROLES cert`. Raises FileError, which quotes nothing of them."""
    tokens: list[TokenEntry] = []
    certificates: dict[str, Roles] = {}
    try:
        lines = read_bytes(path).decode().splitlines()
    except UnicodeDecodeError:
        raise FileError(f"{path}: not UTF-8") from None
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"{path}:{number}"
        if len(words) != 3:
            raise FileError(f"{where}: {len(words)} words, must be 3: NAME ROLES SHA256, or NAME ROLES cert")
        name, roles, proof = words[0], _read_roles(words[1], where), words[2].lower()
        if proof == "cert":
            if name in certificates:
                raise FileError(f"{where}: a second line for the certificate of one name")
            certificates[name] = roles
        elif _DIGEST.fullmatch(proof):
            tokens.append(TokenEntry(name, roles, bytes.fromhex(proof)))
        else:
            raise FileError(f"{where}: the third word must be the token's sha256, 64 hex digits, or cert")
    digests = [entry.digest for entry in tokens]
    if len(set(digests)) < len(digests):
        raise FileError(f"{path}: two lines for one token")
    return TokenFile(tuple(tokens), certificates)


def _read_roles(text: str, where: str) -> Roles:
    try:
        return frozenset(Role(word) for word in text.split(","))
    except ValueError:
        raise FileError(f"{where}: roles must be some of {','.join(Role)}, separated by commas") from None


def digest_of(token: str) -> bytes:
    """The digest that represents a token in files and in memory."""
    return hashlib.sha256(token.encode()).digest()


def evidence_of(context: grpc.aio.ServicerContext[Any, Any]) -> Evidence:
    """The credentials of a call. gRPC reports verified certificates only: a port requires one or requests none."""
    given = [value for key, value in context.invocation_metadata() or () if key == "authorization"]
    if not given:
        return Evidence(certificate_name=certificate_name(context.auth_context()))
    match = _BEARER.fullmatch(given[0]) if len(given) == 1 and isinstance(given[0], str) else None
    return Evidence(shows_token=True, token_digest=None if match is None else digest_of(match["token"]))


def certificate_name(auth_context: Mapping[str, Any]) -> str | None:
    """A certificate's first SAN URI, else its first SAN DNS name, else its subject's common name; None without one."""
    for key in ("peer_uri", "peer_dns", "x509_common_name"):
        for value in auth_context.get(key, ()):
            name = value.decode(errors="replace") if isinstance(value, bytes) else str(value)
            if name:
                return name
    return None


class Access:
    """Decides which callers may call which methods.

    roles       full method name ("/quire.cache.v1.CacheService/PlanStep") -> the roles that may call it;
                a method without an entry is for operators
    token_file  None: there is none
    domain      of the refusals
    """

    def __init__(self, roles: Mapping[str, Roles], *, token_file: Path | None, domain: str) -> None:
        self._roles = roles
        self._domain = domain
        self._file = (
            None
            if token_file is None
            else WatchedFiles("token file", [token_file], lambda: read_token_file(token_file))
        )

    def decide(self, method: str, evidence: Evidence) -> Identity | ErrorStatus:
        """The caller, if it may call the method; else the error, which discloses nothing about other callers."""
        identity = self._identify(evidence)
        if isinstance(identity, ErrorStatus):
            return identity
        needed = self._roles.get(method, frozenset({Role.OPERATOR}))
        if identity.roles & needed:
            return identity
        return role_missing(method, needed, identity.name, self._domain)

    def _identify(self, evidence: Evidence) -> Identity | ErrorStatus:
        if evidence.shows_token:
            file = TokenFile() if self._file is None else self._file.current()
            found = None if evidence.token_digest is None else file.by_token(evidence.token_digest)
            return found or token_rejected(self._domain)
        if evidence.certificate_name is None:
            return credentials_missing(self._domain)
        if self._file is None:
            return Identity(evidence.certificate_name, ROLES_WITHOUT_FILE)
        return self._file.current().by_certificate(evidence.certificate_name)


def is_open(method: str) -> bool:
    """True if every caller with a connection may call it."""
    return method.lstrip("/").rpartition("/")[0] in OPEN_SERVICES


def credentials_missing(domain: str) -> ErrorStatus:
    """The error for a call without credentials."""
    message = "the call has neither a client certificate nor a token (metadata authorization: Bearer TOKEN)"
    return ErrorStatus.of(Reason.CREDENTIALS_MISSING, message, domain)


def token_rejected(domain: str) -> ErrorStatus:
    """The error for a call with unknown credentials."""
    message = "the call's authorization is not a bearer token that this server knows"
    return ErrorStatus.of(Reason.TOKEN_REJECTED, message, domain)


def role_missing(method: str, needed: Roles, name: str, domain: str) -> ErrorStatus:
    """The error for a caller without a role for the method."""
    roles = ",".join(sorted(needed))
    message = f"{name!r} has none of the roles that {method} needs: {roles}"
    metadata = {"method": method, "roles": roles, "name": name}
    return ErrorStatus.of(Reason.ROLE_MISSING, message, domain, metadata)
