"""Who is calling, and whether the method is for them.

    Evidence   what a caller shows: the hash of a token, the names in a verified certificate
    TokenFile  which evidence belongs to whom, and their roles; read again when it changes
    Access     method x evidence -> Identity | ErrorStatus

A token that is shown decides, also beside a certificate: one that is not known is refused. Without a token it is the
certificate. A server that was given neither a token file nor an authority for client certificates asks nobody: every
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

from quire.serving.errors import ErrorStatus
from quire.serving.watched import FileError, WatchedFiles, read_bytes


class Role(StrEnum):
    """What a caller may be."""

    CLIENT = "client"
    WORKER = "worker"
    OPERATOR = "operator"
    CONTENT = "content"
    GATEWAY = "gateway"
    """A client that serves many tenants: it may say whose a sequence is."""


Roles = frozenset[Role]
EVERY_ROLE: Roles = frozenset(Role)
# What a verified certificate is good for where no token file says more.
ROLES_WITHOUT_FILE: Roles = frozenset({Role.CLIENT})
# Methods of these services say nothing about anybody's blocks: health, and the published protos.
OPEN_SERVICES = frozenset({"grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"})
ANY_CERTIFICATE = "*"

_DIGEST = re.compile(r"[0-9a-f]{64}")
_BEARER = re.compile(r"bearer +(?P<token>\S+) *", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Identity:
    """A caller: a name out of the token file or a certificate, "" for ANYBODY, and what it may be."""

    name: str
    roles: Roles


ANYBODY = Identity("", EVERY_ROLE)
_caller: contextvars.ContextVar[Identity] = contextvars.ContextVar("caller", default=ANYBODY)


def caller() -> Identity:
    """Whose call the running handler answers."""
    return _caller.get()


def set_caller(identity: Identity) -> None:
    """For the interceptor: says whose call this task answers."""
    _caller.set(identity)


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a caller has shown.

    shows_token        whether an authorization was sent, of whatever form
    token_digest       sha256 of the bearer token; None if there is none
    certificate_name   of the verified client certificate; None if there is none
    """

    shows_token: bool = False
    token_digest: bytes | None = field(default=None, repr=False)
    certificate_name: str | None = None


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """A line of the token file: whose token has this sha256."""

    name: str
    roles: Roles
    digest: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class TokenFile:
    """Who is who. `certificates` is by name; ANY_CERTIFICATE stands for those without a line."""

    tokens: tuple[TokenEntry, ...] = ()
    certificates: Mapping[str, Roles] = field(default_factory=dict)

    def by_token(self, digest: bytes) -> Identity | None:
        """Whose token this is. Compares with every entry, each in constant time."""
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
    """What stands for a token in files and in memory."""
    return hashlib.sha256(token.encode()).digest()


def evidence_of(context: grpc.aio.ServicerContext[Any, Any]) -> Evidence:
    """What a call shows. A certificate that gRPC tells of has been verified: ports ask for none, or require it."""
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
    """What a server asks of its callers.

    roles       full method name ("/quire.cache.v1.CacheService/PlanStep") -> the roles of which a caller needs one;
                a method that is not there is the operator's
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
        """Who the caller is, if the method is for them; else what to answer, which says nothing about others."""
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
    """True if everybody who gets a connection may call it."""
    return method.lstrip("/").rpartition("/")[0] in OPEN_SERVICES


def credentials_missing(domain: str) -> ErrorStatus:
    """What a caller is told who shows nothing."""
    message = "neither a client certificate nor a token (metadata authorization: Bearer TOKEN) was shown"
    return ErrorStatus(grpc.StatusCode.UNAUTHENTICATED, "CREDENTIALS_MISSING", message, domain)


def token_rejected(domain: str) -> ErrorStatus:
    """What a caller is told whose authorization stands for nobody."""
    message = "the authorization shown is not a bearer token that this server knows"
    return ErrorStatus(grpc.StatusCode.UNAUTHENTICATED, "TOKEN_REJECTED", message, domain)


def role_missing(method: str, needed: Roles, name: str, domain: str) -> ErrorStatus:
    """What a caller is told whom the method is not for."""
    roles = ",".join(sorted(needed))
    message = f"{name!r} has none of the roles that {method} needs: {roles}"
    metadata = {"method": method, "roles": roles, "name": name}
    return ErrorStatus(grpc.StatusCode.PERMISSION_DENIED, "ROLE_MISSING", message, domain, metadata)
