"""The commands of `quire`: flags and help. Each command's code is in the module that it imports when it runs.

Nothing else is imported up here: `quire --help` answers at once. Exit statuses: 0; 1 for an error; 2 for a wrong
command line or value; 130 for Ctrl-C.
"""

import functools
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

import click

from quire.cli.command_line import CommandLine, explain
from quire.cli.request_flags import REQUEST_FLAGS, RequestCommand, flag_names, request_of
from quire.cli.up_flags import ServiceFlags, UpCommand, service_options
from quire.client.engine.flags import SPECULATIVE_FLAG
from quire.client.engine.speculative import SpeculativeConfig
from quire.client.errors import InvalidRequest
from quire.serving.addresses import DEFAULT_HTTP_LISTEN, Address
from quire.serving.flags import (
    DIAL_FLAGS,
    HOST_FLAGS,
    LISTEN_ADDRESS,
    add_flags,
    cachemgr_option,
    command_settings,
    dial_flags,
    http_addresses,
    option,
)
from quire.serving.runtime_folder import serving_folder

# For each extra, a package that shows if it is installed.
_MARKS = {
    "client": "rich",
    "cachemgr": "grpc_reflection",
    "worker": "torch",
    "gateway": "starlette",
    "events": "zmq",
    "dynamo": "dynamo.common.backend",
    "lab": "matplotlib",
    "otel": "opentelemetry.exporter.otlp.proto.grpc",
}
# Everything a service's own parser should see, help included.
_PASSED_ON: dict[str, Any] = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


def _require(*extras: str) -> None:
    """Raises click.ClickException if the extras' packages are not installed."""
    lacking = sorted(extra for extra in extras if not _is_installed(_MARKS[extra]))
    if lacking:
        raise click.ClickException(
            f"this needs more than is installed here: pip install 'quire-kv[{','.join(lacking)}]'"
        )


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # its parent package is not installed
        return False


_cachemgr_option = cachemgr_option(envvar="QUIRE_CACHEMGR")


def _credentials_options(command: Any) -> Any:
    """Adds the flags of client.Credentials; the command receives them as one argument `credentials`."""

    @functools.wraps(command)
    def with_credentials(*args: Any, **values: Any) -> Any:
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # a failed handshake is reported below
        from quire.client.credentials import Credentials

        credentials = Credentials(**{name: values.pop(name) for name in DIAL_FLAGS})
        return command(*args, credentials=credentials, **values)

    return add_flags(dial_flags("both services", envvar_prefix="QUIRE"))(with_credentials)


@click.group(
    cls=CommandLine,
    context_settings=command_settings("QUIRE"),
)
@click.version_option(package_name="quire-kv", prog_name="quire")
def quire() -> None:
    """Quire: a paged KV cache as a service.

    Two processes: cachemgr assigns KV blocks to sequences, a worker holds the blocks and the model. Clients use gRPC
    with both, or HTTP with a gateway, which is such a client.

    \b
    See it work, in a checkout:
      quire demo
    Serve a model, and use it from another terminal:
      quire up PATH_OR_HUB_ID
      curl http://127.0.0.1:8000/v1/completions -d '{"prompt": "Once upon a time"}'
      quire generate "Once upon a time"
      quire stats --watch

    Every flag is an environment variable, too; each command's --help names it.
    """


