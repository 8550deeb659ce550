"""A client's credentials and trusted authorities: TLS, a client certificate, a token."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import grpc

from quire.client.errors import CredentialsUnusable, InvalidRequest
from quire.serving.addresses import AddressError, parse_dial_address
from quire.serving.dialing import ChannelOptions, Dialer, DialOptions

Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials(DialOptions):
    """For cachemgr and the worker alike; the fields are those of DialOptions.

    Certificates are read when a channel is made. Raises CredentialsUnusable for what never could be used.
    """

    def __post_init__(self) -> None:
        try:
            DialOptions.__post_init__(self)
        except ValueError as error:
            raise CredentialsUnusable(str(error)) from error

    def open_channel(self, address: str, options: ChannelOptions) -> grpc.aio.Channel:
        """A channel with these credentials.

        Raises InvalidRequest for a malformed address, CredentialsUnusable also if other users could read the token.
        """
        try:
            parsed = parse_dial_address(address)
        except AddressError as error:
            raise InvalidRequest(str(error)) from error
        try:
            dialer = Dialer(parsed, self)
            channel = dialer.open(options)
        except ValueError as error:
            raise CredentialsUnusable(str(error)) from error
        return cast(grpc.aio.Channel, _TokenChannel(channel, dialer.metadata)) if dialer.shows_token else channel


NO_CREDENTIALS = Credentials()


class _TokenChannel:
    """A channel with a token in every call. gRPC's own way works over TLS only; interceptors slow streams down."""

    def __init__(self, channel: grpc.aio.Channel, token: Callable[[], Metadata]) -> None:
        self._channel = channel
        self._token = token

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._channel, name)
        if name not in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
            return found

        def with_token(*args: Any, **options: Any) -> Callable[..., Any]:
            call = found(*args, **options)

            def begin(*args: Any, metadata: Metadata = (), **options: Any) -> Any:
                return call(*args, metadata=(*(metadata or ()), *self._token()), **options)

            return begin

        return with_token
