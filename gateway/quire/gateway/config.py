"""The gateway's own flags."""

import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from quire.cache.v1.lease_bounds import DEFAULT_TTL_S, MAX_TTL_S, MIN_TTL_S
from quire.client.engine.flags import SPECULATIVE_FLAG
from quire.client.engine.speculative import SpeculativeConfig
from quire.gateway.chat.options import ChatOptions
from quire.gateway.chat.tools.formats import REASONING_FORMATS, TOOL_FORMATS
from quire.gateway.kept_responses import Kept, KeptResponses
from quire.gateway.limits import RequestLimits
from quire.gateway.prompt_cache import KeptPrompt
from quire.serving.addresses import Address
from quire.serving.flags import FILE, HOST_FLAGS, LISTEN_ADDRESS, Flag, cachemgr_option, option

NO_REASONING = "none"
"""The value of --reasoning-parser that leaves reasoning in the content."""

_DEFAULTS = RequestLimits()
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://([^\s/?#@:\[\]]+|\[[0-9a-f:.]+\])(:\d{1,5})?")
NO_FLAGS_OF_GATEWAY = ("--health-listen", "--token-listen", "--token-file")
"""Flags of gRPC servers that a gateway does not have: its callers are those of --api-keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayOptions:
    """The values of the gateway's own flags; see OWN_FLAGS."""

    cachemgr: str
    served_model_name: tuple[str, ...]
    model: str | None
    pool: str
    tokenizer: str | None
    chat_template: Path | None
    tool_parser: str | None
    reasoning_parser: str | None
    special_tokens_in_content: bool
    api_key: tuple[str, ...] = field(repr=False)
    api_keys: Path | None
    tenant_limits: Path | None
    allow_anonymous: bool
    allowed_origins: tuple[str, ...]
    allowed_hosts: tuple[str, ...]
    grpc_listen: tuple[Address, ...]
    shepherd: Address | None
    max_body_bytes: int
    max_open_body_bytes: int
    max_prompts: int
    max_samples: int
    send_timeout: float
    stream_ping: float
    strict_max_tokens: bool
    unknown_fields: str
    responses_kept_s: float
    responses_kept_bytes: int
    max_waiting_requests: int
    max_waiting_tokens: int
    max_unread_tokens: int
    speculative_config: SpeculativeConfig | None
    lease_ttl: float

    def __post_init__(self) -> None:
        """Raise click.UsageError for keys that are given in two ways, and for one that no caller could send."""
        if self.api_key and self.api_keys is not None:
            raise click.UsageError("--api-key and --api-keys exclude each other: a key is the one's or in the other.")
        if any(not key or not key.isprintable() or " " in key for key in self.api_key):
            raise click.BadParameter("must be one word of printable characters", param_hint="'--api-key'")

    @property
    def has_keys(self) -> bool:
        """True if callers must send a key."""
        return bool(self.api_key) or self.api_keys is not None

    @property
    def kept_responses(self) -> KeptResponses:
        """Return an empty store of responses."""
        return self._kept()

    @property
    def kept_prompts(self) -> Kept[KeptPrompt]:
        """Return an empty store of prompts."""
        return self._kept()

    def _kept(self) -> Kept[Any]:
        return Kept(keep_s=self.responses_kept_s, max_tenant_bytes=self.responses_kept_bytes, clock=time.monotonic)

    @property
    def chat(self) -> ChatOptions:
        """Return the choices for chats."""
        return ChatOptions(
            template_file=self.chat_template,
            tools=None if self.tool_parser is None else TOOL_FORMATS[self.tool_parser],
            reasoning=REASONING_FORMATS.get(self.reasoning_parser or ""),
            has_reasoning=self.reasoning_parser != NO_REASONING,
            special_tokens_in_content=self.special_tokens_in_content,
        )

    @property
    def limits(self) -> RequestLimits:
        """Return the limits of one request."""
        return RequestLimits(
            max_body_bytes=self.max_body_bytes,
            max_open_body_bytes=self.max_open_body_bytes,
            max_prompts=self.max_prompts,
            max_samples=self.max_samples,
            send_timeout_s=self.send_timeout,
            stream_ping_s=self.stream_ping,
            strict_max_tokens=self.strict_max_tokens,
            ignores_unknown_fields=self.unknown_fields == "ignore",
        )


