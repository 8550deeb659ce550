"""`quire leases`, `lookup`, `explain`, `pin`, `reset` and `audit`: commands for administrators of a pool."""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf.message import Message
from rich.console import Console
from rich.table import Table

from quire.cache.v1 import cache_service_pb2 as pb
from quire.cache.v1.attach_pb2 import PoolGeometry
from quire.cli.render import counted, layer_group_name
from quire.cli.snapshot import REACH_TIMEOUT_S, UnreachableError, answering, as_dict, check_pool, check_reachable
from quire.client.cache_client import CacheClient
from quire.client.channel import ONCE
from quire.client.credentials import NO_CREDENTIALS, Credentials
from quire.client.engine.adapters import adapters_of, named_adapter
from quire.client.engine.tokenizer import Tokenizer
from quire.client.errors import InvalidRequest
from quire.client.worker_client import WorkerClient

Answer = TypeVar("Answer")
_TOO_LONG = "SEQUENCE_TOO_LONG"
_UNLIMITED_WIDTH = 10_000
"""Columns of an output that is no terminal: nothing is cut off."""


@dataclass(frozen=True, slots=True)
class Place:
    """The cachemgr and the pool that a command is about; pool "" is the only one, or all."""

    cachemgr: str
    pool: str = ""
    credentials: Credentials = NO_CREDENTIALS


@dataclass(frozen=True, slots=True)
class Prefix:
    """A prompt, and the salt and the adapter that it is cached under.

    prompt      text; or token ids, if are_token_ids
    adapter     its name, or its identity in 64 hex digits; "": none
    tokenizer   where it is; None: as the worker says
    """

    prompt: str
    are_token_ids: bool = False
    salt: str = ""
    tokenizer: str | None = None
    adapter: str = ""


def run_leases(place: Place, *, as_json: bool) -> None:
    """Print the leases of a pool, or of all."""
    leases = _ask(place, lambda cache: cache.list_leases(place.pool))
    table = _table("lease", "pool", "tenant", "state", "expires", "step", "in flight", "sequences")
    for lease in leases:
        table.add_row(
            *(f"{lease.lease_id_prefix}…", lease.pool, lease.tenant, _name_of(pb.LeaseState.Name(lease.state))),
            _time_of(lease.expire_time.ToJsonString()).partition("T")[2],  # within an hour
            *(str(lease.last_step_number), str(lease.step_in_flight_count), str(lease.sequence_count)),
        )
    _print({"leases": leases}, table, as_json=as_json, if_empty="There are no leases.")


def run_lookup(place: Place, prefix: Prefix, *, tenant: str | None, as_json: bool) -> None:
    """Print how many tokens of a prompt each pool holds; tenant None is the caller's."""

    async def look(cache: CacheClient) -> tuple[pb.LookupPrefixResponse, list[str]]:
        token_ids = await _tokens_of(place, prefix)
        salt, adapter = prefix.salt.encode(), await _adapter_of(cache, place.pool, prefix.adapter)
        answer = await cache.lookup_prefix(token_ids, pool=place.pool, salt=salt, adapter=adapter, tenant=tenant)
        notes = await _never_admitted(cache, token_ids, pool=place.pool)
        if answer.matches and not any(match.cached_token_count for match in answer.matches):
            notes.append(await _why_nothing(cache, answer.matches[0].pool, len(token_ids)))
        return answer, notes

    answer, notes = _ask(place, look)
    table = _table("pool", "cached tokens", "worker")
    for match in answer.matches:
        in_host = num_in_host(match.tokens_by_medium)
        count = (
            f"{match.cached_token_count}, of these {in_host} in host memory" if in_host else match.cached_token_count
        )
        table.add_row(match.pool, str(count), match.worker_address)
    _print({"matches": answer.matches}, table, as_json=as_json, if_empty="There is no pool.", notes=notes)


