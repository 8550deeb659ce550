"""Steps with attention in Triton, against the float64 reference and against the same steps in torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

import model_zoo as zoo
import pytest
import torch
from gpu_desk.steps import MAX_MODEL_LEN

from quire.kernels import reference
from quire.worker.attention.torch_attention import AttentionStep
from quire.worker.attention.triton_attention import TritonAttentionStep, why_torch
from quire.worker.memory.kv_pool import NULL_BLOCK, KVPool
from quire.worker.memory.layer_spec import Causal, Chunked, LayerSpec, Sliding
from quire.worker.memory.sequence_table import SequenceTable
from quire.worker.memory.step_batch import StepBatch, build_step_batch
from quire.worker.model.paged_model import PagedModel
from quire.worker.model.preparing import prepare_model
from quire.worker.run.graphs import CannotCapture, StaticDecode, buckets

pytestmark = pytest.mark.usefixtures("small_device")

BLOCK_SIZE = 16

CAUSAL = LayerSpec(
    layer_idx=0,
    num_query_heads=4,
    num_kv_heads=2,
    k_head_dim=16,
    v_head_dim=16,
    mask=Causal(),
    scaling=0.4,
    softcap=None,
    has_sinks=False,
)
SPECS = {
    "causal": CAUSAL,
    "sliding": replace(CAUSAL, mask=Sliding(9)),
    "chunked with softcap": replace(CAUSAL, mask=Chunked(8), softcap=1.5),
    "sinks": replace(CAUSAL, has_sinks=True),
    "values wider than keys": replace(CAUSAL, v_head_dim=24),
    "no groups": replace(CAUSAL, num_query_heads=2),
    "a head dim for torch": replace(CAUSAL, k_head_dim=12, v_head_dim=12),
}
# (start, count) per sequence: tokens already in the pool, tokens of this step.
BATCHES = {
    "decodes": [(6, 1), (33, 1), (0, 1)],
    "prompts": [(0, 20), (17, 3)],
    "decodes, then prompts": [(6, 1), (20, 1), (0, 5)],
    "prompts, then decodes": [(17, 4), (0, 1), (31, 1)],
    "all in between": [(6, 1), (0, 18), (16, 1), (7, 2), (30, 1)],
}


@dataclass
class Case:
    """A pool with the keys of earlier steps and NaN elsewhere; this step's queries, keys and values."""

    spec: LayerSpec
    pool: KVPool
    batch: StepBatch
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    sinks: torch.Tensor | None

    def run(self, kind: type[AttentionStep] = TritonAttentionStep) -> torch.Tensor:
        step = kind(self.batch, self.pool, specs={0: self.spec})
        step.write(0, self.k, self.v)
        return step.attend(0, self.q, scaling=self.spec.scaling, softcap=self.spec.softcap, sinks=self.sinks)

    def expected(self) -> torch.Tensor:
        """From the pool's content; after run()."""
        mask = self.spec.mask
        return reference.paged_attention(
            self.q,
            self.pool.k(0).contiguous(),
            self.pool.v(0).contiguous(),
            block_tables=self.batch.block_tables[0],
            seq_lens=self.batch.seq_lens,
            cu_seqlens_q=self.batch.cu_seqlens_q,
            scaling=self.spec.scaling,
            window=mask.window if isinstance(mask, Sliding) else None,
            chunk=mask.chunk if isinstance(mask, Chunked) else None,
            softcap=self.spec.softcap,
            sinks=self.sinks,
        )


