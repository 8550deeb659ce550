"""The sampler's kernels against the definition in float64, and against the sampler of the CPU token for token."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, fields, replace

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels import reference_elementwise as reference
from quire.kernels import sampler as kernels
from quire.kernels.gumbel import UNFUSED, group_noise, row_key, token_noise
from quire.kernels.sampler import CAPACITY, CHUNK, SamplerWorkspace, argmax, sample
from quire.worker.sampling import gumbel
from quire.worker.sampling import sampler as cpu
from quire.worker.sampling.parameters import SamplingParams

SHORT = 40
LONG = CHUNK + 40  # two chunks, of which one is nearly empty


@dataclass(frozen=True, slots=True)
class Row:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    position: int = 0


DTYPES = {
    "temperature": torch.float32,
    "top_k": torch.int64,
    "top_p": torch.float64,
    "min_p": torch.float64,
    "seed": torch.int64,
    "position": torch.int64,
}


def workspace(
    vocab_size: int, device: torch.device, *, max_num_seqs: int = 16, capacity: int = CAPACITY
) -> SamplerWorkspace:
    """A workspace filled with NaN, or -1, so that reads of unwritten memory are noticed."""
    space = SamplerWorkspace.allocate(
        max_num_seqs=max_num_seqs, vocab_size=vocab_size, device=device, capacity=capacity
    )
    for field in fields(space):
        tensor = getattr(space, field.name)
        if isinstance(tensor, Tensor):
            tensor.fill_(math.nan if tensor.is_floating_point() else -1)
    return space


def draw(
    logits: Tensor,
    rows: list[Row],
    *,
    given: tuple[str, ...] = ("top_k", "top_p", "min_p"),
    space: SamplerWorkspace | None = None,
) -> list[int]:
    """The kernels' tokens; of the filters, those `given` are passed."""
    columns = {
        name: torch.tensor([getattr(row, name) for row in rows], dtype=dtype, device=logits.device)
        for name, dtype in DTYPES.items()
    }
    tokens = sample(
        logits,
        temperature=columns["temperature"],
        seeds=columns["seed"],
        positions=columns["position"],
        workspace=space or workspace(logits.shape[1], logits.device),
        **{name: columns[name] for name in given},
    )
    return [int(token) for token in tokens.tolist()]


def expected(logits: Tensor, rows: list[Row]) -> list[int]:
    return [
        reference.sample(
            logits[i].cpu(),
            temperature=row.temperature,
            top_k=row.top_k,
            top_p=row.top_p,
            min_p=row.min_p,
            seed=row.seed,
            position=row.position,
        )
        for i, row in enumerate(rows)
    ]


def random_logits(num_rows: int, vocab_size: int, device: torch.device, *, seed: int = 0, scale: float = 3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(num_rows, vocab_size, generator=generator) * scale).to(device)


def repeated(values: list[float], num_rows: int, device: torch.device) -> Tensor:
    return torch.tensor(values, device=device).repeat(num_rows, 1)


