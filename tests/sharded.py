"""Two ranks on gloo, each a process with its part of some models, and the same models on one rank beside them."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import model_zoo
import torch
import torch.multiprocessing
import transformers
from paged_run import run

from quire.worker.cached_model import CachedLayer
from quire.worker.kv_pool import KVPool, bytes_per_block
from quire.worker.model import load_model
from quire.worker.ranks import OneRank
from quire.worker.tensor_parallel.follower import Follower
from quire.worker.tensor_parallel.group import Place, RankGroup
from quire.worker.tensor_parallel.leader import Leader

CPU = torch.device("cpu")
SIZE = 2
BLOCK_SIZE = 4
NUM_NEW = 10
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 35, 8, 9, 79, 3, 2, 38, 46, 26, 43], [2, 71, 8, 28, 18, 28], [1, 61, 80, 33]]


def compare(families: tuple[str, ...]) -> dict[str, Any]:
    """Run models on two ranks and on one, with the same tokens. By family:

    error           largest difference of logits, of the largest logit
    block_bytes     of a block: [one rank, rank 0 of two]
    fingerprints    [one rank, rank 0 of two]
    checksums       of two blocks over both ranks, before and after rank 1 changes the second: only under ""
    """
    with tempfile.TemporaryDirectory(prefix="q-") as folder:
        for family in families:
            model_zoo.save(family, Path(folder))
        torch.multiprocessing.start_processes(  # type: ignore[no-untyped-call]
            be_rank, args=(folder, families), nprocs=SIZE, start_method="spawn"
        )
        found: dict[str, Any] = json.loads(Path(folder, "found.json").read_text())
        return found


def be_rank(rank: int, folder: str, families: tuple[str, ...]) -> None:
    """One of the ranks, from start to end."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    group = RankGroup(Place(rank, SIZE, rank, SIZE, str(Path(folder, "store"))), CPU)
    ranks = Leader(group, CPU, lambda timeout_s: None) if rank == 0 else Follower(group, CPU)
    found: dict[str, Any] = {"": checksums(ranks, group)}
    for family in families:
        sharded = load_model(Path(folder, family), dtype=torch.float32, ranks=ranks)
        tokens, logits = run(sharded, PROMPTS, NUM_NEW, block_size=BLOCK_SIZE)
        if rank:
            continue
        alone = load_model(Path(folder, family), dtype=torch.float32)
        _, expected = run(alone, PROMPTS, NUM_NEW, block_size=BLOCK_SIZE, forced=tokens)
        found[family] = {
            "error": float((logits - expected).abs().max() / expected.abs().max()),
            "block_bytes": [bytes_per_block(each.specs, BLOCK_SIZE, each.dtype) for each in (alone, sharded)],
            "fingerprints": [alone.fingerprint, sharded.fingerprint],
        }
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    ranks.least(0)  # so that none ends before the other is done


def checksums(ranks: OneRank, group: RankGroup) -> list[list[int]]:
    """Of blocks 1 and 2 over both ranks, before and after rank 1 writes to block 2."""
    layer = CachedLayer(num_kv_heads=1, k_head_dim=4, v_head_dim=4)
    pool = KVPool({0: layer}, num_blocks=3, block_size=BLOCK_SIZE, dtype=torch.float32, device=CPU)
    found = []
    for value in (0.0, 1.0):
        if group.place.rank:
            pool.k(0)[2] = value
            group.receive()
        found.append(ranks.add_checksums([1, 2], pool.checksum_blocks([1, 2])))
    return found


if __name__ == "__main__":
    print(json.dumps(compare(tuple(sys.argv[1:])), indent=1))
