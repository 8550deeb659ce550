"""Several ranks on gloo, each a process with its part of some models, and the same models on one rank beside them."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import model_zoo
import torch
import torch.multiprocessing
import transformers
from paged_run import run

from quire.worker.memory.kv_pool import KVPool
from quire.worker.model.cache_layout import CachedLayer
from quire.worker.model.checkpoint import load_model
from quire.worker.run.ranks import OneRank
from quire.worker.tensor_parallel.follower import Follower
from quire.worker.tensor_parallel.group import RankGroup, RankPlace
from quire.worker.tensor_parallel.leader import Leader

CPU = torch.device("cpu")
BLOCK_SIZE = 4
BOUND = 1e-5
"""Of logits in float32, relative to the largest: the ranks add up in another order than one."""
NUM_NEW = 10
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 35, 8, 9, 79, 3, 2, 38, 46, 26, 43], [2, 71, 8, 28, 18, 28], [1, 61, 80, 33]]


def compare(families: tuple[str, ...], size: int = 2) -> dict[str, Any]:
    """Run models on `size` ranks and on one, with the same tokens. By family:

    error           largest difference of logits, of the largest logit
    decided         [tokens for which one rank's first two logits are more than twice BOUND apart, all tokens]
    other_tokens    of the first of these, tokens that are not the same on `size` ranks
    kv_heads        of a layer: [the whole model, rank 0 of several]
    fingerprints    [one rank, rank 0 of several]

    Under "" checksums of two blocks over all ranks, before and after ranks other than 0 change the second.
    """
    with tempfile.TemporaryDirectory(prefix="q-") as folder:
        for family in families:
            model_zoo.save(family, Path(folder))
        torch.multiprocessing.start_processes(  # type: ignore[no-untyped-call]
            be_rank, args=(folder, families, size), nprocs=size, start_method="spawn"
        )
        found: dict[str, Any] = json.loads(Path(folder, "found.json").read_text())
        return found


def be_rank(rank: int, folder: str, families: tuple[str, ...], size: int) -> None:
    """One of the ranks, from start to end."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    group = RankGroup(RankPlace(rank, size, rank, size, str(Path(folder, "store"))), CPU)
    ranks = Leader(group, CPU, lambda timeout_s: None) if rank == 0 else Follower(group, CPU)
    found: dict[str, Any] = {"": checksums(ranks, group)}
    for family in families:
        sharded = load_model(Path(folder, family), dtype=torch.float32, ranks=ranks)
        tokens, logits = run(sharded, PROMPTS, NUM_NEW, block_size=BLOCK_SIZE)
        if rank:
            continue
        config = transformers.AutoConfig.from_pretrained(Path(folder, family))
        alone = load_model(Path(folder, family), dtype=torch.float32)
        _, expected = run(alone, PROMPTS, NUM_NEW, block_size=BLOCK_SIZE, forced=tokens)
        largest = expected.abs().max()
        first, second = expected.topk(2, dim=-1).values.unbind(-1)
        is_decided = first - second > 2 * BOUND * largest
        found[family] = {
            "error": float((logits - expected).abs().max() / largest),
            "decided": [int(is_decided.sum()), is_decided.numel()],
            "other_tokens": int((logits.argmax(-1) != expected.argmax(-1))[is_decided].sum()),
            "kv_heads": [config.num_key_value_heads, sharded.specs[0].num_kv_heads],
            "fingerprints": [alone.fingerprint, sharded.fingerprint],
        }
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    ranks.least(0)  # so that none ends before the other is done
    os._exit(0)  # as ranks of a worker do: threads of torch.distributed may abort an interpreter that ends


def checksums(ranks: OneRank, group: RankGroup) -> list[list[int]]:
    """Of blocks 1 and 2 over all ranks, before and after ranks other than 0 write to block 2."""
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
