"""paged_attention() against the float64 reference, over every kind of mask, score and batch that can meet."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn

from quire.kernels import reference
from quire.worker.attention import torch_attention as attention
from quire.worker.attention.torch_attention import (
    AttentionStep,
    Slots,
    attention_step,
    current_step,
    group_by_span,
    paged_attention,
)
from quire.worker.memory.kv_pool import KVPool
from quire.worker.memory.layer_spec import Causal, Chunked, LayerSpec, Sliding
from quire.worker.memory.sequence_table import SequenceTable
from quire.worker.memory.step_batch import StepBatch, build_step_batch

BLOCK_SIZE = 4
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}

# Batches as (start, count) per sequence: tokens already in the pool, tokens of this step.
BATCHES = {
    "one prompt": [(0, 21)],
    "one token": [(0, 1)],
    "prompts": [(0, 5), (0, 33), (0, 2), (0, 8)],
    "decode": [(6, 1), (5, 1), (0, 1), (6, 1)],
    "decode of one length": [(11, 1), (11, 1), (11, 1)],
    "skewed decode": [(90, 1), (3, 1), (4, 1), (2, 1), (88, 1), (5, 1)],
    "later part of a prompt": [(7, 9)],
    "all at once": [(30, 1), (0, 12), (13, 7), (29, 1), (0, 1), (8, 16), (2, 1)],
}
CAUSAL = LayerSpec(
    layer_idx=0,
    num_query_heads=4,
    num_kv_heads=2,
    k_head_dim=8,
    v_head_dim=8,
    mask=Causal(),
    scaling=0.4,
    softcap=None,
    has_sinks=False,
)
SPECS = {
    "causal": CAUSAL,
    "sliding": replace(CAUSAL, mask=Sliding(8)),
    "sliding by an odd window": replace(CAUSAL, mask=Sliding(5)),
    "a window of one": replace(CAUSAL, mask=Sliding(1)),
    "chunked": replace(CAUSAL, mask=Chunked(8)),
    "chunks across blocks": replace(CAUSAL, mask=Chunked(6)),
    "softcap": replace(CAUSAL, softcap=1.5),
    "sinks": replace(CAUSAL, has_sinks=True),
    "sliding with softcap": replace(CAUSAL, mask=Sliding(8), softcap=1.5),
    "sliding with sinks": replace(CAUSAL, mask=Sliding(8), has_sinks=True),
    "no groups": replace(CAUSAL, num_kv_heads=4),
    "one kv head": replace(CAUSAL, num_kv_heads=1),
    "one kv head with sinks": replace(CAUSAL, num_kv_heads=1, has_sinks=True),
    "values wider than keys": replace(CAUSAL, v_head_dim=12),
    "values wider than keys, softcap": replace(CAUSAL, v_head_dim=12, softcap=1.5),
}


def layer() -> nn.Module:
    """The module that transformers passes to attention."""
    module = nn.Module()
    module.layer_idx = 0  # type: ignore[assignment]
    return module


@dataclass
class Case:
    """A pool with the keys of earlier steps written and NaN everywhere else, and this step's tensors."""

    spec: LayerSpec
    pool: KVPool
    batch: StepBatch
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    sinks: torch.Tensor | None

    def run(self) -> torch.Tensor:
        """[T, Hq, Dv], from the function that transformers calls."""
        step = AttentionStep(self.batch, self.pool, specs={0: self.spec})
        with attention_step(step):
            q, k, v = (x.transpose(0, 1)[None] for x in (self.q, self.k, self.v))
            arguments: dict[str, Any] = {"scaling": self.spec.scaling, "softcap": self.spec.softcap}
            out, weights = paged_attention(layer(), q, k, v, None, s_aux=self.sinks, sliding_window=None, **arguments)
        assert weights is None
        return out[0]

    def expected(self) -> torch.Tensor:
        k_pool, v_pool = self.pool.k(0).clone(), self.pool.v(0).clone()
        reference.write_kv(self.k, self.v, k_pool, v_pool, slot_mapping=self.batch.slot_mapping[0])
        mask = self.spec.mask
        return reference.paged_attention(
            self.q,
            k_pool,
            v_pool,
            block_tables=self.batch.block_tables[0],
            seq_lens=self.batch.seq_lens,
            cu_seqlens_q=self.batch.cu_seqlens_q,
            scaling=self.spec.scaling,
            window=mask.window if isinstance(mask, Sliding) else None,
            chunk=mask.chunk if isinstance(mask, Chunked) else None,
            softcap=self.spec.softcap,
            sinks=self.sinks,
        )


