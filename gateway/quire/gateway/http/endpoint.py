"""The frame of every HTTP endpoint: the request's id, the caller, the body, errors, a line in the log.

routes = [post(gateway, "/v1/completions", create_completion)]
async def create_completion(gateway: Gateway, request: PostRequest) -> Response: ...
"""

import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, Router
from starlette.types import Message, Receive, Scope, Send

from quire.client.errors import QuireError
from quire.gateway.callers import NOBODY, Caller
from quire.gateway.errors import HttpError, http_error_of
from quire.gateway.fields import Fields, parse_body
from quire.gateway.gateway import Gateway
from quire.gateway.http.bodies import read_body
from quire.gateway.http.browsers import BrowserRules, cors_of
from quire.gateway.http.streams import SEND_KEY, CallerGone, encode_json, while_connected
from quire.serving.logs import REQUEST_ID_KEY, begin_call, describe_exception
from quire.serving.tracing import HttpSpan, http_request

log = logging.getLogger(__name__)

IGNORED_FIELDS_KEY = "X-Quire-Ignored-Fields"
"""The header of an answer that names fields without effect: unknown ones, which --unknown-fields let the gateway
ignore, and actions of hints that are not known."""
_MAX_SHOWN_FIELDS = 20
_PROBED = ("/health", "/ready")
_CALLER = "caller"
_NOT_PLAIN = re.compile(r"[^!-~]")


@dataclass(frozen=True, slots=True)
class PostRequest:
    """A request with a JSON body.

    began_s   seconds since 1970, for `created`
    """

    caller: Caller
    fields: Fields
    id: str
    began_s: int
    raw: Request


Handler = Callable[[Gateway, PostRequest], Awaitable[Response]]
ErrorResponse = Callable[[HttpError, str], Response]
"""Makes the answer of an error, given the request's id."""


def post(gateway: Gateway, path: str, handler: Handler) -> Route:
    """Return the route of an endpoint that takes a JSON object. The handler is cancelled if the caller disconnects."""

    async def endpoint(raw: Request) -> Response:
        caller = raw.scope["state"][_CALLER] = gateway.caller_of(authorization_of(raw.headers))
        if gateway.is_draining:
            raise HttpError(503, "this server is about to end", code="shutting_down")
        with gateway.bodies.opened(caller) as count:
            body = await read_body(raw, count, max_bytes=gateway.limits.max_body_bytes)
            fields = parse_body(body, ignores_unknown=gateway.limits.ignores_unknown_fields)
            request = PostRequest(caller, fields, raw.scope["state"][REQUEST_ID_KEY], int(time.time()), raw)
            try:
                response = await while_connected(raw, handler(gateway, request))
                if ignored := _ignored(fields):
                    response.headers[IGNORED_FIELDS_KEY] = ", ".join(ignored[:_MAX_SHOWN_FIELDS])
                return response
            except QuireError as error:
                found = http_error_of(error)
            except HttpError as error:
                found = error
            found.param = fields.aliases.get(found.param or "", found.param)
            raise found

    return Route(path, endpoint, methods=["POST"])


def _ignored(fields: Fields) -> list[str]:
    """Return the paths of a body's unknown fields, and those without effect with the reason."""
    reasons = fields.without_effect.items()
    return [*map(quote, fields.ignored or ()), *(f"{quote(path)};reason={reason}" for path, reason in reasons)]


def authorization_of(headers: Headers) -> str | None:
    """Return the Authorization header; without it a key in Anthropic's header, x-api-key, in that form."""
    key = headers.get("x-api-key")
    return headers.get("authorization") or (None if key is None else f"Bearer {key}")


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a value as a JSON answer."""
    return Response(encode_json(value), status, headers, media_type="application/json")


def error_response(error: HttpError, request_id: str) -> Response:
    """Return an error as an answer in OpenAI's shape."""
    return json_response(error.body, error.status, error.headers)