@quire.command(cls=UpCommand)
@click.argument("path", required=False, metavar="[PATH_OR_HUB_ID]")
@option("--model", metavar="PATH_OR_HUB_ID", help="The model, if it is not the argument: a folder, or a hub id.")
@option(
    "--runtime-dir",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    show_default=str(serving_folder()),
    help="Folder of the sockets and logs; logs are kept. Default: that of `quire generate`, `stats`, `top`.",
)
@option(
    "--http-listen",
    type=LISTEN_ADDRESS,
    multiple=True,
    default=(DEFAULT_HTTP_LISTEN,),
    metavar="ADDRESS",
    help="Address at which the gateway serves HTTP: host:port or unix:/path. May be given several times.",
)
@add_flags(HOST_FLAGS)
@option("--no-http", is_flag=True, help="Start no gateway.")
@option(
    "--keep-cache",
    is_flag=True,
    help="Keep cached prefixes over restarts of the worker, by a `quire holder`. Linux; a GPU needs `--num-blocks`.",
)
@option(
    "--logs",
    type=click.Choice(("files", "terminal")),
    default="files",
    help="Write the logs of the services to files in the runtime folder, or here.",
)
@service_options
def up(
    path: str | None,
    model: str | None,
    runtime_dir: Path | None,
    http_listen: tuple[Address, ...],
    host: str | None,
    port: int | None,
    no_http: bool,
    keep_cache: bool,
    logs: str,
    flags: ServiceFlags,
) -> None:
    """Serve a model on this machine: cachemgr, a worker and an HTTP gateway, until Ctrl-C.

    They serve on unix sockets in a runtime folder, and also on --cachemgr-listen, --worker-listen and --http-listen.
    Prints the addresses once all are ready, and commands to try. Takes every flag of the three processes; a flag that
    several of them have goes to each. All check their flags before anything serves. A process that ends by itself is
    started again. At the end open requests may finish for --drain-timeout; a second Ctrl-C ends at once.

    With --token-file, callers of the gateway need a token of the file, too, as their API key. The worker and the
    gateway show cachemgr the token of --cachemgr-token-file: it needs the roles worker, client and gateway.

    \b
    Examples:
      quire up deploy/demo/model
      quire up Qwen/Qwen3-0.6B --kv-cache-memory 4G --dtype bfloat16 --served-model-name qwen
      quire up ./my-model --host 0.0.0.0 --api-keys keys --tls-cert server.pem --tls-key server.key
    """
    if path is not None and model is not None:
        raise click.UsageError("The model is given twice: as the argument, and as --model.")
    found = model if path is None else path
    if found is None:
        raise click.UsageError("Missing the model: quire up PATH_OR_HUB_ID (or '--model').")
    if no_http and (host is not None or port is not None):
        raise click.UsageError("--host and --port are the gateway's, and --no-http starts none.")
    if keep_cache and "--holder" in flags.arguments["worker"]:
        raise click.UsageError("--keep-cache starts a holder, and --holder names another one.")
    addresses = http_addresses("--http-listen", http_listen, host=host, port=port)
    _require("client", "cachemgr", "worker", *(() if no_http else ("gateway",)))
    from quire.cli.up import run_up

    run_up(
        model=found,
        runtime_dir=runtime_dir,
        flags=flags,
        http_listen=None if no_http else tuple(map(str, addresses)),
        keeps_memory=keep_cache,
        logs_here=logs == "terminal",
    )


