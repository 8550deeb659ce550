"""ptxas's code of every kernel for sm_90, without a GPU: registers, spills, copies in flight, matrix instructions.

The variants of a few models are compiled here each time, with QUIRE_MACHINE_CODE=all the whole matrix of features
(minutes). gpu_desk/test_five_architectures.py compiles head dims and dtypes for other GPUs too.
Such a bug is silent otherwise: the results stay right, and the kernel reads at half the speed.
"""

import itertools
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from compiled_attention import LONG, META, SHORT, compile_decode, instructions_per_cycle
from kernel_batch import LAYOUTS, Batch, Shape
from machine_code import A100, B200, GPU, GPUS, H100, Launch, Loop, MachineCode, compile_launch, loads_before, recorded
from samples import others_at_night

from quire.kernels.fixed_linear import fixed_linear
from quire.kernels.gumbel import UNFUSED, group_noise, row_key, token_noise
from quire.kernels.merge_states import PARTS_AT_ONCE

FP8 = torch.float8_e4m3fn
ALL = os.environ.get("QUIRE_MACHINE_CODE") == "all"

LLAMA_8B = Shape(32, 8, 128)
LLAMA_1B = Shape(32, 8, 64, hidden=2048, intermediate=8192)
QWEN3_06B = Shape(16, 8, 128, has_qk_norm=True, hidden=1024, intermediate=3072, vocab_size=151936)
QWEN2_7B = Shape(28, 4, 128)
GEMMA2 = Shape(8, 4, 256, window=4096, softcap=50.0, hidden=2304, intermediate=9216, vocab_size=256000)
GPT_OSS = Shape(64, 8, 64, window=128, has_sinks=True)
MHA = Shape(32, 32, 128)

CORE = {
    "llama-8b": LLAMA_8B,
    "llama-8b-fp8-kv": replace(LLAMA_8B, kv_dtype=FP8),
    "llama-8b-block-64": replace(LLAMA_8B, block_size=64),
    "llama-1b": LLAMA_1B,
    "qwen3-0.6b": QWEN3_06B,
    "qwen2-7b": QWEN2_7B,
    "gemma2": GEMMA2,
    "gpt-oss": GPT_OSS,
    "mha-alibi": replace(MHA, has_alibi=True),
}


def matrix() -> Iterator[tuple[str, Shape]]:
    """Every head dim, dtype, block size, group and feature, one or two at a time beside Llama's."""
    for dim, (kv_name, kv_dtype) in itertools.product((32, 64, 80, 96, 128, 192, 256), (("bf16", None), ("fp8", FP8))):
        yield f"d{dim}-{kv_name}", Shape(32, 8, dim, kv_dtype=kv_dtype)
    for dtype, dim in itertools.product((torch.float16, torch.float32), (64, 128, 256)):
        yield f"d{dim}-{str(dtype)[6:]}", Shape(32, 8, dim, dtype=dtype)
    for block_size, layout in itertools.product((16, 32, 64, 128), LAYOUTS):
        yield f"block-{block_size}-{layout.replace(' ', '-')}", replace(LLAMA_8B, block_size=block_size, layout=layout)
    for group in (1, 2, 7, 8, 16):
        yield f"group-{group}", Shape(4 * group, 4, 128)
    features: dict[str, dict[str, object]] = {
        "window": {"window": 4096},
        "chunk": {"chunk": 8192},
        "softcap": {"softcap": 30.0},
        "sinks": {"has_sinks": True},
        "alibi": {"has_alibi": True},
        "window-softcap-sinks": {"window": 4096, "softcap": 30.0, "has_sinks": True},
    }
    for (name, feature), dim, (kv_name, kv_dtype) in itertools.product(
        features.items(), (64, 128, 256), (("bf16", None), ("fp8", FP8))
    ):
        yield f"{name}-d{dim}-{kv_name}", Shape(32, 8, dim, kv_dtype=kv_dtype, **feature)  # type: ignore[arg-type]