def num_in_host(parts: Iterable[pb.MediumTokens]) -> int:
    """Return the tokens of a prefix that are in the pool's host tier."""
    return sum(part.token_count for part in parts if part.medium == pb.MEDIUM_HOST)


async def _why_nothing(cache: CacheClient, pool: str, num_tokens: int) -> str:
    """Return why nothing of a prompt is cached."""
    block_size = (await cache.get_pool(pool)).geometry.block_size_tokens
    if num_tokens < block_size:
        return f"Only full blocks of {block_size} tokens are cached, and the prompt has {counted(num_tokens, 'token')}."
    return "`quire explain` shows why nothing of it is cached."


async def _never_admitted(cache: CacheClient, token_ids: list[int], *, pool: str) -> list[str]:
    """Return which pools can never admit the prompt, and their limits."""
    checks = await cache.check_admission(pb.Admission(sequence_id=1, token_ids=token_ids), pool=pool)
    limits = [
        (check.pool, check.refusal.metadata.get("limit")) for check in checks if check.refusal.reason == _TOO_LONG
    ]
    return [
        f"{name}: the prompt has {len(token_ids)} tokens, and a sequence at most {limit}: it can never be admitted."
        for name, limit in limits
    ]


def run_explain(place: Place, prefix: Prefix, *, tenant: str | None, as_json: bool) -> None:
    """Print why no more of a prompt is found in a pool's prefix cache; tenant None is the caller's."""

    async def look(cache: CacheClient) -> tuple[pb.ExplainPrefixResponse, pb.Pool, list[str]]:
        token_ids = await _tokens_of(place, prefix)
        salt, adapter = prefix.salt.encode(), await _adapter_of(cache, place.pool, prefix.adapter)
        answer = await cache.explain_prefix(token_ids, pool=place.pool, salt=salt, adapter=adapter, tenant=tenant)
        return answer, await cache.get_pool(answer.pool), await _never_admitted(cache, token_ids, pool=answer.pool)

    answer, pool, notes = _ask(place, look)
    _print(answer, explanation(answer, pool.geometry), as_json=as_json, notes=notes)


def explanation(answer: pb.ExplainPrefixResponse, geometry: PoolGeometry) -> Table:
    """Return the answer as a table. In a pool with several layer groups it names the group of the missing block."""
    table = Table.grid("", "", padding=(0, 2))
    left_out = ("reason", "lost_time", "missing_layer_group", "epoch", "epoch_time", "tokens_by_medium")
    for name, value in _as_json(answer).items():
        if value != "" and name not in left_out:
            table.add_row(name.replace("_", " "), str(value))
    if in_host := num_in_host(answer.tokens_by_medium):
        table.add_row("of these in host memory", str(in_host))
    groups, missing = geometry.layer_groups, answer.missing_layer_group
    if answer.missing_prefix_hash and len(groups) > max(1, missing):
        table.add_row("missing in layer group", f"{missing} ({layer_group_name(groups[missing])})")
    is_unknown = answer.reason == pb.MISS_REASON_UNKNOWN
    reason = "unknown: evicted or never computed" if is_unknown else _name_of(pb.MissReason.Name(answer.reason))
    table.add_row("reason", reason if answer.block_count else f"{reason}: the prompt has no full block to look for")
    if answer.HasField("lost_time"):
        table.add_row("lost time", _time_of(answer.lost_time.ToJsonString()))
    return table


def run_pin(place: Place, prefix: Prefix, *, tenant: str | None, ttl_s: float | None, as_json: bool) -> None:
    """Keep the cached blocks of a prompt, and print the pin; tenant None is the caller's."""

    async def pin(cache: CacheClient) -> pb.PinPrefixResponse:
        token_ids = await _tokens_of(place, prefix)
        salt, adapter = prefix.salt.encode(), await _adapter_of(cache, place.pool, prefix.adapter)
        return await cache.pin_prefix(
            token_ids, pool=place.pool, salt=salt, adapter=adapter, ttl_s=ttl_s, tenant=tenant
        )

    answer = _ask(place, pin)
    table = Table.grid("", "", padding=(0, 2))
    table.add_row("pin", answer.pin_id)
    table.add_row("pinned tokens", str(answer.pinned_token_count))
    table.add_row("expires", _time_of(answer.expire_time.ToJsonString()))
    table.add_row("pinned blocks", f"{answer.pinned_block_count} of {answer.pin_budget_block_count} that may be pinned")
    _print(answer, table, as_json=as_json)


