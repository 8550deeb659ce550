"""Requests that browsers send for pages: names of this server in `Host`, and the pages' origins in `Origin`.

A page of any site can make its visitor's browser send requests to a gateway that the browser reaches. Two headers tell:

Host     The name that the browser has resolved. A site may let its own name resolve to a loopback address, and its
         pages then are of one origin with the gateway (DNS rebinding). A gateway on loopback addresses without API keys
         answers to names of loopback, to its own addresses, and to --allowed-hosts.
Origin   The site of the page. A browser sends a POST without asking first if its body is text/plain, and withholds
         the answer alone. Without API keys a foreign origin is refused. With keys it is not: a foreign page has no key.

--allowed-origins names the sites with pages that may call and read: they get the headers of CORS, and an answer to the
browser's preflight.
"""

import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from quire.gateway.errors import HttpError
from quire.serving.addresses import Address, TcpAddress, is_local

ANY = "*"
_EXPOSED = ("X-Request-Id", "Retry-After")
_PREFLIGHT_S = 600


@dataclass(frozen=True, slots=True)
class BrowserRules:
    """The rules for requests of browsers.

    origins    sites with pages that may call, as "https://chat.example"; "*": all
    hosts      names that Host may have, in lower case, beside those of loopback; None: any
    has_keys   callers show API keys, so that a page without a key can do nothing
    """

    origins: frozenset[str] = frozenset()
    hosts: frozenset[str] | None = None
    has_keys: bool = False

    def allows(self, origin: str) -> bool:
        """Return whether pages of this origin may call."""
        return ANY in self.origins or origin in self.origins

    def check(self, headers: Mapping[str, str]) -> None:
        """Raise HttpError, 403, for a name of this server or for an origin that is not allowed."""
        host, origin = headers.get("host", ""), headers.get("origin")
        if self.hosts is not None and not _is_named(host, self.hosts):
            raise HttpError(
                403,
                f"Host is {host[:100]!r}, which is no name of this server: give it with --allowed-hosts",
                code="host_not_allowed",
            )
        if origin is None or self.allows(origin) or _is_same(origin, host):
            return
        if not self.has_keys or "access-control-request-method" in headers:
            raise HttpError(
                403,
                f"Origin is {origin[:100]!r}, and its pages may not call this server: give it with --allowed-origins",
                code="origin_not_allowed",
            )


def browser_rules(
    addresses: Iterable[Address], *, has_keys: bool, origins: Iterable[str], hosts: Iterable[str]
) -> BrowserRules:
    """Return the rules of a gateway that listens on these addresses. Raises AddressError for an unknown name."""
    own = [each for each in addresses if isinstance(each, TcpAddress)]
    given = {host.lower() for host in hosts}
    is_exposed = has_keys or not all(is_local(each) for each in own)
    any_host = ANY in given or (is_exposed and not given)
    return BrowserRules(
        origins=frozenset(origins),
        hosts=None if any_host else frozenset(given | {each.host.lower() for each in own}),
        has_keys=has_keys,
    )


def cors_of(app: ASGIApp, rules: BrowserRules) -> CORSMiddleware:
    """Return app with answers to preflights of the allowed origins, and with the headers that let their pages read."""
    return CORSMiddleware(
        app,
        allow_origins=rules.origins,
        allow_methods=("GET", "POST"),
        allow_headers=(ANY,),
        allow_private_network=True,
        expose_headers=_EXPOSED,
        max_age=_PREFLIGHT_S,
    )


def _is_named(host: str, names: frozenset[str]) -> bool:
    """Return whether Host is one of the names, or of loopback, on any port. A request without Host is no browser's."""
    if not host:
        return True
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    return name in names or _is_loopback(name.removesuffix("."))


def _is_loopback(name: str) -> bool:
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _is_same(origin: str, host: str) -> bool:
    """Return whether an origin is this server's own. The scheme may differ behind a proxy that ends TLS."""
    return origin.lower().partition("://")[2] == host.lower() != ""
