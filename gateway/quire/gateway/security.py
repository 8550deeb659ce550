"""The security of a gateway, as its flags have it: TLS, the callers' keys, the tenants' limits."""

from __future__ import annotations

from quire.gateway.callers import Keys
from quire.gateway.config import GatewayOptions
from quire.gateway.keys import GivenKeys, KeyFile, check_exposure
from quire.gateway.tenant_limits import TenantRateLimiter
from quire.serving.addresses import AddressError
from quire.serving.options import ServerOptions
from quire.serving.security import Security

DOMAIN = "gateway.quire.dev"


def secure(options: ServerOptions, flags: GatewayOptions) -> tuple[Security, Keys | None, TenantRateLimiter | None]:
    """Return the server's TLS, the callers' keys and the tenants' limits, if the files of the flags can be used.

    Raises FileError, or AddressError for plain text, or for callers without a key, where others can reach it.
    """
    security = _secure_addresses(options, flags)
    rate_limiter = None if flags.tenant_limits is None else TenantRateLimiter(flags.tenant_limits)
    keys: Keys | None = GivenKeys(flags.api_key) if flags.api_key else None
    if flags.api_keys is not None:
        keys = KeyFile(flags.api_keys, priority_of=rate_limiter.priority_of if rate_limiter else lambda tenant: 0)
    return security, keys, rate_limiter


def _secure_addresses(options: ServerOptions, flags: GatewayOptions) -> Security:
    """Return the server's TLS. Raises one AddressError for all that an address lacks that others can reach."""
    addresses = [*options.listen, *flags.grpc_listen, *([flags.shepherd] if flags.shepherd else [])]
    lacks: list[AddressError] = []
    try:
        check_exposure(addresses, has_keys=flags.has_keys, is_allowed=flags.allow_anonymous)
    except AddressError as error:
        lacks.append(error)
    try:
        security = options.secure(roles={}, domain=DOMAIN)
    except AddressError as error:
        lacks.append(error)
    if lacks:
        raise AddressError(". ".join(map(str, lacks)))
    return security
