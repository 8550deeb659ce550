"""The cost of the copy that `quire events` keeps: processor time and memory for each block, time to publish everything.

    python benchmarks/kv_events.py --blocks 100000

Blocks of 16 tokens in chains of 128, as a watch's snapshot has them.
"""

import random
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import click

from quire.cache.v1 import cache_service_pb2 as pb
from quire.integrations.kv_events.encoding import encode_batch, parts_of
from quire.integrations.kv_events.replica import PrefixReplica

BLOCK_SIZE = 16
CHAIN = 128
VOCABULARY = 150_000
MAX_BATCH_BLOCKS = 4_096


def answers(num_blocks: int) -> Iterator[bytes]:
    """Yield answers of a watch, a chain each."""
    draw = random.Random(1)
    for first in range(1, num_blocks, CHAIN):
        answer, parent = pb.WatchBlocksResponse(epoch=1), b""
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


@click.command()
@click.option("--blocks", default=100_000, show_default=True, type=click.IntRange(min=CHAIN))
def main(blocks: int) -> None:
    """Print the figures."""
    told, replica = list(answers(blocks)), PrefixReplica()
    before_bytes, begin_s = resident_bytes(), time.process_time()
    for answer in told:
        replica.apply(pb.WatchBlocksResponse.FromString(answer))
    applied_s, kept_bytes = time.process_time() - begin_s, resident_bytes() - before_bytes
    begin_s = time.process_time()
    parts = parts_of(replica.chains(), max_blocks=MAX_BATCH_BLOCKS)
    num_bytes = sum(len(encode_batch(part, now=0.0)) for part in parts)
    encoded_s = time.process_time() - begin_s
    print(f"{replica.statistics().num_published} blocks published")
    print(f"to apply      {applied_s / blocks * 1e6:.1f} us a block")
    print(f"memory        {kept_bytes / blocks:.0f} bytes a block")
    print(f"to publish    {encoded_s / blocks * 1e6:.1f} us a block, {num_bytes / blocks:.0f} bytes a block")


if __name__ == "__main__":
    main()
