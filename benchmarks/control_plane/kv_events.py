"""The cost of the copy that `quire events` keeps: processor time and memory for each block, time to publish everything.

    quire bench control-plane kv-events --blocks 400000

Blocks of 16 tokens in chains of 128, as a watch's snapshot has them.
"""

import random
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import click
from report import Findings, benchmark, table
from rich.progress import Progress

from quire.cache.v1 import cache_service_pb2 as pb
from quire.integrations.kv_events.encoding import encode_batch, parts_of
from quire.integrations.kv_events.replica import PrefixReplica

BLOCK_SIZE = 16
CHAIN = 128
VOCABULARY = 150_000
MAX_BATCH_BLOCKS = 4_096
QUICK_BLOCKS = 1_000


def answers(num_blocks: int) -> Iterator[bytes]:
    """Yield answers of a watch, a chain each."""
    draw = random.Random(1)
    for first in range(1, num_blocks, CHAIN):
        answer, parent = pb.WatchBlocksResponse(epoch=1, cursor="c"), b""
        for block_id in range(first, min(first + CHAIN, num_blocks + 1)):
            tokens = [draw.randrange(VOCABULARY) for _ in range(BLOCK_SIZE)]
            prefix_hash = sha256(parent + str(tokens).encode()).digest()
            block = pb.Block(block_id=block_id, state=pb.BLOCK_STATE_CACHED, prefix_hash=prefix_hash, tenant="alice")
            kind = pb.BLOCK_EVENT_KIND_STORED
            answer.events.add(kind=kind, block=block, token_ids=tokens, parent_prefix_hash=parent)
            parent = prefix_hash
        yield answer.SerializeToString()


def resident_bytes() -> int:
    """Return the memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def measure(quick: bool, progress: Progress, *, blocks: int) -> Findings:
    num_blocks = QUICK_BLOCKS if quick else blocks
    progress.add_task(f"{num_blocks:,} blocks", total=None)
    told, replica = list(answers(num_blocks)), PrefixReplica()
    before_bytes, begin_s = resident_bytes(), time.process_time()
    for answer in told:
        replica.apply(pb.WatchBlocksResponse.FromString(answer))
    applied_s, kept_bytes = time.process_time() - begin_s, resident_bytes() - before_bytes
    begin_s = time.process_time()
    parts = parts_of(replica.chains(), max_blocks=MAX_BATCH_BLOCKS)
    num_bytes = sum(len(encode_batch(part, now=0.0)) for part in parts)
    encoded_s = time.process_time() - begin_s
    figures = {
        "published_blocks": replica.statistics().num_published,
        "apply_us": applied_s / num_blocks * 1e6,
        "memory_bytes": kept_bytes / num_blocks,
        "publish_us": encoded_s / num_blocks * 1e6,
        "publish_bytes": num_bytes / num_blocks,
    }
    headings = ("blocks published", "to apply, µs", "memory, bytes", "to publish, µs", "to publish, bytes")
    made = table("the copy that `quire events` keeps: for each block", *headings, words=0)
    first, *others = figures.values()
    made.add_row(f"{first:,}", *(f"{value:.1f}" for value in others))
    return Findings([made], figures)


BLOCKS = click.Option(["--blocks"], default=100_000, show_default=True, type=click.IntRange(min=CHAIN))
main = benchmark("control-plane kv-events", measure, packages=("msgspec", "protobuf"), options=[BLOCKS])

if __name__ == "__main__":
    main()