def run_pins(place: Place, *, tenant: str | None, as_json: bool) -> None:
    """Print the pins of a pool, and what breakpoints keep; tenant None: of all that the caller may see."""

    async def look(cache: CacheClient) -> tuple[list[pb.Pin], list[pb.Tenant]]:
        pins = await cache.list_pins(place.pool, tenant=tenant)
        tenants = [each for each in await cache.list_tenants(place.pool) if tenant in (None, each.name)]
        return pins, [each for each in tenants if each.kept_block_count]

    pins, tenants = _ask(place, look)
    table = _table("pin", "tenant", "pinned tokens", "expires")
    for pin in pins:
        expires = _time_of(pin.expire_time.ToJsonString())
        table.add_row(pin.pin_id, pin.tenant, str(pin.pinned_token_count), expires)
    if_empty = "\n".join(["There are no pins.", *map(_kept_by, tenants)])
    answer: dict[str, Iterable[Message]] = {"pins": pins, "keeping_tenants": tenants}
    _print(answer, table, as_json=as_json, if_empty=if_empty, notes=map(_kept_by, tenants))


def _kept_by(tenant: pb.Tenant) -> str:
    """Return what the breakpoints of a tenant's prompts keep."""
    name, ends = tenant.name or "nobody", _time_of(tenant.next_keep_end_time.ToJsonString())
    kept, limit = tenant.kept_block_count, tenant.keep_limit_block_count
    return f"Breakpoints of {name} keep {kept} of at most {limit} blocks, the next until {ends}."


def run_unpin(place: Place, pin_id: str, *, tenant: str | None) -> None:
    """Remove a pin. A pin that has ended is no error."""
    _ask(place, lambda cache: cache.unpin_prefix(pin_id, pool=place.pool, tenant=tenant))


def run_reset(
    place: Place, prefix: Prefix | None, *, tenant: str | None, salt: str | None, adapter: str, as_json: bool
) -> None:
    """Make cached content unfindable, and print how much: of a prefix, a salt, an adapter, a tenant, or with none of
    them all."""

    async def reset(cache: CacheClient) -> pb.ResetPrefixCacheResponse:
        token_ids = None if prefix is None else await _tokens_of(place, prefix)
        salt_bytes = None if salt is None else salt.encode()
        identity = await _adapter_of(cache, place.pool, adapter)
        return await cache.reset_prefix_cache(
            place.pool, tenant=tenant, salt=salt_bytes, adapter=identity, token_ids=token_ids
        )

    answer = _ask(place, reset)
    table = Table.grid("", "", padding=(0, 2))
    table.add_row("dropped blocks", str(answer.dropped_block_count))
    table.add_row("dropped pins", str(answer.dropped_pin_count))
    _print(answer, table, as_json=as_json)


async def _adapter_of(cache: CacheClient, pool: str, adapter: str) -> bytes:
    """Return an adapter's identity, given that or a name of the pool's worker; b"" for none. Raises InvalidRequest."""
    if not adapter or re.fullmatch("[0-9a-f]{64}", adapter):
        return bytes.fromhex(adapter)
    return named_adapter(adapters_of((await cache.get_pool(pool)).adapters), adapter)


