"""Scales of keys and values in a pool in float8, for each layer and head: the pool holds x / scale.

They are those of the checkpoint, one for each layer, or are found at start from the keys and values of random prompts.
e4m3 has the same relative precision from 2 ** -6 to 448, so a scale has to keep numbers within this range and no more:
calibrated ones are powers of two, with which nothing is rounded twice, and leave room for larger numbers than those of
the prompts.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping

import torch
from torch import Tensor

from quire.worker.memory.layer_spec import LayerSpec
from quire.worker.model.paged_model import PagedModel
from quire.worker.model.scratch import ScratchSequences
from quire.worker.model.self_check import LARGEST_TOLERANCE
from quire.worker.model.sharding import ONE_PART, ModelRanks
from quire.worker.quantization.kv_cache import KINDS
from quire.worker.unsupported_model import UnsupportedModel

log = logging.getLogger(__name__)

KV_FLOAT8 = torch.float8_e4m3fn
LARGEST = torch.finfo(KV_FLOAT8).max
NUM_PROMPTS = 4
PROMPT_TOKENS = 128
NUM_ALONE = 8
HEADROOM = 4
"""The largest number of the prompts may be exceeded so many times before numbers are cut off."""


def set_kv_scales(model: PagedModel, *, ranks: ModelRanks = ONE_PART) -> None:
    """Give a model the scales of its pools in float8, and make them a part of its fingerprint.

    Logs their source, and the error of logits over such a pool. Raises UnsupportedModel for scales of the checkpoint
    that can't be right. Cost: some forwards of a few hundred tokens.
    """
    scales = read_kv_scales(model)
    if scales is None:
        scales = calibrate_kv_scales(model)
        log.info(
            "float8 keys and values: a scale for each head and layer, calibrated on %d random prompts", NUM_PROMPTS
        )
    else:
        log.info("float8 keys and values: a scale for each layer, from the checkpoint")
    model.kv_scales = scales
    model.fingerprint += f":kv-{ranks.combined(_digest(scales))}"
    error = measure_kv_error(model)
    level = logging.INFO if error <= LARGEST_TOLERANCE else logging.WARNING
    log.log(level, "float8 keys and values move logits of random prompts by %.1e of their size (the median)", error)


def read_kv_scales(model: PagedModel) -> Mapping[int, Tensor] | None:
    """Return the checkpoint's scales, [2, H] float32 by layer; None if it has none."""
    found = model.checkpoint_kv_scales()
    if not found:
        return None
    scales = {}
    for layer_idx, spec in model.attention_specs.items():
        kinds = KINDS[:1] * 2 if spec.values_in_keys else KINDS
        scales[layer_idx] = torch.stack([_of_heads(model, found.get((layer_idx, kind)), spec, kind) for kind in kinds])
    return scales


def _of_heads(model: PagedModel, scale: Tensor | None, spec: LayerSpec, kind: str) -> Tensor:
    name = f"its {kind} of layer {spec.layer_idx}"
    if scale is None:
        raise UnsupportedModel(model.architecture, f"{name} is not there, and other layers have one")
    if scale.numel() != 1:
        raise UnsupportedModel(model.architecture, f"{name} has the shape {tuple(scale.shape)} and not (1,)")
    value = float(scale)
    if not 0 < value < float("inf"):
        raise UnsupportedModel(model.architecture, f"{name} is {value}, not a finite number above 0")
    return torch.full((spec.num_kv_heads,), value, dtype=torch.float32, device=model.device)


def calibrate_kv_scales(model: PagedModel) -> Mapping[int, Tensor]:
    """Return scales for the keys and values that the model makes of random prompts, [2, H] float32 by layer."""
    scratch = ScratchSequences.make(model, NUM_PROMPTS, length=PROMPT_TOKENS)
    rows = list(range(NUM_PROMPTS))
    scratch.run(rows, [0] * NUM_PROMPTS, [len(tokens) for tokens in scratch.tokens])
    pool, scales = scratch.pool, {}
    for layer_idx in model.attention_specs:
        blocks = torch.tensor(scratch.block_ids[pool.group_of(layer_idx)], device=model.device)
        largest = [
            each.index_select(0, blocks).float().abs().amax((0, 1, 3))
            for each in (pool.k(layer_idx), pool.v(layer_idx))
        ]
        if model.attention_specs[layer_idx].values_in_keys:
            largest[1] = largest[0]
        scales[layer_idx] = _power_of_two(torch.stack(largest) * (HEADROOM / LARGEST))
    return scales


def measure_kv_error(model: PagedModel, kv_dtype: torch.dtype = KV_FLOAT8) -> float:
    """Return the median difference that a pool of another dtype makes to logits of random prompts, of their largest.

    A prompt runs at once but for its last tokens, which run one by one: NUM_ALONE.
    """
    expected, found = (_logits(model, dtype) for dtype in (model.dtype, kv_dtype))
    errors = (found - expected).abs().amax(1) / expected.abs().amax(1).clamp_min(1e-6)
    return float(errors.median())


def _logits(model: PagedModel, kv_dtype: torch.dtype) -> Tensor:
    """[NUM_PROMPTS * (1 + NUM_ALONE), vocab_size] float32."""
    scratch = ScratchSequences.make(model, NUM_PROMPTS, length=PROMPT_TOKENS, kv_dtype=kv_dtype)
    rows, length = list(range(NUM_PROMPTS)), len(scratch.tokens[0])
    num_alone = min(NUM_ALONE, length - 1)
    starts = [0, *range(length - num_alone, length)]
    counts = [length - num_alone, *[1] * num_alone]
    steps = zip(starts, counts, strict=True)
    return torch.cat([scratch.run(rows, [start] * len(rows), [count] * len(rows)) for start, count in steps])


def _power_of_two(x: Tensor) -> Tensor:
    """The least powers of two that are not below x; 1 where x is 0 or no finite number."""
    powers = torch.exp2(torch.ceil(torch.log2(x)).clamp(-64, 64))
    return torch.where((x > 0) & torch.isfinite(x), powers, 1.0)


def _digest(scales: Mapping[int, Tensor]) -> str:
    text = "\n".join(f"{layer_idx} {scales[layer_idx].tolist()}" for layer_idx in sorted(scales))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
