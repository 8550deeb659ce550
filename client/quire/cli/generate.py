"""`quire generate`: one prompt, its samples as they come."""

import contextlib
import json
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from quire.cli.outages import outages_shown
from quire.cli.render import counted, printable, text_tail
from quire.cli.signals import run_until_signal
from quire.cli.snapshot import (
    REACH_TIMEOUT_S,
    UnreachableError,
    cause_of,
    check_pool,
    check_reachable,
    is_silent,
)
from quire.client.channel import ONCE
from quire.client.credentials import NO_CREDENTIALS, Credentials
from quire.client.engine.adapters import named_adapter
from quire.client.engine.caching import CacheParams
from quire.client.engine.config import EngineConfig
from quire.client.engine.engine import Engine
from quire.client.engine.outputs import Chunk, Completion, Sample, complete
from quire.client.engine.prompt_logprobs import TokenLogprobs
from quire.client.engine.sampling import SamplingParams
from quire.client.engine.speculative import SpeculativeConfig
from quire.client.engine.tokenizer import Tokenizer
from quire.client.engine.tracing import Tracing, otlp_tracing
from quire.client.errors import InvalidRequest, QuireError
from quire.client.worker_client import WorkerClient

_MAX_LIVE_LINES = 8
_LAST_SPANS_S = 2.0
UNFINISHED = "not finished"
"""Instead of a finish reason, where something ended the generation."""


@dataclass(frozen=True, slots=True)
class Target:
    """The services for a request, and how its engine uses them.

    worker       address of the worker; None: from cachemgr
    pool         "": the only pool
    tokenizer    path or hub id; None: the worker's
    credentials  for both services
    speculative  how the engine drafts; None: no drafts
    adapter      the name of one of the worker's; "": none
    """

    cachemgr: str
    worker: str | None = None
    pool: str = ""
    tokenizer: str | None = None
    credentials: Credentials = NO_CREDENTIALS
    speculative: SpeculativeConfig | None = None
    adapter: str = ""


def run_generate(
    prompt: str,
    params: SamplingParams,
    cache: CacheParams,
    target: Target,
    *,
    as_json: bool,
    otlp_endpoint: str | None = None,
) -> None:
    """Prints the samples; sends traces to a collector if there is one, for 2 s after the end at most.

    At Ctrl-C, SIGTERM and SIGHUP it prints what there is of the samples.

    Raises QuireError, UnreachableError if a service is unavailable, InvalidRequest for the prompt; ImportError for
    traces without the extra `otel`.
    """
    if otlp_endpoint is None:
        run_until_signal(_generate(prompt, params, cache, target, None, as_json=as_json))
        return
    tracing, provider = otlp_tracing(otlp_endpoint)
    try:
        run_until_signal(_generate(prompt, params, cache, target, tracing, as_json=as_json))
    finally:
        # It has no timeout of its own: without a collector it would try for 10 s.
        sending = threading.Thread(target=provider.shutdown, daemon=True)
        sending.start()
        sending.join(_LAST_SPANS_S)


async def _generate(
    prompt: str,
    params: SamplingParams,
    cache: CacheParams,
    target: Target,
    tracing: Tracing | None,
    *,
    as_json: bool,
) -> None:
    await _check_services(target)
    # A live display of several samples prints lines above itself.
    in_place = sys.stderr.isatty() and params.n == 1
    names_tenant = bool(params.tenant)
    async with _engine(target, tracing, tenants=names_tenant) as engine, outages_shown(engine, in_place=in_place):
        tokenizer = engine.tokenizer
        if tokenizer is None:
            raise UnreachableError(
                f"the tokenizer at {engine.model.tokenizer} can't be read here: give its path with --tokenizer."
            )
        if target.adapter:
            cache = replace(cache, adapter=named_adapter(engine.adapters, target.adapter))
        async with contextlib.aclosing(engine.generate(prompt, params, cache=cache)) as chunks:
            if as_json:
                completion = complete(tokenizer.encode(prompt), [chunk async for chunk in chunks])
                print(json.dumps(_as_json(completion, engine.model.model, tokenizer), ensure_ascii=False))
                return
            shown = await _show(chunks, params)
    _print_logprobs(complete((), shown), tokenizer)


