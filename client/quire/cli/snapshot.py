"""One look at a pool through cachemgr's own calls, for `quire stats` and the demo. No figure is made up here."""

import asyncio
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from quire.cache.v1 import cache_service_pb2 as pb
from quire.client.cache_client import CacheClient
from quire.client.channel import ONCE, last_cause
from quire.client.credentials import NO_CREDENTIALS, Credentials
from quire.client.errors import NotFound, QuireError, Unavailable
from quire.compute.v1 import worker_service_pb2

# A map of more blocks than this is drawn from their counts, because a list would need too many calls.
MAX_LISTED_BLOCKS = 65_536
REACH_TIMEOUT_S = 5.0
_MAX_ATTEMPTS = 4
# Parts of gRPC's messages for failed connections, and their explanation.
_CAUSES = {
    "CERTIFICATE_VERIFY_FAILED": "CERTIFICATE_VERIFY_FAILED: its certificate is of no authority in --tls-ca, or old",
    "Hostname Verification Check failed": "its certificate is for another host; --tls-server-name sets the name",
    "WRONG_VERSION_NUMBER": "the server there does not use TLS",
    "Socket closed": "Socket closed: it may require TLS (--tls-ca) or a client certificate (--tls-cert)",
    "Expected SETTINGS frame": "the server there does not use gRPC, or requires TLS: --tls-ca",
    "before receiving SETTINGS frame": "it took the connection and did not answer in time",
}


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A pool at one moment.

    pool           its sizes and identity
    statistics     its counters
    sequences      without their block tables
    blocks         all of them by id; none if there are more than MAX_LISTED_BLOCKS
    is_consistent  True if nothing changed between the first and the last of its calls
    step_parts     how the parts of its worker's steps run; none if the worker was not asked, or did not answer
    """

    pool: pb.Pool
    statistics: pb.PoolStatistics
    sequences: Sequence[pb.Sequence]
    blocks: Sequence[pb.Block]
    is_consistent: bool
    step_parts: Sequence[worker_service_pb2.StepPart] = ()

    @property
    def num_blocks(self) -> int:
        """Blocks that can be owned: without the null block."""
        return self.pool.geometry.block_count - 1

    @property
    def has_host_tier(self) -> bool:
        """True if preempted sequences can be kept in host memory."""
        return self.pool.geometry.host_block_count > 0

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.pool.geometry.block_size_tokens

    @property
    def bytes_per_slot(self) -> float:
        """Bytes of KV of one token in one block: in all layers of its group."""
        return self.pool.geometry.block_bytes / self.block_size

    @property
    def bytes_per_token(self) -> float:
        """Bytes of KV of one token, all layers together."""
        return self.bytes_per_slot * max(1, len(self.pool.geometry.layer_groups))

    @property
    def num_sequence_tokens(self) -> int:
        """Tokens of all sequences, those in shared blocks counted for each."""
        return sum(sequence.token_count for sequence in self.sequences)

    @property
    def num_active_slots(self) -> int:
        """Token slots of the blocks that are held."""
        return self.statistics.block_counts.active_count * self.block_size

    @property
    def used_slots_ratio(self) -> float | None:
        """Part of those slots that has a token; None if no block is held."""
        return ratio(self.statistics.held_token_count, self.num_active_slots)

    @property
    def num_contiguous_slots(self) -> int:
        """Slots that one buffer of the model's longest sequence would take for each of these sequences."""
        return len(self.sequences) * self.pool.geometry.max_sequence_tokens

    @property
    def hit_ratio(self) -> float | None:
        """Part of all prompt tokens admitted so far that was found in the cache; None if there were none."""
        return ratio(self.statistics.cached_token_count, self.statistics.admitted_token_count)


def ratio(part: float, whole: float) -> float | None:
    """part / whole; None if there is no whole."""
    return part / whole if whole else None


async def take_snapshot(cache: CacheClient, pool: str = "") -> Snapshot:
    """A look at a pool; "" is the only one there is. Tried again, a few times, while steps come in between.

    Raises NotFound, Unavailable.
    """
    for _ in range(_MAX_ATTEMPTS - 1):
        snapshot = await _take_snapshot(cache, pool)
        if snapshot.is_consistent:
            return snapshot
    return await _take_snapshot(cache, pool)


async def _take_snapshot(cache: CacheClient, pool: str) -> Snapshot:
    before = await _statistics_of(cache, pool)
    sequences, found = await asyncio.gather(cache.list_sequences(before.pool), cache.get_pool(before.pool))
    small = found.geometry.block_count <= MAX_LISTED_BLOCKS
    blocks = await cache.list_blocks(before.pool) if small else []
    after = await _statistics_of(cache, before.pool)
    is_consistent = before.SerializeToString(deterministic=True) == after.SerializeToString(deterministic=True)
    return Snapshot(found, after, sequences, blocks, is_consistent)