class OriginType(click.ParamType[str]):
    """A flag with the origin of pages: scheme, host and port, as browsers write it in `Origin`."""

    name = "origin"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the origin in lower case; `*` and `null` as they are. Fails for a URL with more than an origin."""
        text = str(value).lower()
        if text not in ("*", "null") and not _ORIGIN.fullmatch(text):
            self.fail(f"{value!r} is no origin, must be as https://chat.example or http://localhost:3000", param, ctx)
        return text


def _limit(flag: str, default: int, text: str) -> Flag:
    return option(flag, type=click.IntRange(min=1), default=default, metavar="NUMBER", help=text)


OWN_FLAGS: list[Flag] = [
    cachemgr_option(),
    *HOST_FLAGS,
    option(
        "--served-model-name",
        multiple=True,
        metavar="NAME",
        show_default="as the worker names its model",
        help="The model's name in requests and answers. May be given several times: answers have the first one.",
    ),
    option(
        "--model",
        metavar="NAME",
        show_default="the only one",
        help="The model, as its workers name it, if several are served.",
    ),
    option("--pool", default="", metavar="NAME", show_default="all pools of the model", help="Serve only this pool."),
    option("--tokenizer", metavar="PATH_OR_HUB_ID", help="The tokenizer. Default: the worker's."),
    option(
        "--chat-template",
        type=FILE,
        metavar="FILE",
        help="A Jinja template of chats, in place of the model's own.",
    ),
    option(
        "--tool-parser",
        type=click.Choice(list(TOOL_FORMATS)),
        show_default="as the chat template writes calls",
        help="Format in which the model writes calls of tools.",
    ),
    option(
        "--reasoning-parser",
        type=click.Choice([*REASONING_FORMATS, NO_REASONING]),
        show_default="as the chat template has it",
        help=f"Format in which the model writes reasoning; {NO_REASONING}: it is part of the content.",
    ),
    option(
        "--special-tokens-in-content/--no-special-tokens-in-content",
        default=False,
        help="Whether a special token's text within a chat's messages and tools is that token, or ordinary text.",
    ),
    option(
        "--api-key",
        multiple=True,
        metavar="KEY",
        help="A key that callers must send: Authorization: Bearer KEY. May be given several times. All callers are one "
        "tenant. Better in the environment: other users of the machine can read a command line.",
    ),
    option(
        "--api-keys",
        type=FILE,
        metavar="FILE",
        help="The callers, a line each: NAME ROLES SHA256, as `quire token` writes it. NAME is the tenant; the "
        "gateway needs the role gateway at cachemgr then. Without keys every client that reaches the gateway may call.",
    ),
    option(
        "--tenant-limits",
        type=FILE,
        metavar="FILE",
        help="Requests, tokens a minute, priority and weight by tenant, in TOML: docs/how-to/routing.md.",
    ),
    option(
        "--allow-anonymous",
        is_flag=True,
        help="Serve addresses that are not loopback without API keys, although others can reach them.",
    ),
    option(
        "--allowed-origins",
        type=OriginType(),
        multiple=True,
        metavar="ORIGIN",
        help="Site with pages that may call from a browser, as https://chat.example; * for all. May be given several "
        "times.",
    ),
    option(
        "--allowed-hosts",
        multiple=True,
        metavar="NAME",
        help="Name by which callers reach the gateway, without a port, as behind a proxy; * for any. May be given "
        "several times. On loopback addresses without keys others than loopback's and --listen's are refused.",
    ),
    option(
        "--grpc-listen",
        type=LISTEN_ADDRESS,
        multiple=True,
        metavar="ADDRESS",
        help="Address of quire.engine.v1.EngineService over gRPC: host:port or unix:/path. May be given several "
        "times. Off if not given.",
    ),
    option(
        "--shepherd",
        type=LISTEN_ADDRESS,
        metavar="ADDRESS",
        help="Address of --pool as a worker of Shepherd Model Gateway, over gRPC: host:port. Needs the extra "
        "quire-kv[shepherd]: docs/how-to/shepherd.md.",
    ),
    _limit("--max-body-bytes", _DEFAULTS.max_body_bytes, "Most bytes of a request's body."),
    _limit(
        "--max-open-body-bytes",
        _DEFAULTS.max_open_body_bytes,
        "Most bytes of all bodies of one caller that are being read, or have no answer yet.",
    ),
    _limit("--max-prompts", _DEFAULTS.max_prompts, "Most prompts of a request."),
    _limit("--max-samples", _DEFAULTS.max_samples, "Most prompts of a request times n."),
    option(
        "--send-timeout",
        type=click.FloatRange(min=0.1),
        default=_DEFAULTS.send_timeout_s,
        metavar="SECONDS",
        help="Disconnect a caller that has read nothing of its stream for this time.",
    ),
    option(
        "--responses-kept-s",
        type=click.FloatRange(min=0, max=30 * 86_400),
        default=3_600.0,
        metavar="SECONDS",
        help="Keep an answer of /v1/responses for this time, for its caller to fetch or continue. 0 keeps none.",
    ),
    _limit(
        "--responses-kept-bytes",
        64 * 2**20,
        "Most bytes of the answers of one tenant that are kept, their inputs included; the oldest are dropped first.",
    ),
    option(
        "--stream-ping",
        type=click.FloatRange(min=0.1),
        default=_DEFAULTS.stream_ping_s,
        metavar="SECONDS",
        help="Send a comment on a stream that has been silent for this time, so that proxies do not cut it.",
    ),
    option(
        "--strict-max-tokens",
        is_flag=True,
        help="Refuse max_tokens beyond the room that the prompt leaves. By default it is a ceiling, as at OpenAI.",
    ),
    option(
        "--unknown-fields",
        type=click.Choice(["refuse", "ignore"]),
        default="refuse",
        help="Fields of a body that no endpoint has: a 400, or a header of the answer with their names.",
    ),
    _limit("--max-waiting-requests", 4096, "Prompts that may wait for their first token; one more is answered 429."),
    _limit("--max-waiting-tokens", 4_000_000, "Likewise, tokens of the prompts that wait."),
    _limit(
        "--max-unread-tokens",
        16_384,
        "Generated tokens of a prompt that its caller may leave unread; with more of them the request fails.",
    ),
    SPECULATIVE_FLAG,
    option(
        "--lease-ttl",
        type=click.FloatRange(MIN_TTL_S, MAX_TTL_S),
        default=DEFAULT_TTL_S,
        metavar="SECONDS",
        help="Time to live of leases: the blocks of a killed gateway are free after it.",
    ),
]