def _become(module: str, arguments: list[str]) -> NoReturn:
    """This process becomes the service, so signals and exit status are the service's own."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-P", "-m", module, *arguments])


_PROGRAMS = (
    ("cachemgr", "cachemgr", "quire.cachemgr", "Run cachemgr alone."),
    ("worker", "worker", "quire.worker", "Run a worker alone."),
    ("holder", "worker", "quire.worker.holder", "Keep a worker's memory beyond its death."),
    ("serve", "gateway", "quire.gateway", "Run an HTTP gateway."),
    ("events", "events", "quire.integrations.kv_events", "Publish KV events for routers."),
    ("dynamo", "dynamo", "quire.integrations.dynamo", "Run a backend of NVIDIA Dynamo."),
    ("lab", "lab", "quire.lab", "Try policies in virtual time."),
)
"""Commands that are programs of their own, which read all flags themselves: name, extra, module, help."""


def _add_program(name: str, extra: str, module: str, text: str) -> None:
    @quire.command(name, context_settings=_PASSED_ON, add_help_option=False, help=text)
    @click.pass_context
    def run(ctx: click.Context) -> None:
        _require(extra)
        _become(module, ctx.args)


for _program in _PROGRAMS:
    _add_program(*_program)


@quire.command()
@option(
    "--url",
    envvar="QUIRE_URL",
    default="http://127.0.0.1:8000",
    metavar="URL",
    help="URL of the gateway of `quire up` or `quire serve`.",
)
@option("--api-key", envvar="QUIRE_API_KEY", metavar="KEY", help="The key to send, if the gateway requires one.")
@option("--model", metavar="NAME", show_default="the first one", help="Name of the model.")
@option("--system", metavar="TEXT", help="A system message to begin with.")
@option("--max-tokens", type=click.IntRange(min=1), metavar="COUNT", help="Most tokens of an answer.")
@option("--temperature", type=float, metavar="NUMBER", help="0: always the most probable token.")
@option(
    "--seed",
    type=int,
    metavar="NUMBER",
    help="Fixes the random numbers. Default: others each time. The same text for sure only with `quire worker "
    "--deterministic`.",
)
def chat(
    url: str,
    api_key: str | None,
    model: str | None,
    system: str | None,
    **options: Any,
) -> None:
    """Talk to a model that a gateway serves.

    Reads a line, prints the answer as it is generated, and continues with the whole conversation; its beginning is
    cached. Reads questions from a pipe, too, one a line.

    \b
    Examples:
      quire chat
      quire chat --url https://models.example.org --api-key "$KEY" --system "Answer in one sentence."
    """
    _require("client")
    from quire.cli.chat import Conversation, run_chat

    given = {name: value for name, value in options.items() if value is not None}
    run_chat(Conversation(url, key=api_key, model=model, system=system, options=given))


@quire.command(cls=RequestCommand)
@click.argument("prompt")
@add_flags(REQUEST_FLAGS)
@option("--json", "as_json", envvar="QUIRE_GENERATE_JSON", is_flag=True, help="Write one JSON object instead of text.")
@_cachemgr_option
@_credentials_options
@option("--worker", envvar="QUIRE_WORKER", metavar="ADDRESS", help="The worker's address. Default: from cachemgr.")
@option("--pool", default="", metavar="NAME", show_default="the only one", help="The pool, if there are several.")
@option("--tokenizer", metavar="PATH_OR_HUB_ID", help="The tokenizer. Default: the worker's.")
@SPECULATIVE_FLAG
@option(
    "--otlp-endpoint",
    metavar="URL",
    help="Address for an OpenTelemetry trace of it, OTLP over gRPC: http://host:port. Needs the extra otel.",
)
def generate(
    prompt: str,
    as_json: bool,
    cachemgr: str,
    credentials: Any,
    worker: str | None,
    pool: str,
    tokenizer: str | None,
    speculative_config: SpeculativeConfig | None,
    otlp_endpoint: str | None,
    **request: Any,
) -> None:
    """Generate text after PROMPT, as it comes. A PROMPT of - is read from standard input.

    \b
    Examples:
      quire generate "The default value is"
      quire generate "Once upon a time" --n 3 --temperature 0.8 --top-k 40 --seed 7
      cat question.txt | quire generate - --temperature 0 --max-tokens 200
      quire generate "2 + 2 =" --json --logprobs 3 | jq .samples[0]
      quire generate "Is 7 prime?" --choice yes --choice no
      quire generate "A person:" --json-schema person.json --timeout 10
      quire generate - --speculative-config '{"method": "ngram"}' < edit.txt
    """
    _require("client", *(() if otlp_endpoint is None else ("otel",)))
    from quire.cli.generate import Target, run_generate

    target = Target(cachemgr, worker, pool, tokenizer, credentials, speculative_config, request["adapter"])
    try:
        params, cache = request_of(request)
        run_generate(_read_prompt(prompt), params, cache, target, as_json=as_json, otlp_endpoint=otlp_endpoint)
    except InvalidRequest as error:
        flags = {"speculative_config.num_speculative_tokens": "--speculative-config", **flag_names(request)}
        raise explain(error, flags=flags) from error


def _read_prompt(argument: str) -> str:
    given = sys.stdin.buffer.read() if argument == "-" else os.fsencode(argument)
    try:
        return given.decode()
    except UnicodeDecodeError as error:
        raise click.BadParameter(f"it is no UTF-8 text: {error}", param_hint="'PROMPT'") from error


@quire.command()
@option("--pool", default="", metavar="NAME", show_default="all", help="Only this pool.")
@option(
    "--json",
    "as_json",
    envvar="QUIRE_STATS_JSON",
    is_flag=True,
    help="Write JSON instead of tables; with --watch, one object per line.",
)
@option("--watch", is_flag=True, help="Again and again, until Ctrl-C.")
@option("--interval", type=click.FloatRange(min=0.05), default=1.0, metavar="SECONDS", help="Pause between two looks.")
@_cachemgr_option
@_credentials_options
def stats(pool: str, as_json: bool, watch: bool, interval: float, cachemgr: str, credentials: Any) -> None:
    """Show the pools' content: blocks by state, sequences, prefix cache hits, copies.

    \b
    Examples:
      quire stats
      quire stats --watch --interval 0.2
      quire stats --json | jq '.pools[].statistics.block_counts'
    """
    _require("client")
    from quire.cli.stats import run_stats

    run_stats(cachemgr, pool, as_json=as_json, interval_s=interval if watch else None, credentials=credentials)


@quire.command()
@option("--pool", default="", metavar="NAME", show_default="the first", help="The pool to begin with.")
@option("--once", is_flag=True, help="Print one frame and end; so it is too where the output is no terminal.")
@option("--interval", type=click.FloatRange(min=0.1), default=0.5, metavar="SECONDS", help="Pause between two looks.")
@_cachemgr_option
@_credentials_options
def top(pool: str, once: bool, interval: float, cachemgr: str, credentials: Any) -> None:
    """Watch the pools live: blocks, leases, sequences, tenants, prefix cache hits, steps per second.

    \b
    Keys: q quit      p next pool     tab sequences, leases, tenants     / filter by tenant or lease
          ? help      b block map     j k arrows select                  enter open, esc back

    If the servers authenticate callers it needs an operator's token.

    \b
    Examples:
      quire top
      quire top --once | less
      quire top --cachemgr cachemgr.internal:7070 --tls-ca ca.pem --token-file operator.token
    """
    _require("client")
    from quire.cli.top import run_top

    run_top(cachemgr, pool, once=once, interval_s=interval, credentials=credentials)


def _place_options(command: Any) -> Any:
    """Adds where the pool is; the command receives it as one argument `place`."""

    @functools.wraps(command)
    def with_place(*args: Any, cachemgr: str, pool: str, credentials: Any, **values: Any) -> Any:
        _require("client")
        from quire.cli.administer import Place

        return command(*args, place=Place(cachemgr, pool, credentials), **values)

    pool = option("--pool", default="", metavar="NAME", show_default="the only one, or all", help="The pool.")
    return pool(_cachemgr_option(_credentials_options(with_place)))


def _prefix_options(command: Any) -> Any:
    """Adds a prompt; the command receives it as one argument `prefix`, None if there is none."""

    @functools.wraps(command)
    def with_prefix(*args: Any, prompt: str | None, **values: Any) -> Any:
        _require("client")
        from quire.cli.administer import Prefix

        given = {name: values.pop(name) for name in ("are_token_ids", "salt", "adapter", "tokenizer")}
        return command(*args, prefix=None if prompt is None else Prefix(_read_prompt(prompt), **given), **values)

    return _prompt_options(with_prefix)


def _prompt_options(command: Any) -> Any:
    """Adds how a prompt is to be read, its salt and its adapter."""
    decorated = command
    text = "The adapter of the admissions that it is about: its name, or its identity in hex."
    decorated = option("--adapter", metavar="NAME", default="", show_default="none", help=text)(decorated)
    text = "The tokenizer. Default: the worker's."
    decorated = option("--tokenizer", metavar="PATH_OR_HUB_ID", help=text)(decorated)
    text = "The salt of the admissions that it is about."
    decorated = option("--salt", metavar="TEXT", default="", show_default="none", help=text)(decorated)
    text = "PROMPT is token ids, separated by commas."
    return option("--token-ids", "are_token_ids", is_flag=True, help=text)(decorated)


def _tenant_option(command: Any) -> Any:
    text = "Of this tenant; another's for gateways and operators."
    return option("--tenant", metavar="NAME", show_default="the caller's", help=text)(command)


def _json_option(command: Any) -> Any:
    text = "Write JSON instead of text."
    return click.option("--json", "as_json", allow_from_autoenv=False, is_flag=True, help=text)(command)


@quire.command()
@_json_option
@_place_options
def leases(place: Any, as_json: bool) -> None:
    """List the leases: their holders' tenant, when they expire, their sequences.

    \b
    Examples:
      quire leases
      quire leases --json
    """
    from quire.cli.administer import run_leases

    run_leases(place, as_json=as_json)


@quire.command()
@click.argument("prompt")
@_prefix_options
@_tenant_option
@_json_option
@_place_options
def lookup(place: Any, prefix: Any, tenant: str | None, as_json: bool) -> None:
    """Show how many tokens of PROMPT each pool holds in its prefix cache. PROMPT - is standard input.

    \b
    Examples:
      quire lookup "Once upon a time"
      quire lookup --token-ids 1,2,3
      quire lookup "Once upon a time" --tenant alice
    """
    from quire.cli.administer import run_lookup

    run_lookup(place, prefix, tenant=tenant, as_json=as_json)


@quire.command(name="explain")
@click.argument("prompt")
@_prefix_options
@_tenant_option
@_json_option
@_place_options
def explain_prefix(place: Any, prefix: Any, tenant: str | None, as_json: bool) -> None:
    """Show why no more of PROMPT is found in the prefix cache: never computed, evicted, another salt ...

    \b
    Examples:
      quire explain "Once upon a time"
      quire explain --salt s1 "Once upon a time"
      quire explain "Once upon a time" --tenant alice
    """
    from quire.cli.administer import run_explain

    run_explain(place, prefix, tenant=tenant, as_json=as_json)


@quire.command()
@click.argument("prompt", required=False)
@_prefix_options
@option(
    "--ttl", type=click.FloatRange(1, 86400), metavar="SECONDS", show_default="3600", help="The pin ends after this."
)
@option("--remove", metavar="PIN", help="Take this pin back, instead of pinning.")
@_tenant_option
@_json_option
@_place_options
def pin(place: Any, prefix: Any, ttl: float | None, remove: str | None, tenant: str | None, as_json: bool) -> None:
    """Keep the cached blocks of PROMPT from being evicted. Without PROMPT, list the pins.

    \b
    Examples:
      quire pin "Once upon a time" --ttl 600
      quire pin "Once upon a time" --tenant alice
      quire pin
      quire pin --remove PIN
    """
    from quire.cli.administer import run_pin, run_pins, run_unpin

    if remove is not None and prefix is not None:
        raise click.UsageError("give PROMPT or --remove, not both")
    if remove is not None:
        run_unpin(place, remove, tenant=tenant)
    elif prefix is None:
        run_pins(place, tenant=tenant, as_json=as_json)
    else:
        run_pin(place, prefix, tenant=tenant, ttl_s=ttl, as_json=as_json)


@quire.command()
@click.argument("prompt", required=False)
@_prompt_options
@_tenant_option
@option("--all", "everything", is_flag=True, help="All of the pool, instead of a part; for operators only.")
@_json_option
@_place_options
def reset(
    place: Any,
    prompt: str | None,
    are_token_ids: bool,
    salt: str,
    adapter: str,
    tokenizer: str | None,
    tenant: str | None,
    everything: bool,
    as_json: bool,
) -> None:
    """Remove content from the prefix cache: content that begins with PROMPT, content under a salt or of an adapter, a
    tenant's, or all.

    Only the full blocks of PROMPT count. Running sequences keep their blocks.

    \b
    Examples:
      quire reset "Once upon a time"
      quire reset --salt s1
      quire reset --adapter sql
      quire reset --tenant team-a
      quire reset --all
    """
    from quire.cli.administer import Prefix, run_reset

    is_part = prompt is not None or bool(salt or adapter) or tenant is not None
    if is_part == everything:
        raise click.UsageError("give a scope to reset: PROMPT, --salt, --adapter or --tenant; or --all")
    prefix = None if prompt is None else Prefix(_read_prompt(prompt), are_token_ids, salt, tokenizer, adapter)
    run_reset(place, prefix, tenant=tenant, salt=salt or None, adapter=adapter, as_json=as_json)


@quire.command()
@_json_option
@_place_options
def audit(place: Any, as_json: bool) -> None:
    """Check a pool's books: that each block has the owners it should have. Exit status 1 if not.

    \b
    Examples:
      quire audit
      quire audit --json
    """
    from quire.cli.administer import run_audit

    if not run_audit(place, as_json=as_json):
        raise click.exceptions.Exit(1)


@quire.command()
@click.argument("name")
@option(
    "--role",
    "roles",
    type=click.Choice(("client", "worker", "operator", "content", "gateway")),
    multiple=True,
    required=True,
    help="A role of the token's owner. May be given several times.",
)
@option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    show_default="standard error",
    help="File for the token. Only you may read it.",
)
def token(name: str, roles: tuple[str, ...], out: Path | None) -> None:
    """Make a token for NAME, and print the line by which a server knows it.

    Append the line to the file that cachemgr and the worker were given as --token-file: it holds a hash, not the token.
    Clients take the token's own file, as their --token-file.

    \b
    Examples:
      quire token alice --role client --out alice.token >> tokens
      quire token worker-1 --role worker --out worker-1.token >> tokens
    """
    if any(c.isspace() or c == "#" for c in name) or not name:
        raise click.BadParameter("must be one word without #", param_hint="'NAME'")
    from quire.cli.token import run_token

    run_token(name, tuple(dict.fromkeys(roles)), out)


@quire.command()
@option("--model", metavar="PATH_OR_HUB_ID", show_default="deploy/demo/model of the checkout", help="The model.")
@option(
    "--prompts",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    show_default="deploy/demo/prompts.json of the checkout",
    help='JSON: {"system": text, "join": text, "prompts": [text, ...]}.',
)
@option("--samples", type=click.IntRange(1, 8), default=2, metavar="COUNT", help="Samples of each prompt.")
@option("--max-tokens", type=click.IntRange(min=1), default=48, metavar="COUNT", help="Most tokens per sample.")
@option(
    "--num-blocks",
    type=click.IntRange(min=2),
    default=129,
    metavar="COUNT",
    help="Blocks of the pool, the null block included.",
)
@option(
    "--seed",
    type=click.IntRange(min=0),
    default=20,
    metavar="NUMBER",
    help="Fixes the random numbers that choose the tokens. Rounding can still change a text, as in `quire generate`.",
)
def demo(model: str | None, prompts: Path | None, samples: int, max_tokens: int, num_blocks: int, seed: int) -> None:
    """Start both services, generate, and show the use of the cache.

    Sends prompts with a common system prompt, several samples each, all at once through two real processes. Then
    shows the pool's blocks by state, the cached, shared and copied blocks, and their memory. Ctrl-C at any time
    removes everything.

    \b
    Examples:
      quire demo
      quire demo --samples 4 --max-tokens 100
      quire demo --model Qwen/Qwen3-0.6B --num-blocks 513
    """
    _require("client", "cachemgr", "worker")
    from quire.cli.demo import DemoOptions, run_demo

    run_demo(DemoOptions(model, prompts, samples, max_tokens, num_blocks, seed))


@quire.command(context_settings={"ignore_unknown_options": True})
@click.argument("name", required=False)
@click.argument("flags", nargs=-1, type=click.UNPROCESSED, metavar="[PART] [FLAGS]...")
@option("--quick", is_flag=True, help="Tiny sizes, in seconds: a check that everything runs. Its figures mean nothing.")
@option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    show_default="build/bench of the checkout",
    help="Folder for the JSON and the plot.",
)
def bench(name: str | None, flags: tuple[str, ...], quick: bool, output: Path | None) -> None:
    """Run a benchmark of the checkout, or a part of it; without a NAME, list them.

    Prints a table, and writes JSON with the raw samples and a plot. Some have flags of their own: `quire bench NAME --
    --help` lists them. Recorded results are in docs/reference/benchmarks.md.

    \b
    Examples:
      quire bench
      quire bench utilization
      quire bench serving door
      quire bench control-plane --restarts 2 --output results
    """
    from quire.cli.bench import list_benches, run_bench

    if name is None:
        click.echo(list_benches())
    else:
        run_bench(name, flags, quick=quick, output=output)