def shuffled_table(lengths: list[int], device: torch.device, *, width: int) -> SequenceTable:
    """A sequence of each length, with blocks from 1 on in no order."""
    needed = [-(-length // BLOCK_SIZE) for length in lengths]
    block_ids = (torch.randperm(sum(needed), generator=torch.Generator().manual_seed(3)) + 1).tolist()
    table = SequenceTable(max_num_seqs=len(lengths), max_blocks_per_seq=width, device=device)
    for blocks in needed:
        table.stage_blocks(table.add(), 0, [block_ids.pop() for _ in range(blocks)])
    return table


def make_case(
    spec: LayerSpec,
    sequences: list[tuple[int, int]],
    device: torch.device,
    *,
    kv_dtype: torch.dtype = torch.float32,
    in_one_tensor: bool = False,
    scales: torch.Tensor | None = None,
) -> Case:
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device)

    lengths = [start + count for start, count in sequences]
    table = shuffled_table(lengths, device, width=5)
    pool = KVPool(
        {0: spec},
        scales=None if scales is None else {0: scales},
        num_blocks=20,
        block_size=BLOCK_SIZE,
        dtype=kv_dtype,
        device=device,
        in_one_tensor=in_one_tensor,
    )
    for tensor in pool.tensors():
        tensor[1:] = torch.full_like(tensor[1:], torch.nan, dtype=torch.float32).to(kv_dtype)
    for row, (start, _) in enumerate(sequences):
        for position in range(start):
            block_id = table.block_ids(row)[position // BLOCK_SIZE]
            for tensor in pool.tensors():
                tensor[block_id, position % BLOCK_SIZE] = random(*tensor.shape[2:]).to(kv_dtype)
    batch = build_step_batch(
        table,
        block_size=BLOCK_SIZE,
        rows=list(range(len(sequences))),
        starts=[start for start, _ in sequences],
        counts=[count for _, count in sequences],
        token_ids=[[0] * count for _, count in sequences],
    )
    k = random(batch.num_tokens, spec.num_kv_heads, spec.k_head_dim)
    v = random(batch.num_tokens, spec.num_kv_heads, spec.v_head_dim)
    if kv_dtype == torch.float8_e4m3fn:  # the interpreter may round 1.99 to 1
        k, v = (x.to(kv_dtype).float() * (1 + 2**-6) for x in (k, v))
    return Case(
        spec=spec,
        pool=pool,
        batch=batch,
        q=random(batch.num_tokens, spec.num_query_heads, spec.k_head_dim) * 2,
        k=k,
        v=v,
        sinks=random(spec.num_query_heads).to(torch.bfloat16) if spec.has_sinks else None,  # the dtype of weights,
    )


@pytest.mark.parametrize("sequences", BATCHES.values(), ids=BATCHES)
def test_batches(sequences: list[tuple[int, int]], device: torch.device) -> None:
    case = make_case(CAUSAL, sequences, device)
    torch.testing.assert_close(case.run().double(), case.expected(), atol=2e-6, rtol=1e-5)
    case.pool.check_invariants()


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_layers(spec: LayerSpec, device: torch.device) -> None:
    """Layers of one geometry, in one tensor; of two, in two."""
    in_one_tensor = spec.k_head_dim == spec.v_head_dim
    case = make_case(spec, BATCHES["all in between"], device, in_one_tensor=in_one_tensor)
    torch.testing.assert_close(case.run().double(), case.expected(), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("kv_dtype", "is_scaled"), [(torch.float8_e4m3fn, True), (torch.float8_e4m3fn, False), (torch.bfloat16, False)]
)
def test_a_pool_of_another_dtype_is_read_as_torch_reads_it(
    kv_dtype: torch.dtype, is_scaled: bool, device: torch.device
) -> None:
    sequences = BATCHES["decodes, then prompts"]
    scales = torch.tensor([[0.25, 0.125], [0.5, 1.0]], device=device) if is_scaled else None
    in_torch = make_case(CAUSAL, sequences, device, kv_dtype=kv_dtype, scales=scales)
    expected = in_torch.run(AttentionStep)
    case = make_case(CAUSAL, sequences, device, kv_dtype=kv_dtype, scales=scales)
    out = case.run()
    for stored, wanted in zip(case.pool.tensors(), in_torch.pool.tensors(), strict=True):
        assert torch.equal(stored.float().nan_to_num(9e9), wanted.float().nan_to_num(9e9))
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)


def test_which_layers_the_kernels_take() -> None:
    assert [name for name, spec in SPECS.items() if why_torch(spec) is not None] == ["a head dim for torch"]
    assert "head dim 512" in str(why_torch(replace(CAUSAL, k_head_dim=512)))
    assert "scaling 0" in str(why_torch(replace(CAUSAL, scaling=0.0)))
    specs = {0: CAUSAL, 1: SPECS["a head dim for torch"]}
    assert TritonAttentionStep.describe({0: CAUSAL}) == "triton in 1 of 1 layers"
    assert TritonAttentionStep.describe(specs).startswith("triton in 1 of 2 layers; layer 1 in torch: head dim 12")
    assert not TritonAttentionStep.reads_lengths_on_device(specs)


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_models_agree_with_their_own_attention(name: str, device: torch.device) -> None:
    """Windows, softcap, sinks: loading holds a prompt in parts, and decodes beside it, against the model by itself."""
    prepare_model(zoo.build(name).to(device), max_model_len=MAX_MODEL_LEN, step_kind=TritonAttentionStep)


def test_static_decode_equals_the_ordinary_step(model: PagedModel, device: torch.device) -> None:
    """Every bucket, full and padded, after a larger step has left its numbers in the buffers."""
    lengths = [16, 17, 40, 1, 32]
    table = shuffled_table(lengths, device, width=MAX_MODEL_LEN // BLOCK_SIZE)
    pools = [
        KVPool(model.specs, num_blocks=12, block_size=BLOCK_SIZE, dtype=torch.float32, device=device) for _ in range(2)
    ]
    generator = torch.Generator().manual_seed(1)
    for tensors in zip(*(pool.tensors() for pool in pools), strict=True):
        content = torch.randn(tensors[0][1:].shape, generator=generator)
        for tensor in tensors:
            tensor[1:] = content
    decode = StaticDecode(model, pools[1], max_num_seqs=5, max_blocks_per_seq=MAX_MODEL_LEN // BLOCK_SIZE)
    assert decode.buckets == (1, 2, 4, 5)
    for seqs in ([4, 0, 3, 1, 2], [2, 4, 1], [3], [0, 2]):
        batch = build_step_batch(
            table,
            block_size=BLOCK_SIZE,
            rows=seqs,
            starts=[lengths[seq] - 1 for seq in seqs],
            counts=[1] * len(seqs),
            token_ids=[[7 + seq] for seq in seqs],
        )
        assert decode.takes(batch)
        expected = model.forward(batch, pools[0])
        logits = decode.forward(batch)
        assert logits.shape == (len(seqs), model.vocab_size)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
        padding = slice(len(seqs), next(size for size in decode.buckets if size >= len(seqs)))
        assert not decode._seq_lens[padding].any()
    for written, expected in zip(pools[1].tensors(), pools[0].tensors(), strict=True):
        torch.testing.assert_close(written, expected, atol=1e-5, rtol=1e-5)
        assert not written[NULL_BLOCK].any()


def test_which_steps_are_static(model: PagedModel, device: torch.device) -> None:
    table = shuffled_table([3, 3, 3], device, width=4)
    pool = KVPool(model.specs, num_blocks=4, block_size=BLOCK_SIZE, dtype=torch.float32, device=device)
    decode = StaticDecode(model, pool, max_num_seqs=2, max_blocks_per_seq=4)

    def takes(*counts: int) -> bool:
        rows = list(range(len(counts)))
        ids = [[0] * count for count in counts]
        starts = [0] * len(counts)
        return decode.takes(
            build_step_batch(table, block_size=BLOCK_SIZE, rows=rows, starts=starts, counts=counts, token_ids=ids)
        )

    assert takes(1)
    assert takes(1, 1)
    assert not takes(1, 2)
    assert not takes(1, 1, 1)


def test_a_model_whose_attention_asks_the_host_is_not_static() -> None:
    in_torch = prepare_model(zoo.build("llama"), max_model_len=MAX_MODEL_LEN)
    pool = KVPool(in_torch.specs, num_blocks=4, block_size=BLOCK_SIZE, dtype=torch.float32, device="cpu")
    with pytest.raises(CannotCapture, match="lengths on the host"):
        StaticDecode(in_torch, pool, max_num_seqs=2, max_blocks_per_seq=4)


def test_buckets() -> None:
    assert buckets(1) == (1,)
    assert buckets(3) == (1, 2, 3)
    assert buckets(20) == (1, 2, 4, 8, 16, 20)
    assert buckets(1000) == (1, 2, 4, *range(8, 257, 8))


def test_pools_copy_blocks_with_the_kernel(device: torch.device) -> None:
    for in_one_tensor in (False, True):
        case = make_case(CAUSAL, [(0, 1)], device, in_one_tensor=in_one_tensor)
        generator = torch.Generator().manual_seed(0)
        for tensor in case.pool.tensors():
            tensor[1:] = torch.randn(tensor[1:].shape, generator=generator)
        expected = [tensor.clone() for tensor in case.pool.tensors()]
        for tensor in expected:
            tensor[[4, 6]] = tensor[[1, 2]]
        case.pool.copy_blocks([(1, 4), (2, 6)])
        assert all(torch.equal(a, b) for a, b in zip(case.pool.tensors(), expected, strict=True))