async def _check_services(target: Target) -> None:
    pools = await check_reachable(target.cachemgr, target.credentials)
    pool = check_pool(pools, target.pool, cachemgr=target.cachemgr)
    address = target.worker or pool.worker_address
    worker = WorkerClient(address, credentials=target.credentials, timeout_s=REACH_TIMEOUT_S, retry=ONCE)
    try:
        await worker.get_model()
    except QuireError as error:
        if not is_silent(error):
            raise
        raise UnreachableError(
            f"no worker answers at {address}, where that of pool {pool.name!r} should be ({cause_of(error)}).\n"
            "If it is reached by another address from here, give it with --worker."
        ) from error
    finally:
        await worker.close()


@contextlib.asynccontextmanager
async def _engine(target: Target, tracing: Tracing | None, *, tenants: bool) -> AsyncIterator[Engine]:
    config = EngineConfig(pool=target.pool, tenants=tenants, speculative=target.speculative)
    engine = Engine.connect(
        target.cachemgr,
        worker=target.worker,
        config=config,
        tokenizer=target.tokenizer,
        credentials=target.credentials,
        tracing=tracing,
    )
    try:
        await engine.__aenter__()
    except (OSError, ValueError) as error:
        value = target.tokenizer or ""
        raise InvalidRequest.of_field("tokenizer", value, f"a tokenizer ({error})") from error
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_exit(engine)
        yield engine


async def _show(chunks: AsyncIterator[Chunk], params: SamplingParams) -> list[Chunk]:
    """Prints the samples as they come; returns the chunks."""
    if params.n == 1:
        return await _stream_one(chunks)
    if sys.stdout.isatty():
        return await _stream_live(chunks, params.n)
    return await _stream_whole(chunks, params.n)


async def _stream_one(chunks: AsyncIterator[Chunk]) -> list[Chunk]:
    seen = []
    is_terminal = sys.stdout.isatty()
    try:
        async for chunk in chunks:
            seen.append(chunk)
            _write(printable(chunk.text) if is_terminal else chunk.text)
    finally:
        if seen:
            _write("\n")
    return seen