SHAPES = CORE | dict(matrix()) if ALL else CORE
MODELS = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())


def compiled(work: Callable[[], object], kernel: str) -> tuple[Launch, MachineCode]:
    """The one kernel of that name which `work` launches. It has no spill and fits into shared memory."""
    (launch,) = {launch.key: launch for launch in recorded(work) if launch.name == kernel}.values()
    code = compile_launch(launch)
    print(kernel, code.summary())
    assert code.spills == 0, code.summary()
    assert code.shared_bytes <= H100.limits.shared_memory_bytes
    return launch, code


def check_copies(code: MachineCode, *, tile_keys: int, shape: Shape) -> None:
    """Two tiles of keys and of values are in flight while a third is worked on, in copies of 16 bytes."""
    kv_dtype = shape.kv_dtype or shape.dtype
    assert code.copy_loops, "no loop copies keys asynchronously"
    for loop in code.copy_loops:
        assert loop.copies_outstanding, f"a loop waits for all of its copies: {code.summary()}"
    assert code.shared_bytes >= 2 * 2 * tile_keys * shape.head_dim * kv_dtype.itemsize
    if kv_dtype.itemsize > 1:
        assert code.count(r"LDGSTS") == code.count(r"LDGSTS.*\.128"), "copies narrower than 16 bytes"


def decode_batch(shape: Shape, *, q_len: int = 1, num_seqs: int = 8) -> Batch:
    return Batch(shape, (q_len,) * num_seqs, (1000,) * num_seqs, META)


@MODELS
@pytest.mark.parametrize("q_len", [1, 4] if ALL else [1], ids="q{}".format)
def test_decode_keeps_copies_in_flight(shape: Shape, q_len: int) -> None:
    batch = decode_batch(shape, q_len=q_len)
    launch, code = compiled(lambda: batch.decode(batch.plan()), "paged_decode_kernel")
    check_copies(code, tile_keys=launch.constant("BLOCK_N"), shape=shape)
    if shape.dtype != torch.float32:
        assert all(loop.count("HMMA|HGMMA") for loop in code.copy_loops)


@MODELS
def test_all_programs_of_a_decode_fit_the_gpu_at_once(shape: Shape) -> None:
    batch = decode_batch(shape)
    plans = []

    def work() -> None:
        plans.append(batch.plan())
        batch.decode(plans[0])

    _, code = compiled(work, "paged_decode_kernel")
    programs = plans[0].num_programs * shape.num_kv_heads
    assert programs <= H100.limits.num_multiprocessors * code.programs_per_multiprocessor, code.summary()


@pytest.mark.parametrize("shape", [LLAMA_8B, LLAMA_1B, replace(LLAMA_1B, block_size=128), GPT_OSS])
def test_decode_of_a_16_bit_cache_is_limited_by_memory_alone(shape: Shape) -> None:
    """Below 0.35 instructions a cycle and scheduler at full bandwidth: 0.46 with tiles of 64 keys of 64 dims."""
    launch, code = compile_decode(shape, H100)
    share = instructions_per_cycle(launch, code, shape)
    print(f"{share:.2f} instructions a cycle and scheduler")
    assert share < 0.35
    assert code.spills == 0, code.summary()


def test_decode_attention_is_one_launch() -> None:
    batch = decode_batch(LLAMA_8B)
    names = [launch.name for launch in recorded(lambda: [batch.decode(plan) for plan in [batch.plan()] * 2])]
    assert names == ["decode_plan_kernel", "paged_decode_kernel", "paged_decode_kernel"]


@pytest.mark.parametrize("name", ["llama-8b", "llama-8b-block-64", "llama-1b", "gemma2"])
def test_two_loads_wait_for_each_other_before_the_first_keys_of_a_decode(name: str) -> None:
    """A program's record, then the block table: about 0.6 us each."""
    _, code = compile_decode(SHAPES[name], H100)
    assert loads_before(code.instructions, "LDGSTS") == 2