def run_audit(place: Place, *, as_json: bool) -> bool:
    """Check a pool's ownership invariants, print the result, and return True if all hold."""
    answer = _ask(place, lambda cache: cache.audit_pool(place.pool))
    table = Table.grid("")
    for violation in answer.violations:
        table.add_row(violation)
    if not answer.violations:
        table.add_row(f"All invariants hold: {answer.block_count} blocks, {answer.sequence_count} sequences.")
    _print(answer, table, as_json=as_json)
    return not answer.violations


def _ask(place: Place, question: Callable[[CacheClient], Awaitable[Answer]]) -> Answer:
    """Return the answer of a cachemgr. Raises UnreachableError if it is unavailable, and QuireError."""

    async def ask() -> Answer:
        cache = CacheClient(place.cachemgr, credentials=place.credentials, timeout_s=REACH_TIMEOUT_S, retry=ONCE)
        try:
            with answering(place.cachemgr):
                return await question(cache)
        finally:
            await cache.close()

    return asyncio.run(ask())


async def _tokens_of(place: Place, prefix: Prefix) -> list[int]:
    if prefix.are_token_ids:
        try:
            return [int(part) for part in prefix.prompt.replace(",", " ").split()]
        except ValueError as error:
            raise InvalidRequest.of_field("prompt", prefix.prompt, "token ids, separated by commas") from error
    source = prefix.tokenizer or await _tokenizer_of_worker(place)
    try:
        return Tokenizer.load(source).encode(prefix.prompt)
    except (OSError, ValueError) as error:
        raise UnreachableError(
            f"the tokenizer at {source} can't be read here ({error}): give its path with --tokenizer, "
            "or give token ids, with --token-ids."
        ) from error


async def _tokenizer_of_worker(place: Place) -> str:
    pools = await check_reachable(place.cachemgr, place.credentials)
    name = place.pool or min(pool.name for pool in pools) if pools else place.pool
    pool = check_pool(pools, name, cachemgr=place.cachemgr)
    worker = WorkerClient(pool.worker_address, credentials=place.credentials, timeout_s=REACH_TIMEOUT_S, retry=ONCE)
    try:
        return (await worker.get_model()).tokenizer
    finally:
        await worker.close()


def _table(*columns: str) -> Table:
    return Table(*columns, box=None, pad_edge=False, padding=(0, 2, 0, 0))


def _print(
    answer: Message | dict[str, Iterable[Message]],
    table: Table,
    *,
    as_json: bool,
    if_empty: str | None = None,
    notes: Iterable[str] = (),
) -> None:
    """Print the answer as JSON, or as a table with notes below it. No value is cut off: a long one is folded."""
    if as_json:
        values = (
            _as_json(answer) if isinstance(answer, Message) else {k: list(map(_as_json, v)) for k, v in answer.items()}
        )
        print(json.dumps(values, indent=2))
    elif if_empty is not None and not table.row_count:
        print(if_empty)
    else:
        for column in table.columns:
            column.overflow = "fold"
        console = Console(highlight=False, markup=False)
        if not console.is_terminal:
            console.width = _UNLIMITED_WIDTH
        with console.capture() as written:
            console.print(table)
        print(re.sub(r" +$", "", written.get(), flags=re.MULTILINE), end="")
        for note in notes:
            print(note)


def _as_json(message: Message) -> dict[str, Any]:
    """Return as_dict() with the names of enum values."""
    values = as_dict(message)
    for field in message.DESCRIPTOR.fields:
        if field.enum_type is not None:
            values[field.name] = field.enum_type.values_by_number[values[field.name]].name
    return values


def _name_of(value: str) -> str:
    """`LEASE_STATE_OPEN` as `open`, `MISS_REASON_NEVER_COMPUTED` as `never computed`."""
    return value.removeprefix("LEASE_STATE_").removeprefix("MISS_REASON_").replace("_", " ").lower()


def _time_of(json_time: str) -> str:
    """Return a time to the second, in UTC, in the form of RFC 3339."""
    return json_time.split(".")[0].removesuffix("Z") + "Z"
