"""Adapters while the gateway serves: POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them.

Both need a key with the role operator in the file of --api-keys, and the workers ask the gateway's own token for the
same role.
"""

from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute

from quire.client.channel import RetryPolicy, retried
from quire.client.errors import OutOfRoom, QuireError
from quire.compute.v1.reasons import Reason
from quire.gateway.callers import Caller
from quire.gateway.errors import HttpError, http_error_of, invalid
from quire.gateway.fields import Fields
from quire.gateway.gateway import Gateway
from quire.gateway.http.endpoint import PostRequest, post

# A request has its last token before the worker has released its sequences.
_RELEASES = RetryPolicy(max_attempts=8)
_NAMES = {"name": "lora_name", "path": "lora_path"}


def routes(gateway: Gateway) -> list[BaseRoute]:
    """Return the endpoints."""
    return [post(gateway, "/v1/load_lora_adapter", _load), post(gateway, "/v1/unload_lora_adapter", _unload)]


async def _load(gateway: Gateway, request: PostRequest) -> Response:
    """Load an adapter from a folder of the workers' machines. Answers when requests can name it."""
    _require_operator(request.caller)
    fields = request.fields
    name, path, model = _required(fields, "lora_name"), _required(fields, "lora_path"), fields.string("model")
    fields.refuse("load_inplace", "unload the adapter before", unless=(False,))
    fields.refuse("is_3d_lora_weight", "adapters are of linear layers", unless=(False,))
    fields.end()
    if name in gateway.backends:
        raise invalid("lora_name", name, "another name: a model has it here")
    try:
        await gateway.backend_of(model, request.caller).load_adapter(name, path)
    except QuireError as error:
        raise _http_error_of(error) from error
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


async def _unload(gateway: Gateway, request: PostRequest) -> Response:
    """Unload an adapter: no new request can name it, and it goes when those that have it have ended."""
    _require_operator(request.caller)
    fields = request.fields
    name, model = _required(fields, "lora_name"), fields.string("model")
    fields.ignore("lora_int_id")
    fields.end()
    backend = gateway.backend_of(model, request.caller)
    if name not in backend.adapters or name in gateway.adapters.leaving:
        raise HttpError(404, f"the adapter {name!r} is not loaded", code="adapter_not_found", param="lora_name")
    gateway.adapters.leaving.add(name)
    try:
        await gateway.adapters.ended(name)
        await retried(lambda: backend.unload_adapter(name), _RELEASES, after=OutOfRoom)
    except QuireError as error:
        raise _http_error_of(error) from error
    finally:
        gateway.adapters.leaving.discard(name)
    return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")


def _required(fields: Fields, name: str) -> str:
    fields.require(name)
    return fields.string(name, "")


def _require_operator(caller: Caller) -> None:
    if not caller.is_operator:
        message = "loading adapters needs a key with the role operator, in the file of --api-keys"
        raise HttpError(403, message, code="role_missing")


def _http_error_of(error: QuireError) -> HttpError:
    if error.reason == Reason.ADAPTERS_IN_USE:
        return HttpError(409, error.message, code="adapters_in_use", param="lora_name")
    return http_error_of(error, _NAMES)