@pytest.mark.parametrize("gpu", [A100, H100, B200], ids=lambda gpu: gpu.arch)
def test_a_ticket_is_taken_after_all_stores_and_before_all_loads_of_partial_results(gpu: GPU) -> None:
    """By one thread, between barriers of all; what others have stored is not read from the level 1 cache."""
    _, code = compile_decode(LLAMA_8B, gpu)
    opcodes = [each.opcode for each in code.instructions]
    (taken,) = [index for index, opcode in enumerate(opcodes) if opcode.startswith("ATOMG.E.ADD.STRONG.GPU")]

    def nearest(pattern: str, indexes: range) -> int:
        return next(index for index in indexes if re.match(pattern, opcodes[index]))

    before, after = range(taken, -1, -1), range(taken, len(opcodes))
    fence = nearest("MEMBAR", before)
    assert nearest("STG", before) < nearest("BAR.SYNC", before) < fence < taken
    assert taken < nearest("CCTL.IVALL", after) < nearest("BAR.SYNC", after) < nearest("LDG", after)
    rows = [index for index in after if re.match(r"LDG\..*128", opcodes[index])]
    assert rows[PARTS_AT_ONCE - 2] < nearest("FFMA", range(rows[0], len(opcodes))), "parts are loaded one by one"


@pytest.mark.parametrize("head_dim", [64, 120, 128, 256])
def test_decode_of_an_fp8_cache_leaves_time_for_waiting(head_dim: int) -> None:
    """Below 0.7 instructions a cycle and scheduler at full bandwidth: 1.1 with keys as bfloat16, more than there is."""
    shape = Shape(32, 8, head_dim, kv_dtype=FP8)
    launch, code = compile_decode(shape, H100)
    share = instructions_per_cycle(launch, code, shape)
    print(f"{share:.2f} instructions a cycle and scheduler")
    assert share < 0.7
    assert code.count(r"LDS\.U8") == 0, "values are read byte by byte"


PROMPTS = (
    [(name, count) for name in SHAPES for count in (LONG, SHORT)]
    if ALL
    else [(name, LONG) for name in ("llama-8b", "llama-8b-fp8-kv", "llama-1b", "gemma2")]
    + [(name, SHORT) for name in ("mha-alibi", "gemma2")]
)


@pytest.mark.parametrize(("name", "num_tokens"), PROMPTS)
def test_prefill_uses_warpgroup_matrix_instructions(name: str, num_tokens: int) -> None:
    shape = SHAPES[name]
    batch = Batch(shape, (num_tokens,), (num_tokens,), META)
    launch, code = compiled(batch.prefill, "paged_prefill_kernel")
    check_copies(code, tile_keys=launch.constant("BLOCK_N"), shape=shape)
    if shape.dtype != torch.float32:
        assert code.count("HGMMA") > 0
        assert code.count("HMMA") == 0


@pytest.mark.parametrize("head_dim", [64, 128])
def test_prefill_of_an_fp8_cache_widens_numbers_in_pairs(head_dim: int) -> None:
    """To bfloat16 it took 64 conversions more in a tile of 128 dims (F2F), on the unit of the 34 exponentials."""
    batch = Batch(Shape(32, 8, head_dim, kv_dtype=FP8), (LONG,), (LONG,), META)
    _, code = compiled(batch.prefill, "paged_prefill_kernel")
    assert len(code.copy_loops) == 2
    for loop in code.copy_loops:
        assert loop.count(r"F2F\b") == 0
        assert loop.count(r"F2FP.*E4M3") == head_dim // 4