def last_kept(logits: list[float], rows: list[Row], device: torch.device, *, given: tuple[str, ...]) -> list[int]:
    """The last token that is kept in each row. The kernels keep and draw what the definition does."""
    given_logits, space = repeated(logits, len(rows), device), workspace(len(logits), device)
    assert draw(given_logits, rows, given=given, space=space) == expected(given_logits, rows)
    last = []
    for row, values, threshold in zip(rows, given_logits.cpu(), space.thresholds.cpu(), strict=False):
        kept = kept_up_to(threshold, values, row)
        assert kept == reference.kept_tokens(
            values, temperature=row.temperature, top_k=row.top_k, top_p=row.top_p, min_p=row.min_p
        )
        last.append(max(token for token in kept if values[token] > -math.inf))
    return last


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab_size", [1, SHORT, CHUNK, LONG])
def test_argmax(vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
    wide = torch.full((5, vocab_size + 16), math.nan, device=device, dtype=dtype)
    logits = wide[:, :vocab_size]
    logits.copy_(random_logits(5, vocab_size, device))
    out = torch.full((5,), -1, dtype=torch.int64, device=device)
    tokens = argmax(logits, workspace=workspace(vocab_size, device), out=out)
    assert tokens is out
    assert tokens.tolist() == [row.index(max(row)) for row in logits.tolist()]


def test_argmax_takes_the_first_of_several(device: torch.device) -> None:
    logits = torch.full((4, LONG), -5.0, device=device)
    logits[0, [3, 9]] = 1
    logits[1, [CHUNK - 1, CHUNK]] = 1
    logits[2, [CHUNK, CHUNK + 7]] = 1
    logits[3, :-1] = -math.inf
    assert argmax(logits, workspace=workspace(LONG, device)).tolist() == [3, CHUNK - 1, CHUNK, LONG - 1]


def test_a_row_without_numbers_gets_a_token_of_the_vocabulary(device: torch.device) -> None:
    for value in (math.nan, math.inf, -math.inf):
        logits = torch.full((2, LONG), value, device=device)
        tokens = argmax(logits, workspace=workspace(LONG, device)).tolist()
        tokens += draw(logits, [Row(), Row(temperature=0.7, top_k=4, top_p=0.9, min_p=0.1)])
        assert all(0 <= token < LONG for token in tokens)


def test_no_rows(device: torch.device) -> None:
    logits = torch.empty(0, SHORT, device=device)
    assert argmax(logits, workspace=workspace(SHORT, device)).shape == (0,)
    assert draw(logits, []) == []


@triton.jit
def noise_kernel(seeds_ptr, positions_ptr, tokens_ptr, by_token_ptr, by_group_ptr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    places = tl.arange(0, 4096)
    key = row_key(tl.load(seeds_ptr + row), tl.load(positions_ptr + row))
    tokens = tl.load(tokens_ptr + places)
    tl.store(by_token_ptr + row * 4096 + places, token_noise(key, tokens))
    tl.store(by_group_ptr + row * 4096 + places, group_noise(key, tokens))


SEEDS = [0, 0, 1, 2**31, 2**63 - 1, 2**63 - 1, 123456789]
POSITIONS = [0, 1, 0, 2**20, 0, 2**31 - 1, 77]


def test_noise_has_the_bits_of_the_cpu(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    seeds = torch.cat([torch.tensor(SEEDS), torch.randint(2**62, (25,), generator=generator)])
    positions = torch.cat([torch.tensor(POSITIONS), torch.randint(2**31, (25,), generator=generator)])
    tokens = torch.cat([torch.arange(3072), torch.randint(2**20, (1024,), generator=generator)])
    by_token, by_group = (torch.full((32, 4096), math.nan, device=device) for _ in range(2))
    noise_kernel[(32,)](seeds.to(device), positions.to(device), tokens.int().to(device), by_token, by_group, **UNFUSED)
    keys = gumbel.row_keys(seeds.numpy().view("uint64"), positions.numpy())[:, None]
    bits = torch.from_numpy(gumbel.token_noise(keys, tokens.numpy()[None])).view(torch.int32)
    assert torch.equal(by_token.cpu().view(torch.int32), bits)
    # The greatest of the first 48 groups, token by token.
    assert torch.equal(by_group[:, :48], by_token[:, :3072].view(32, 48, 64).amax(2))
    exact = [
        [reference.noise(seed, at, token) for token in range(200)] for seed, at in zip(SEEDS, POSITIONS, strict=True)
    ]
    torch.testing.assert_close(by_token[:7, :200].cpu().double(), torch.tensor(exact).double(), atol=2e-6, rtol=0)


@pytest.mark.parametrize("vocab_size", [1, SHORT, LONG])
def test_draws_with_given_thresholds_are_those_of_the_cpu(vocab_size: int, device: torch.device) -> None:
    logits = random_logits(9, vocab_size, device)
    columns = {
        "temperature": torch.full((9,), 1.3),
        "seeds": torch.arange(9),
        "positions": torch.arange(9) * 1000,
        "thresholds": torch.tensor([-math.inf, -6, -3, -2, -1, -0.5, -0.1, 0, -math.inf]),
    }
    for given in (columns, {**columns, "thresholds": None}):
        tokens = kernels.draw(logits, **{name: x if x is None else x.to(device) for name, x in given.items()})
        assert tokens.tolist() == gumbel.draw(logits.cpu(), **given).tolist()


MIXED = [
    Row(temperature=0),
    Row(seed=1, position=5),
    Row(temperature=1.3, top_p=0.9, seed=3),
    Row(temperature=0.9, top_k=20, top_p=0.7, seed=4, position=1),
    Row(temperature=5.0, top_k=1000, top_p=0.99, min_p=0.01, seed=2**63 - 1, position=2**20),
    Row(temperature=1.5, min_p=0.2, seed=6, position=3),
]


def test_rows_of_every_kind(device: torch.device) -> None:
    wide = torch.full((len(MIXED), LONG + 24), math.nan, device=device)
    logits = wide[:, :LONG]
    logits.copy_(random_logits(len(MIXED), LONG, device))
    logits[:, CHUNK:] += 5  # so that each chunk has about half of the weight
    space = workspace(LONG, device)
    tokens = draw(logits, MIXED, space=space)
    assert tokens == expected(logits, MIXED)
    for row, values, threshold in zip(MIXED, logits.cpu(), space.thresholds.cpu(), strict=False):
        if row.temperature:
            assert kept_up_to(threshold, values, row) == reference.kept_tokens(
                values, temperature=row.temperature, top_k=row.top_k, top_p=row.top_p, min_p=row.min_p
            )
    assert 0 < sum(token >= CHUNK for token in tokens) < len(MIXED)
    assert tokens == drawn_by_the_cpu(logits, MIXED)
    assert draw(logits[2:3], MIXED[2:3], given=("top_p",)) == tokens[2:3], "a row depends on its batch"


def kept_up_to(threshold: Tensor, logits: Tensor, row: Row) -> list[int]:
    """The tokens with a gap of at most the threshold; the greatest value, which is no number, means no filter."""
    if threshold.isnan():
        return list(range(len(logits)))
    return [int(token) for token in ((logits.max() - logits) / row.temperature <= threshold).nonzero()[:, 0]]


def drawn_by_the_cpu(logits: Tensor, rows: list[Row]) -> list[int]:
    sampler = cpu.Sampler(max_num_seqs=len(rows), vocab_size=logits.shape[1], device="cpu")
    for i, row in enumerate(rows):
        params = {field.name: getattr(row, field.name) for field in fields(Row) if field.name != "position"}
        sampler.set_params(i, SamplingParams(**params))
    tokens = sampler.sample(logits.cpu(), range(len(rows)), [row.position for row in rows]).tokens
    return [int(token) for token in tokens.tolist()]


@pytest.mark.parametrize(
    "given",
    [(), ("top_k",), ("top_p",), ("min_p",), ("top_k", "min_p"), ("top_k", "top_p"), ("top_p", "min_p")],
    ids=str,
)
def test_filters_that_no_row_has_need_not_be_given(given: tuple[str, ...], device: torch.device) -> None:
    row = Row(temperature=2.0, top_k=6, top_p=0.8, min_p=0.3, position=2)
    absent = {name: getattr(Row(), name) for name in ("top_k", "top_p", "min_p") if name not in given}
    rows = [replace(row, **absent), replace(row, **absent, position=1), Row(temperature=0)]
    logits = random_logits(1, SHORT, device).repeat(3, 1)
    assert draw(logits, rows, given=given) == expected(logits, rows)


def test_many_draws_from_one_row(device: torch.device) -> None:
    logits = random_logits(1, SHORT, device, scale=0.5).repeat(16, 1)
    rows = [Row(seed=7, position=position) for position in range(16)]
    tokens = draw(logits, rows, given=())
    assert tokens == expected(logits, rows)
    assert len(set(tokens)) > 8


def test_bfloat16_logits_with_many_ties(device: torch.device) -> None:
    logits = random_logits(2, SHORT, device, scale=1).to(torch.bfloat16)
    rows = [Row(temperature=1.5, top_k=12, top_p=0.9, position=position) for position in (1, 2)]
    assert draw(logits, rows) == expected(logits, rows)


@pytest.mark.sample
def test_top_k(device: torch.device) -> None:
    # By falling logit; 2, 3 and 4 tie.
    logits = [0.6, -0.4, -2.4, -2.4, -2.4, -5.4]
    rows = [Row(top_k=k) for k in (1, 3, 6, 7, 10**9, 0)]
    assert last_kept(logits, rows, device, given=("top_k",)) == [0, 4, 5, 5, 5, 5]


def test_top_p(device: torch.device) -> None:
    # Weights 8, 4, 2, 2, 1, exact but for the last: shares 8/17, 12/17, 14/17, 16/17, 1 of them are reached.
    logits = [math.log(weight / 8) for weight in (8, 4, 2, 2, 1)]
    shares = (1e-12, 0.47, 0.471, 0.706, 0.942, 1 - 1e-12, 1.0)
    rows = [Row(top_p=share) for share in shares]
    assert last_kept(logits, rows, device, given=("top_p",)) == [0, 0, 1, 3, 4, 4, 4]


def test_top_p_of_equal_tokens_keeps_all(device: torch.device) -> None:
    assert last_kept([1.0] * 4, [Row(top_p=0.25)], device, given=("top_p",)) == [3]


def test_top_p_counts_no_more_than_k_of_the_ties(device: torch.device) -> None:
    # Of the two tokens that top_k counts the first has 0.73, enough for 0.7; of all four that tie, 0.48.
    rows = [Row(top_k=2, top_p=0.7), Row(top_k=2, top_p=0.75), Row(top_p=0.45), Row(top_k=2)]
    assert last_kept([1.0, 0.0, 0.0, 0.0, -5.0], rows, device, given=("top_k", "top_p")) == [0, 3, 0, 3]


def test_min_p(device: torch.device) -> None:
    logits = [math.log(weight) for weight in (1.0, 0.5, 0.26, 0.24)]
    rows = [Row(min_p=p) for p in (1.0, 0.51, 0.49, 0.25, 0.23, 0.0)]
    assert last_kept(logits, rows, device, given=("min_p",)) == [0, 0, 1, 2, 3, 3]


def test_top_p_does_not_see_min_p(device: torch.device) -> None:
    # 0 and 1 are 12/17 of all. Of what min-p keeps, which is these two, 0 alone is 2/3.
    logits = [math.log(weight / 8) for weight in (8, 4, 2, 2, 1)]
    rows = [Row(top_p=0.6, min_p=0.3), Row(top_p=0.9, min_p=0.3), Row(top_p=0.4, min_p=0.3)]
    assert last_kept(logits, rows, device, given=("top_p", "min_p")) == [1, 1, 0]


def test_what_is_filtered_out_counts_for_nothing(device: torch.device) -> None:
    # The two unlikely tokens come first.
    rows = [Row(top_k=2, position=position) for position in range(8)]
    logits = repeated([0.0, 0.1, 1.0, 1.5], len(rows), device)
    tokens = draw(logits, rows, given=("top_k",))
    assert tokens == expected(logits, rows)
    assert set(tokens) == {2, 3}


def test_tokens_without_probability_are_never_drawn(device: torch.device) -> None:
    logits = [-math.inf, 0.0, -math.inf, 1.0, -math.inf]
    rows = [Row(), Row(top_k=4), Row(top_p=0.999), Row(min_p=1e-6)]
    assert last_kept(logits, rows, device, given=("top_k", "top_p", "min_p")) == [3, 3, 3, 3]
    many = [Row(position=position) for position in range(16)]
    assert set(draw(repeated(logits, 16, device), many)) == {1, 3}


def test_extreme_temperatures(device: torch.device) -> None:
    logits = random_logits(2, SHORT, device)
    rows = [Row(temperature=1e-4, top_k=10, position=2), Row(temperature=1e6, top_k=10, position=2)]
    tokens = draw(logits, rows)
    assert tokens == expected(logits, rows)
    assert tokens[0] == logits[0].argmax()


def unusual_logits(kind: str, num_rows: int, vocab_size: int, device: torch.device) -> Tensor:
    logits = random_logits(num_rows, vocab_size, device)
    match kind:
        case "one far above the others":
            logits[:, vocab_size // 3] += 25
        case "nearly equal":
            logits *= 0.003
        case "equal":
            logits[:] = 2.5
        case "enormous":
            logits *= 1000
        case "one huge":
            logits[:] = -50
            logits[:, vocab_size // 2] = 80
        case "mostly masked":
            logits[:, torch.arange(vocab_size, device=device) % 10 > 0] = -math.inf
        case "all masked but one":
            logits[:, :-1] = -math.inf
        case "ties":
            logits = (logits / 2).round()
        case "bfloat16":
            logits = logits.to(torch.bfloat16)
    return logits


UNUSUAL = [
    "one far above the others",
    "nearly equal",
    "equal",
    "enormous",
    "one huge",
    "mostly masked",
    "all masked but one",
    "ties",
    "bfloat16",
]


def random_rows(num_rows: int, seed: int) -> list[Row]:
    choose = random.Random(seed)
    return [
        Row(
            temperature=choose.choice([0.0, 1e-4, 0.1, 0.7, 1.0, 2.0, 50.0]),
            top_k=choose.choice([0, 0, 1, 2, 20, 50, 1000, 10**9]),
            top_p=choose.choice([1.0, 1.0, 1e-9, 0.3, 0.8, 0.95, 0.999, 1 - 1e-9]),
            min_p=choose.choice([0.0, 0.0, 0.0, 1e-30, 1e-12, 0.01, 0.2, 1.0]),
            seed=choose.randrange(2**63),
            position=choose.randrange(2**20),
        )
        for _ in range(num_rows)
    ]


@pytest.mark.parametrize("capacity", [CAPACITY, 64], ids="capacity-{}".format)
@pytest.mark.parametrize("kind", UNUSUAL)
def test_draws_are_those_of_the_cpu_for_any_parameters(kind: str, capacity: int, device: torch.device) -> None:
    rows = random_rows(6, UNUSUAL.index(kind))
    logits = unusual_logits(kind, len(rows), LONG, device)
    space = workspace(LONG, device, capacity=capacity)
    assert draw(logits, rows, space=space) == drawn_by_the_cpu(logits.float(), rows)
    assert 0 <= space.num_candidates[: len(rows)].clamp(min=0).max() <= capacity


@pytest.mark.parametrize("vocab_size", [50, 151_936])
def test_draws_are_those_of_the_cpu_for_any_vocabulary(vocab_size: int, device: torch.device) -> None:
    rows = [Row(temperature=0.8, top_k=50, top_p=0.9, seed=5, position=9), Row(temperature=1.2, top_p=0.9, seed=6)]
    logits = random_logits(len(rows), vocab_size, device).to(torch.bfloat16)
    space = workspace(vocab_size, device)
    assert draw(logits, rows, space=space) == drawn_by_the_cpu(logits.float(), rows)
    assert 0 < space.num_candidates[0] < 500


@pytest.mark.sample
def test_candidates_that_do_not_fit_are_searched_among_all_tokens(device: torch.device) -> None:
    rows = [Row(top_k=40, top_p=0.9, position=2), Row(top_p=0.99, seed=2), Row(min_p=1e-4, seed=3)]
    logits = random_logits(len(rows), LONG, device, scale=0.1)
    space = workspace(LONG, device, capacity=16)
    assert draw(logits, rows, space=space) == expected(logits, rows)
    assert space.num_candidates[: len(rows)].tolist() == [0, 0, 0]


def test_a_list_whose_end_ties_with_the_rest_is_not_believed(device: torch.device) -> None:
    # The logits of tokens 1 to 10 lie in another cell than those behind them, and all their gaps round to 1.
    logits = torch.full((1, SHORT), -0.001, device=device)
    logits[0, 1:11] = 0.001
    logits[0, 0] = 2.0**26
    rows = [Row(temperature=2.0**26, top_k=5, position=2)]
    space = workspace(SHORT, device)
    assert draw(logits, rows, space=space) == expected(logits, rows) == drawn_by_the_cpu(logits, rows)
    assert kept_up_to(space.thresholds[0], logits[0], rows[0]) == list(range(SHORT))
    assert space.num_candidates[0] == 11


def test_tokens_do_not_depend_on_the_dtype_of_the_logits(device: torch.device) -> None:
    logits = random_logits(len(MIXED), LONG, device).to(torch.bfloat16)
    assert draw(logits, MIXED) == draw(logits.float(), MIXED)


def test_refusals(device: torch.device) -> None:
    logits = random_logits(2, SHORT, device)
    space = workspace(SHORT, device, max_num_seqs=2)
    column = torch.ones(2, device=device)
    seeds = torch.zeros(2, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match=r"logits has shape \[2, 39\], not \[any, 40\]"):
        argmax(logits[:, 1:], workspace=space)
    with pytest.raises(ValueError, match=r"logits is torch.float64"):
        argmax(logits.double(), workspace=space)
    with pytest.raises(ValueError, match="logits has stride 2 in its last dimension"):
        argmax(logits.T.contiguous().T, workspace=space)
    with pytest.raises(ValueError, match="logits has 4 rows, the workspace is for 2"):
        argmax(logits.repeat(2, 1), workspace=space)
    with pytest.raises(ValueError, match=r"out is torch.int32, not torch.int64"):
        argmax(logits, workspace=space, out=seeds.int())
    with pytest.raises(ValueError, match=r"seeds has shape \[1\], not \[2\]"):
        sample(logits, temperature=column, seeds=seeds[:1], positions=seeds, workspace=space)
    with pytest.raises(ValueError, match=r"temperature is torch.float64, not torch.float32"):
        sample(logits, temperature=column.double(), seeds=seeds, positions=seeds, workspace=space)
    with pytest.raises(ValueError, match=r"top_p is torch.float32, not torch.float64"):
        sample(logits, temperature=column, seeds=seeds, positions=seeds, workspace=space, top_p=column)
    with pytest.raises(ValueError, match="top_k has strides"):
        sample(logits, temperature=column, seeds=seeds, positions=seeds, workspace=space, top_k=seeds.repeat(2)[::2])
    for sizes in ({"max_num_seqs": 0, "vocab_size": 1}, {"max_num_seqs": 1, "vocab_size": 0}):
        with pytest.raises(ValueError, match="=0 is below 1"):
            SamplerWorkspace.allocate(**sizes, device=device)