class SampleTexts:
    """Samples of one prompt while they grow; draws the end of each."""

    def __init__(self, count: int) -> None:
        self._texts = [""] * count
        self._reasons: list[str] = [""] * count

    def add(self, chunk: Chunk) -> None:
        """Add the new content of a sample."""
        self._texts[chunk.index] += chunk.text
        if chunk.finish_reason is not None:
            self._reasons[chunk.index] = chunk.finish_reason.value

    def whole(self) -> Iterator[Panel]:
        """Every sample that has text or has ended, to its last word; says of the others that they have not ended."""
        for index, (text, reason) in enumerate(zip(self._texts, self._reasons, strict=True)):
            if text or reason:
                yield sample_panel(index, len(self._texts), printable(text), reason or UNFINISHED)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        # A line stays free for what Live writes at its end, and the last one is empty: the terminal writes ^C there.
        # Otherwise the first lines would scroll out of reach, and would not be erased.
        room = console.size.height - 2
        num_shown = max(1, min(len(self._texts), room // 3))
        num_lines = max(1, min(_MAX_LIVE_LINES, room // num_shown - 2))
        for index, text in enumerate(self._texts[:num_shown]):
            tail = text_tail(text, width=options.max_width - 4, num_lines=num_lines)
            yield sample_panel(index, len(self._texts), tail, self._reasons[index])
        num_hidden = len(self._texts) - num_shown
        yield Text(f"{counted(num_hidden, 'sample')} more, shown at the end" if num_hidden else "", style="dim")


def sample_panel(index: int, count: int, text: str, reason: str) -> Panel:
    """A sample in a box that says which it is and why it ended, if it has."""
    title = f"{index + 1} of {count}" + (f" · {reason}" if reason else "")
    style = "dim" if reason else "cyan"
    return Panel(Text(text), title=title, title_align="left", border_style=style, box=box.ROUNDED)


async def _stream_live(chunks: AsyncIterator[Chunk], count: int) -> list[Chunk]:
    seen = []
    console = Console(highlight=False)
    texts = SampleTexts(count)
    try:
        with Live(texts, console=console, refresh_per_second=10, transient=True, vertical_overflow="crop"):
            async for chunk in chunks:
                seen.append(chunk)
                texts.add(chunk)
    finally:  # also after a signal or an error: the live display is removed by then
        console.print(*texts.whole(), sep="")
    return seen


async def _stream_whole(chunks: AsyncIterator[Chunk], count: int) -> list[Chunk]:
    """Each sample as soon as it and all before it have ended; at the end the unfinished ones."""
    seen: list[Chunk] = []
    texts, reasons = [""] * count, [""] * count
    num_printed = 0

    def print_next() -> None:
        nonlocal num_printed
        text, reason = texts[num_printed], reasons[num_printed] or UNFINISHED
        num_printed += 1
        _write(f"--- {num_printed} of {count} ({reason}) ---\n{text}\n")

    try:
        async for chunk in chunks:
            seen.append(chunk)
            texts[chunk.index] += chunk.text
            reasons[chunk.index] = chunk.finish_reason.value if chunk.finish_reason else ""
            while num_printed < count and reasons[num_printed]:
                print_next()
    finally:  # also if a signal or an error ends it
        while num_printed < count and any(texts):
            print_next()
    return seen


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _as_json(completion: Completion, model: str, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "model": model,
        "prompt_token_ids": list(completion.prompt_token_ids),
        **_logprobs_as_json("prompt_logprobs", completion.prompt_logprobs, tokenizer),
        "samples": [_sample_as_json(sample, tokenizer) for sample in completion.samples],
    }


def _sample_as_json(sample: Sample, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "index": sample.index,
        "text": sample.text,
        "token_ids": list(sample.token_ids),
        "finish_reason": sample.finish_reason.value,
        **_logprobs_as_json("logprobs", sample.logprobs, tokenizer),
    }


def _logprobs_as_json(
    field: str, entries: Sequence[TokenLogprobs | None] | None, tokenizer: Tokenizer
) -> dict[str, Any]:
    """Return the field, if there are log-probabilities; null for the first token of a prompt."""

    def as_json(token_id: int, logprob: float) -> dict[str, Any]:
        return {"token_id": token_id, "token": tokenizer.token_text(token_id), "logprob": logprob}

    if entries is None:
        return {}
    each = (
        entry and as_json(entry.token_id, entry.logprob) | {"top": [as_json(*other) for other in entry.top]}
        for entry in entries
    )
    return {field: list(each)}


def _print_logprobs(completion: Completion, tokenizer: Tokenizer) -> None:
    console, count = Console(highlight=False), len(completion.samples)
    if completion.prompt_logprobs is not None:
        console.print(_logprob_table("log-probabilities of the prompt", completion.prompt_logprobs, tokenizer))
    for sample in completion.samples:
        if sample.logprobs is not None:
            title = "log-probabilities" + (f", {sample.index + 1} of {count}" if count > 1 else "")
            console.print(_logprob_table(title, sample.logprobs, tokenizer))


def _logprob_table(title: str, entries: Sequence[TokenLogprobs | None], tokenizer: Tokenizer) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("token")
    table.add_column("log p", justify="right")
    table.add_column("most probable")
    for entry in filter(None, entries):
        others = Text("  ".join(f"{_quote(tokenizer, token_id)} {value:.2f}" for token_id, value in entry.top))
        table.add_row(Text(_quote(tokenizer, entry.token_id)), f"{entry.logprob:.3f}", others)
    return table


def _quote(tokenizer: Tokenizer, token_id: int) -> str:
    return json.dumps(tokenizer.token_text(token_id), ensure_ascii=False)