@pytest.mark.parametrize("name", ["llama-8b", "llama-8b-block-64", "llama-1b"])
def test_products_begun_a_tile_ahead_run_while_weights_are_computed(name: str) -> None:
    """Not timed, so not the default. Not over fp8: there queries are operands in registers, which a product holds."""
    batch = Batch(SHAPES[name], (LONG,), (LONG,), META)
    launch, code = compiled(lambda: batch.prefill(qk_ahead=True), "paged_prefill_kernel")
    check_copies(code, tile_keys=launch.constant("BLOCK_N"), shape=batch.shape)
    check_overlap(code.copy_loops[0])


def check_overlap(loop: Loop, *, num_exponentials: int = 32) -> None:
    """So many exponentials at least stand between products that are begun and the wait for them."""
    opcodes = [each.opcode for each in loop.instructions]
    products = [index for index, opcode in enumerate(opcodes) if opcode.startswith("HGMMA")]
    waits = [index for index, opcode in enumerate(opcodes) if opcode.startswith("WARPGROUP.DEPBAR")]
    first_wait = next(index for index in waits if index > products[0])
    assert sum(opcode.startswith("MUFU") for opcode in opcodes[products[0] : first_wait]) >= num_exponentials


DESCRIBED = {
    "llama-8b": replace(LLAMA_8B, block_size=64),
    "llama-8b-block-128": replace(LLAMA_8B, block_size=128, layout="heads first"),
    "llama-8b-fp8-kv": replace(LLAMA_8B, block_size=64, kv_dtype=FP8),
    "llama-1b": replace(LLAMA_1B, block_size=64),
    "gemma2": replace(GEMMA2, block_size=64),
}


@pytest.mark.parametrize(
    ("name", "qk_ahead"), [*((name, False) for name in DESCRIBED), ("llama-8b", True), ("llama-1b", True)]
)
def test_descriptors_copy_the_tiles_of_prompts_that_have_no_mask(name: str, qk_ahead: bool) -> None:
    """Two copies (UTMALDG) an iteration, and two tiles of keys and of values on their way in front of the loop."""
    batch = Batch(DESCRIBED[name], (LONG,), (LONG,), META)
    _, code = compiled(lambda: batch.prefill(descriptors=True, qk_ahead=qk_ahead), "paged_prefill_kernel")
    (loop,) = [each for each in code.loops if each.count("UTMALDG")]
    assert loop.count("UTMALDG") == 2
    assert code.count("UTMALDG") == 3 * 2
    assert loop.count("LDGSTS") == 0
    assert loop.count("HGMMA") > 0
    if qk_ahead:
        check_overlap(loop, num_exponentials=24)


SMALL: dict[str, Callable[[Batch], object]] = {
    "decode_plan": Batch.plan,
    "merge_states": Batch.merge,
    "write_kv": Batch.write,
    "qkv_prologue": Batch.prologue,
    "add_rmsnorm": Batch.norm,
    "silu_mul": Batch.activation,
    "sampler": Batch.sample,
    "draw": Batch.draw,
    "block_copy": lambda batch: batch.copy([1], [2]),
    "offload": lambda batch: batch.offload([1, 2, 3, 4]),
}
BULK = {
    "write_kv_kernel",
    "qkv_prologue_kernel",
    "add_rmsnorm_kernel",
    "silu_mul_kernel",
    "block_copy_kernel",
    "offload_kernel",
}
"""Move whole rows: in pieces of 16 bytes."""


@pytest.mark.parametrize("name", SMALL)
def test_small_kernels_do_not_spill(name: str) -> None:
    shapes = SHAPES.values() if ALL else (QWEN3_06B, replace(QWEN3_06B, kv_dtype=FP8))
    launches = {}
    for shape in shapes:
        batch = decode_batch(replace(shape, num_layers=4, layout="heads first"))
        launches |= {launch.key: launch for launch in recorded(lambda batch=batch: SMALL[name](batch))}
    launches = {key: launch for key, launch in launches.items() if launch.name != "paged_decode_kernel"}
    assert launches
    for launch in launches.values():
        code = compile_launch(launch)
        print(launch.name, code.summary())
        assert code.spills == 0, f"{launch.name}: {code.summary()}"
        if launch.name in BULK:
            assert code.count(r"LDG\..*\.128") > 0, f"{launch.name} loads less than 16 bytes at a time"


