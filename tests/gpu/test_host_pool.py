"""The host tier beside a pool on a GPU: copied content is restored, with other work on the device meanwhile."""

import torch
from layers import causal_layer

from quire.worker.memory.host_pool import PinnedHostPool, make_host_pool
from quire.worker.memory.kv_pool import KVPool

LAYERS = {
    index: causal_layer(index, num_query_heads=8, num_kv_heads=2, k_head_dim=128, v_head_dim=128) for index in range(16)
}
NUM_BLOCKS = 257
NUM_MOVED = 100


def test_copies_are_behind_what_was_asked_before_and_before_what_is_asked_then(device: torch.device) -> None:
    pool = KVPool(LAYERS, num_blocks=NUM_BLOCKS, block_size=16, dtype=torch.bfloat16, device=device)
    host_pool = make_host_pool(pool, num_blocks=NUM_MOVED + 1)
    assert isinstance(host_pool, PinnedHostPool)
    generator = torch.Generator(device).manual_seed(0)
    blocks = torch.randperm(NUM_BLOCKS - 1, generator=torch.Generator().manual_seed(1)).add(1).tolist()
    moved, targets = blocks[:NUM_MOVED], blocks[NUM_MOVED : 2 * NUM_MOVED]
    hosts = [*range(50), *range(51, NUM_MOVED + 1)]  # two runs
    for _ in range(5):
        torch.cuda._sleep(20_000_000)  # what comes next waits in the stream
        for tensor in pool.tensors():
            tensor[1:] = torch.randn(tensor[1:].shape, generator=generator, device=device).to(tensor.dtype)
        kept = [tensor[moved].clone() for tensor in pool.tensors()]
        host_pool.offload(list(zip(moved, hosts, strict=True)))
        host_pool.join()
        for tensor in pool.tensors():
            tensor[1:] = float("nan")
        host_pool.restore(list(zip(hosts, targets, strict=True)))
        found = [tensor[targets].clone() for tensor in pool.tensors()]
        copies = host_pool.finish()
        assert (copies.num_offloaded, copies.num_restored) == (NUM_MOVED, NUM_MOVED)
        assert min(copies.offload_s, copies.restore_s) > 0
        assert all(torch.equal(one, other) for one, other in zip(kept, found, strict=True))