def make_case(
    spec: LayerSpec,
    sequences: list[tuple[int, int]],
    *,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    block_size: int = BLOCK_SIZE,
    in_one_tensor: bool = False,
) -> Case:
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    needed = [-(-(start + count) // block_size) for start, count in sequences]
    kv_dtype = kv_dtype or dtype
    pool = KVPool(
        {0: spec},
        num_blocks=sum(needed) + 4,
        block_size=block_size,
        dtype=kv_dtype,
        device="cpu",
        in_one_tensor=in_one_tensor,
    )
    for tensor in pool.tensors():
        tensor[1:] = torch.full(tensor[1:].shape, float("nan")).to(kv_dtype)
    block_ids = (torch.randperm(pool.num_blocks - 1, generator=generator) + 1).tolist()
    table = SequenceTable(max_num_seqs=len(sequences) + 1, max_blocks_per_seq=max(needed) + 2, device="cpu")
    for blocks in needed:
        table.stage_blocks(table.add(), 0, [block_ids.pop() for _ in range(blocks)])
    for row, (start, _) in enumerate(sequences):
        for position in range(start):
            block_id = table.block_ids(row)[position // block_size]
            for tensor in pool.tensors():
                tensor[block_id, position % block_size] = random(*tensor.shape[2:]).to(kv_dtype)
    batch = build_step_batch(
        table,
        block_size=block_size,
        rows=list(range(len(sequences))),
        starts=[start for start, _ in sequences],
        counts=[count for _, count in sequences],
        token_ids=[[0] * count for _, count in sequences],
    )
    tokens = batch.num_tokens
    return Case(
        spec=spec,
        pool=pool,
        batch=batch,
        q=random(tokens, spec.num_query_heads, spec.k_head_dim) * 2,
        k=random(tokens, spec.num_kv_heads, spec.k_head_dim),
        v=random(tokens, spec.num_kv_heads, spec.v_head_dim),
        sinks=random(spec.num_query_heads) if spec.has_sinks else None,
    )


@pytest.mark.parametrize("sequences", BATCHES.values(), ids=BATCHES.keys())
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_equals_the_reference(spec: LayerSpec, sequences: list[tuple[int, int]]) -> None:
    case = make_case(spec, sequences)
    expected = case.expected()
    torch.testing.assert_close(case.run().double(), expected, atol=TOLERANCE[torch.float32], rtol=1e-5)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_equals_the_reference_in_bfloat16(spec: LayerSpec) -> None:
    case = make_case(spec, BATCHES["all at once"], dtype=torch.bfloat16)
    expected = case.expected()
    out = case.run()
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), expected, atol=TOLERANCE[torch.bfloat16], rtol=2e-2)


@pytest.mark.parametrize("spec", [SPECS["causal"], SPECS["sliding with sinks"]], ids=["sdpa", "exact"])
def test_one_tensor_of_all_layers_changes_nothing(spec: LayerSpec) -> None:
    case = make_case(spec, BATCHES["all at once"], in_one_tensor=True)
    expected = make_case(spec, BATCHES["all at once"]).expected()
    torch.testing.assert_close(case.run().double(), expected, atol=TOLERANCE[torch.float32], rtol=1e-5)
    case.pool.check_invariants()


@pytest.mark.parametrize("in_one_tensor", [False, True])
@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.bfloat16])
def test_a_pool_of_another_dtype_holds_rounded_keys_and_values(kv_dtype: torch.dtype, in_one_tensor: bool) -> None:
    """Also of a prompt that could attend to its own keys: its cached part must later give the same."""
    case = make_case(CAUSAL, BATCHES["all at once"], kv_dtype=kv_dtype, in_one_tensor=in_one_tensor)
    case.k[0, 0, 0] = 1000.0  # which float8 has no number for
    out = case.run()
    limit = torch.finfo(kv_dtype).max
    for pool, new in ((case.pool.k(0), case.k), (case.pool.v(0), case.v)):
        stored = pool.float().flatten(0, 1).index_select(0, case.batch.slot_mapping[0])
        assert torch.equal(stored, new.clamp(-limit, limit).to(kv_dtype).float())
    as_read = make_case(CAUSAL, BATCHES["all at once"])
    as_read.pool.k(0).copy_(case.pool.k(0).float())
    as_read.pool.v(0).copy_(case.pool.v(0).float())
    as_read.k, as_read.v = case.k.clamp(-limit, limit).to(kv_dtype).float(), case.v.to(kv_dtype).float()
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), as_read.expected(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_attend_reads_from_the_pool_what_it_is_not_given(spec: LayerSpec) -> None:
    """As a caller needs it that writes keys and values itself."""
    case = make_case(spec, BATCHES["all at once"])
    step = AttentionStep(case.batch, case.pool, specs={0: spec})
    with attention_step(step):
        assert current_step() is step
    step.write(0, case.k, case.v)
    out = step.attend(0, case.q, scaling=spec.scaling, softcap=spec.softcap, sinks=case.sinks)
    torch.testing.assert_close(out.double(), case.expected(), atol=TOLERANCE[torch.float32], rtol=1e-5)
    with pytest.raises(LookupError):
        current_step()


@pytest.mark.parametrize("spec", [SPECS["causal"], SPECS["sliding"], SPECS["softcap"]], ids=["sdpa", "window", "exact"])
def test_small_tiles_and_groups_change_nothing(spec: LayerSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "TILE_SCORES", 1)
    monkeypatch.setattr(attention, "TILE_QUERIES", 3)
    monkeypatch.setattr(attention, "GROUP_BYTES", 40 * 2 * 8 * 4)
    case = make_case(spec, [*BATCHES["all at once"], (0, 50), (3, 40)])
    expected = case.expected()
    torch.testing.assert_close(case.run().double(), expected, atol=TOLERANCE[torch.float32], rtol=1e-5)


def test_writes_only_this_steps_slots() -> None:
    case = make_case(CAUSAL, BATCHES["all at once"])
    k_pool, v_pool = case.pool.k(0).clone(), case.pool.v(0).clone()
    reference.write_kv(case.k, case.v, k_pool, v_pool, slot_mapping=case.batch.slot_mapping[0])
    case.run()
    assert torch.equal(case.pool.k(0).nan_to_num(9e9), k_pool.nan_to_num(9e9))
    assert torch.equal(case.pool.v(0).nan_to_num(9e9), v_pool.nan_to_num(9e9))
    case.pool.check_invariants()


def test_a_block_filled_in_this_step_is_read_in_it() -> None:
    """Row 1 shares row 0's first two blocks, which row 0 fills in the same step."""
    spec = SPECS["causal"]
    pool = KVPool({0: spec}, num_blocks=8, block_size=4, dtype=torch.float32, device="cpu")
    table = SequenceTable(max_num_seqs=2, max_blocks_per_seq=4, device="cpu")
    for block_ids in ([5, 2], [5, 2, 7]):
        table.stage_blocks(table.add(), 0, block_ids)
    batch = build_step_batch(
        table, block_size=4, rows=[1, 0], starts=[8, 0], counts=[2, 8], token_ids=[[0] * 2, [0] * 8]
    )
    case = Case(spec, pool, batch, torch.randn(10, 4, 8), torch.randn(10, 2, 8), torch.randn(10, 2, 8), None)
    expected = case.expected()
    torch.testing.assert_close(case.run().double(), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("mask", [Sliding(8), Chunked(8)], ids=["sliding", "chunked"])
@pytest.mark.parametrize("count", [1, 6])
def test_keys_outside_the_window_are_not_read(mask: Sliding | Chunked, count: int) -> None:
    """Blocks before a window may belong to another sequence: NaN there must not reach the result."""
    start = 26
    case = make_case(replace(CAUSAL, mask=mask), [(start, count)])
    expected = case.expected()
    hidden = mask.first_visible(start)
    for position in range(hidden):
        block_id = int(case.batch.block_tables[0, 0, position // BLOCK_SIZE])
        case.pool.k(0)[block_id, position % BLOCK_SIZE] = float("nan")
        case.pool.v(0)[block_id, position % BLOCK_SIZE] = float("nan")
    torch.testing.assert_close(case.run().double(), expected, atol=1e-6, rtol=1e-5)


def test_groups_bound_padding_and_size() -> None:
    spans = dict(enumerate([4096, 128, 130, 100, 30, 128, 127, 4000, 31, 1]))
    groups = group_by_span(spans, max_tokens=600)
    assert sorted(seq for group in groups for seq in group) == list(spans)
    for group in groups:
        padded = max(spans[seq] for seq in group) * len(group)
        assert padded <= attention.GROUP_PADDING_RATIO * sum(spans[seq] for seq in group)
        assert padded <= 600 or len(group) == 1
        assert group == sorted(group)
    assert len(groups) < len(spans)


def test_equal_spans_share_a_group() -> None:
    assert group_by_span({0: 7, 3: 7, 5: 7}, max_tokens=21) == [[0, 3, 5]]
    assert group_by_span({}, max_tokens=1) == []


def test_refuses_a_mask_and_another_dtype() -> None:
    case = make_case(CAUSAL, [(0, 3)])
    q, k, v = (x.transpose(0, 1)[None] for x in (case.q, case.k, case.v))
    module = layer()
    with pytest.raises(LookupError):
        paged_attention(module, q, k, v, None)
    with attention_step(AttentionStep(case.batch, case.pool, specs={0: CAUSAL})):
        with pytest.raises(ValueError, match="layer 0 got a mask"):
            paged_attention(module, q, k, v, torch.zeros(1, 1, 3, 3))
        with pytest.raises(ValueError, match=r"torch\.float32, torch\.bfloat16 and"):
            paged_attention(module, q, k.bfloat16(), v, None)


def test_workspace_is_reused_and_survives_inference_mode() -> None:
    case = make_case(CAUSAL, BATCHES["skewed decode"])
    step = AttentionStep(case.batch, case.pool, specs={0: CAUSAL})
    slots = Slots(case.batch.slot_mapping[0], case.pool.block_size)
    fewer = Slots(case.batch.slot_mapping[0, :2], case.pool.block_size)
    with torch.inference_mode():
        first = step.workspace.gather("k", case.pool.k(0), slots)
    again = step.workspace.gather("k", case.pool.k(0), fewer)
    assert first.data_ptr() == again.data_ptr()
    assert step.workspace.num_bytes == first.nbytes


class TestReference:
    """The reference against closed forms, so that it is not its own witness."""

    def test_one_visible_key_gives_its_value(self) -> None:
        case = make_case(SPECS["a window of one"], [(9, 3)])
        torch.testing.assert_close(case.expected(), case.v.double().repeat_interleave(2, 1))

    def test_an_overwhelming_sink_takes_everything(self) -> None:
        case = make_case(SPECS["sinks"], [(4, 2)])
        case.sinks = torch.full((4,), 1e4)
        assert case.expected().abs().max() < 1e-6

    def test_a_tiny_softcap_makes_a_mean(self) -> None:
        case = make_case(replace(CAUSAL, softcap=1e-9), [(0, 5)])
        expected = case.v.double().mean(0).repeat_interleave(2, 0)
        torch.testing.assert_close(case.expected()[-1], expected)

    def test_write_skips_minus_one_and_refuses_repeats(self) -> None:
        pool = torch.zeros(3, 2, 1, 1)
        k = torch.arange(1.0, 4).view(3, 1, 1)
        reference.write_kv(k, -k, pool, values := pool.clone(), slot_mapping=torch.tensor([4, -1, 2]))
        assert pool.flatten().tolist() == [0, 0, 3, 0, 1, 0]
        assert values.flatten().tolist() == [0, 0, -3, 0, -1, 0]
        with pytest.raises(ValueError, match="one slot"):
            reference.write_kv(k, k, pool, pool, slot_mapping=torch.tensor([4, 4, 2]))
        with pytest.raises(ValueError, match=r"not in 0 \.\. 5"):
            reference.write_kv(k, k, pool, pool, slot_mapping=torch.tensor([6, -1, -1]))

    def test_copy_blocks_copies_whole_blocks(self) -> None:
        pool = torch.arange(12.0).view(4, 3)
        reference.copy_blocks(pool, sources=torch.tensor([1, 1]), targets=torch.tensor([3, 0]))
        assert pool.tolist() == [[3, 4, 5], [3, 4, 5], [6, 7, 8], [3, 4, 5]]
        with pytest.raises(ValueError, match="both source and target"):
            reference.copy_blocks(pool, sources=torch.tensor([1, 2]), targets=torch.tensor([2, 3]))