def test_the_sampler_launches_few_kernels_and_reads_all_logits_in_two_of_them() -> None:
    batch = decode_batch(QWEN3_06B)
    drawn, greedy = (
        ["survey_kernel", "bracket_kernel", "collect_kernel", "choose_kernel"],
        ["survey_kernel", "pick_kernel"],
    )
    assert [launch.name for launch in recorded(batch.sample)] == drawn + greedy
    assert [launch.name for launch in recorded(batch.draw)] == ["survey_kernel", "draw_kernel"]
    assert batch.logits.dtype == QWEN3_06B.dtype, "the logits are converted first"


@triton.jit
def noise_kernel(seeds_ptr, positions_ptr, tokens_ptr, noise_ptr):  # type: ignore[no-untyped-def]
    places = tl.arange(0, 1024)
    key = row_key(tl.load(seeds_ptr), tl.load(positions_ptr))
    tokens = tl.load(tokens_ptr + places)
    tl.store(noise_ptr + places, token_noise(key, tokens) + group_noise(key, tokens))


@pytest.mark.parametrize("gpu", [A100, H100, B200], ids=lambda gpu: gpu.arch)
def test_noise_is_computed_without_fused_operations(gpu: GPU) -> None:
    """Each product is rounded before it is added, as on a CPU. A division is rounded once, whatever it is made of."""
    column, numbers = torch.zeros(1, dtype=torch.int64, device=META), torch.zeros(1024, device=META)

    def noise(**options: bool) -> MachineCode:
        arguments = (column, column, numbers.int(), numbers)
        (launch,) = recorded(lambda: noise_kernel[(1,)](*arguments, **options), gpu)
        return compile_launch(launch)

    fused, multiplied = r"[FD]FMA", r"FMUL"
    assert noise(**UNFUSED).count(fused) == 0
    assert noise(**UNFUSED).count(multiplied) > 0
    assert noise().count(fused) > 0, "the test notices nothing"
    batch = decode_batch(QWEN3_06B)
    codes = {
        launch.name: compile_launch(launch)
        for work in (batch.sample, batch.draw, lambda: batch.draw(filtered=False))
        for launch in recorded(work, gpu)
    }
    for name in ("choose_kernel", "draw_kernel"):
        assert "fma.rn.f32" not in codes[name].ptx, f"{name} fuses"
        assert "mul.rn.f32" in codes[name].ptx


@pytest.mark.parametrize("gpu", [A100, H100, B200], ids=lambda gpu: gpu.arch)
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_products_in_fixed_tiles_keep_copies_in_flight(gated: bool, gpu: GPU) -> None:
    weight = torch.empty(28672, 4096, dtype=torch.bfloat16, device=META)
    launches = {
        launch.key: launch
        for count in (1, 7, 64, 1000)
        for launch in recorded(lambda n=count: fixed_linear(weight[:n], weight, gated=gated), gpu)
    }
    (launch,) = launches.values()  # one code, whatever the number of rows
    code = compile_launch(launch)
    assert code.spills == 0, code.summary()
    assert code.count("LDGSTS") == code.count(r"LDGSTS.*\.128") > 0
    assert code.count("HMMA|HGMMA|UTC.*MMA") > 0


