"""The HTTP application: all endpoints of a gateway. Each of these modules has `routes(gateway) -> list[BaseRoute]`."""

from starlette.routing import BaseRoute

from quire.gateway.anthropic import errors, messages
from quire.gateway.gateway import Gateway
from quire.gateway.http import openapi, page, status
from quire.gateway.http.browsers import BrowserRules
from quire.gateway.http.endpoint import HttpApp
from quire.gateway.openai import adapters, chat, completions, models, responses


def make_app(gateway: Gateway, rules: BrowserRules) -> HttpApp:
    """Return the ASGI application of a gateway, with its rules for browsers."""
    routes: list[BaseRoute] = []
    # The first that fits is taken.
    for module in (completions, chat, responses, messages, models, adapters, status, page):
        routes += module.routes(gateway)
    routes += openapi.routes(routes)
    return HttpApp(gateway, routes, rules, error_responses={messages.PATH: errors.error_response})