class HttpApp:
    """The ASGI application: routes, and for each request an id, one answer also for errors, and a line in the log."""

    def __init__(
        self,
        gateway: Gateway,
        routes: list[BaseRoute],
        rules: BrowserRules,
        *,
        error_responses: Mapping[str, ErrorResponse] | None = None,
    ) -> None:
        """error_responses make the answers of errors at paths that begin so, for an API that has another shape."""
        self._gateway = gateway
        self._rules = rules
        self._with_cors = cors_of(self._answer, rules)
        self._error_responses = error_responses or {}
        self._paths = {route.endpoint: route.path for route in routes if isinstance(route, Route)}
        self._router = Router(routes, redirect_slashes=False, default=_not_found)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            raise RuntimeError(f"{scope['type']} is not served")
        origin = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"origin"), None)
        answer = self._with_cors if origin is not None and self._rules.allows(origin) else self._answer
        await answer(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        call = begin_call([(REQUEST_ID_KEY, headers.get(REQUEST_ID_KEY))])
        scope["app"] = self  # so that Starlette raises for a wrong method
        scope.setdefault("state", {}).update({REQUEST_ID_KEY: call.request_id, SEND_KEY: send})
        status, failed = 0, None

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID_KEY] = call.request_id
            await send(message)

        # Probes and pages are no traces.
        tracing = http_request("POST", headers) if scope["method"] == "POST" else nullcontext(HttpSpan())
        with tracing as span:
            try:
                if _is_tcp(scope):  # no browser connects to a unix socket
                    self._rules.check(headers)
                await self._router(scope, receive, send_with_id)
            except CallerGone:
                status = status or 499
            except Exception as error:
                if status:  # the answer has begun; the server closes the connection
                    raise
                failed = _http_error_of(error, scope)
                answer = self._error_response(scope["path"])(failed, call.request_id)
                await answer(scope, receive, send_with_id)
            finally:
                path = self._paths.get(scope.get("endpoint", _not_found), "other")
                self._gateway.metrics.answered(path, status)
                _log_answer(scope, path, status, failed, time.perf_counter() - call.begun)
                span.answered(path, status, call.request_id)

    def _error_response(self, path: str) -> ErrorResponse:
        found = (make for begin, make in self._error_responses.items() if path == begin or path.startswith(f"{begin}/"))
        return next(found, error_response)


def _log_answer(scope: Scope, path: str, status: int, error: HttpError | None, took_s: float) -> None:
    """Log a line: of errors always, but not of probes, which may ask each second; of others for --log-level debug."""
    if error is None or path in _PROBED:
        log.debug("answered method=%s path=%s status=%d took_s=%.4f", scope["method"], path, status, took_s)
        return
    level = logging.WARNING if status >= 500 else logging.INFO
    caller: Caller = scope["state"].get(_CALLER, NOBODY)
    words = (scope["method"], path, status, error.code, _one_word(error.param or ""), caller.name, took_s)
    log.log(level, "refused method=%s path=%s status=%d code=%s param=%s caller=%s took_s=%.4f", *words)


def _one_word(text: str) -> str:
    """Return a text of the caller as one word of printable ASCII."""
    return _NOT_PLAIN.sub("?", text[:100])


def _is_tcp(scope: Scope) -> bool:
    return scope.get("server") is not None and scope["server"][1] is not None


async def _not_found(scope: Scope, receive: Receive, send: Send) -> None:
    raise HttpError(404, "there is nothing at this path", code="path_not_found")


def _http_error_of(error: Exception, scope: Scope) -> HttpError:
    match error:
        case HttpError():
            return error
        case QuireError():
            return http_error_of(error)
        case HTTPException(status_code=405):
            allowed = (error.headers or {}).get("Allow", "another method")
            return HttpError(405, f"this path takes {allowed}, not {scope['method'][:20]}", code="method_not_allowed")
        case HTTPException():  # of files
            return HttpError(error.status_code, "there is nothing at this path", code="path_not_found")
        case _:
            log.error("an endpoint failed: %s", describe_exception(error))
            return HttpError(500, "the server failed on this request; its log has the place", code="internal_error")