@pytest.mark.parametrize("gpu", others_at_night(GPUS, [H100]), ids=lambda gpu: gpu.arch)
def test_updates_of_adapters_are_two_codes_for_any_number_of_rows(gpu: GPU) -> None:
    """One of few rows and one of many, of each kernel; A is copied asynchronously, by 16 bytes."""
    launches = {
        launch.key: launch
        for count in (1, 7, 128, 129, 5000)
        for launch in recorded(Batch(LLAMA_8B, (count,), (count,), META).update, gpu)
    }
    assert (
        sorted(launch.name for launch in launches.values()) == ["lora_expand_kernel"] * 2 + ["lora_shrink_kernel"] * 2
    )
    for launch in launches.values():
        code = compile_launch(launch)
        print(launch.name, code.summary())
        assert code.spills == 0, code.summary()
        assert code.shared_bytes <= gpu.limits.shared_memory_bytes
        assert code.count("HMMA|HGMMA|UTC.*MMA") > 0
        if launch.name == "lora_shrink_kernel":
            assert code.count("LDGSTS") == code.count(r"LDGSTS.*\.128") > 0, code.summary()


@pytest.mark.parametrize("gpu", [A100, H100, B200], ids=lambda gpu: gpu.arch)
def test_prefill_in_fixed_tiles_is_one_code_for_decodes_and_prompts(gpu: GPU) -> None:
    batches = (decode_batch(LLAMA_8B), Batch(LLAMA_8B, (1,), (5000,), META), Batch(LLAMA_8B, (900, 1), (900, 70), META))
    launches = {
        launch.key: launch
        for batch in batches
        for launch in recorded(lambda each=batch: each.prefill(fixed_tile=True), gpu)
    }
    (launch,) = launches.values()
    code = compile_launch(launch)
    assert code.spills == 0, code.summary()
    assert len(code.copy_loops) == 1


def step_keys(
    shape: Shape, *, query_lens: tuple[int, ...], seq_lens: tuple[int, ...], max_blocks: int, shifted: bool = False
) -> set[str]:
    batch = Batch(shape, query_lens, seq_lens, META, max_blocks=max_blocks, shifted=shifted)
    return {launch.key for launch in recorded(batch.serve)}


@pytest.mark.parametrize("shape", [LLAMA_8B, QWEN3_06B, GEMMA2], ids=["llama-8b", "qwen3-0.6b", "gemma2"])
def test_nothing_compiles_after_warm_up(shape: Shape) -> None:
    """Batches, lengths, prompts and widths of block tables that a service meets, after few warm-up steps."""
    shape = replace(shape, num_layers=1, vocab_size=4096)
    warm = step_keys(shape, query_lens=(1,), seq_lens=(1,), max_blocks=1)
    warm |= step_keys(shape, query_lens=(1,) * 256, seq_lens=(1,) * 256, max_blocks=1)
    for count, num_splits in itertools.product((2, 512, 4096), (1, 2)):
        prompt = Batch(shape, (count,), (count,), META)
        warm |= {launch.key for launch in recorded(lambda b=prompt, n=num_splits: (b.serve(), b.prefill(num_splits=n)))}
    assert len(warm) <= 40
    generator = torch.Generator().manual_seed(0)

    def draw(low: int, high: int, count: int = 1) -> list[int]:
        return torch.randint(low, high, (count,), generator=generator).tolist()

    for step in range(20):
        (num_seqs,), (width,) = draw(1, 300), draw(64, 5000)
        seq_lens = tuple(draw(1, 1000, num_seqs))
        new = (
            step_keys(shape, query_lens=(1,) * num_seqs, seq_lens=seq_lens, max_blocks=width, shifted=step % 2 == 1)
            - warm
        )
        assert not new, f"{num_seqs} sequences, tables of {width} blocks compile anew: {sorted(new)}"
        counts = tuple(draw(2, 700, 1 + num_seqs % 7))
        lens = tuple(count + prefix for count, prefix in zip(counts, draw(0, 500, len(counts)), strict=True))
        new = step_keys(shape, query_lens=counts, seq_lens=lens, max_blocks=width, shifted=step % 2 == 1) - warm
        assert not new, f"prompts of {counts} tokens, tables of {width} blocks compile anew: {sorted(new)}"