async def _statistics_of(cache: CacheClient, pool: str) -> pb.PoolStatistics:
    found = await cache.get_statistics(pool)
    if len(found) == 1:
        return found[0]
    if not found:
        raise NotFound(f"no pool {pool!r}" if pool else "no pool is attached", reason="POOL_NOT_FOUND")
    names = ", ".join(statistics.pool for statistics in found)
    raise NotFound(f"there are several pools ({names}): name one", reason="POOL_NOT_FOUND")


class UnreachableError(QuireError):
    """A service can't be reached, or has no pool; the message names it and has advice."""

    default_reason = "UNREACHABLE"


@contextlib.contextmanager
def answering(cachemgr: str) -> Iterator[None]:
    """Turns the errors of an unreachable cachemgr within the block into an UnreachableError with advice."""
    try:
        yield
    except QuireError as error:
        if not is_silent(error):
            raise
        raise UnreachableError(
            f"no cachemgr answers at {cachemgr} ({cause_of(error)}).\n"
            "Start both services with `quire up PATH_OR_HUB_ID`, or set its address: --cachemgr ADDRESS, "
            "or QUIRE_CACHEMGR=ADDRESS in the environment."
        ) from error


def is_silent(error: QuireError) -> bool:
    """Return True if the error is not the service's own: it is unavailable, or another one is at its address."""
    return isinstance(error, Unavailable) or error.reason == "UNIMPLEMENTED"


async def check_reachable(address: str, credentials: Credentials = NO_CREDENTIALS) -> list[pb.Pool]:
    """The pools of the cachemgr at this address. Raises UnreachableError, after 5 s at most, if there is none."""
    cache = CacheClient(address, credentials=credentials, timeout_s=REACH_TIMEOUT_S, retry=ONCE)
    try:
        with answering(address):
            return await cache.list_pools()
    finally:
        await cache.close()


def check_pool(pools: Sequence[pb.Pool], name: str, *, cachemgr: str) -> pb.Pool:
    """The pool meant by a name, "" being the only one. Raises UnreachableError if it can't be used, and says why."""
    start = f"Start one with `quire worker --model PATH_OR_HUB_ID --cachemgr {cachemgr}`."
    if not pools:
        raise UnreachableError(f"the cachemgr at {cachemgr} has no pool: no worker is attached to it.\n{start}")
    names = ", ".join(sorted(pool.name for pool in pools))
    if not name and len(pools) > 1:
        raise UnreachableError(f"the cachemgr at {cachemgr} has several pools ({names}): choose one with --pool NAME.")
    found = next((pool for pool in pools if pool.name == (name or pools[0].name)), None)
    if found is None:
        raise UnreachableError(f"the cachemgr at {cachemgr} has no pool {name!r}; it has: {names}.")
    if not found.attached:
        raise UnreachableError(f"the worker of pool {found.name!r} is not attached to {cachemgr} right now.\n{start}")
    return found


def cause_of(error: QuireError) -> str:
    """Return why a service can't be reached: the last part of gRPC's causes, such as "No such file or directory"."""
    if error.reason == "DEADLINE_EXCEEDED":
        return f"no answer within {REACH_TIMEOUT_S:g} s"
    if error.reason == "UNIMPLEMENTED":
        return "another service is there"
    message = error.metadata.get("cause", error.message)
    for sign, cause in _CAUSES.items():
        if sign in message:
            return cause
    return last_cause(message) or error.reason


def describe_trouble(cachemgr: str, error: QuireError | None, age_s: float) -> str:
    """Return the reason why the content of a screen is age_s old, in one line. None: no answer and no error so far."""
    if error is None or is_silent(error):
        cause = "" if error is None else f" ({cause_of(error)})"
        return f"no answer for {age_s:.0f} s{cause}, trying again: {cachemgr}"
    return f"{error.message.partition(chr(10))[0]} The screen shows the state of {age_s:.0f} s ago."


def as_dict(message: Message) -> dict[str, Any]:
    """A message for JSON: every field by its name in the contract, 64-bit integers as numbers, bytes in hex."""
    return {field.name: _field_value(getattr(message, field.name)) for field in message.DESCRIPTOR.fields}


def _field_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(sorted(value.items()))
    if isinstance(value, str | bytes | int | float):
        return _plain(value)
    if isinstance(value, Message):
        return as_dict(value)
    return [as_dict(item) if isinstance(item, Message) else _plain(item) for item in value]


def _plain(value: Any) -> Any:
    return value.hex() if isinstance(value, bytes) else value
