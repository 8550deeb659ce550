"""The measured models: shapes with random weights, since speed does not depend on the weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import click
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3Config
from worker_flags import DEFAULTS, WorkerFlags

from quire.worker.model.paged_model import PagedModel
from quire.worker.model.preparing import prepare_model
from quire.worker.quantization.at_load import quantize_at_load
from quire.worker.run.loading import choose_launches, choose_tiles, pick_attention, pick_steps

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Shape:
    """A model's configuration by name; `short` is its name in --cells."""

    name: str
    short: str
    make_config: Callable[[], PretrainedConfig]

    @cached_property
    def config(self) -> Any:
        return self.make_config()

    @property
    def architecture(self) -> str:
        """The class of the model, as a checkpoint names it."""
        return {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[self.config.model_type]

    @property
    def num_layers(self) -> int:
        return int(self.config.num_hidden_layers)

    @cached_property
    def num_matrix_weights(self) -> int:
        """Weights that a step multiplies with: of all layers and the output layer, not of the embedding."""
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(self.config)
        embedding = model.get_input_embeddings().weight.numel()
        total = sum(weight.numel() for weight in model.parameters())
        return int(total if self.config.tie_word_embeddings else total - embedding)

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Keys and values of all layers."""
        return int(2 * self.num_layers * self.config.num_key_value_heads * self.config.head_dim * dtype.itemsize)

    @property
    def attention_flops_per_score(self) -> int:
        """Of a query and a key: their product, and the value's part of the result, in all layers and query heads."""
        return int(4 * self.num_layers * self.config.num_attention_heads * self.config.head_dim)

    def load(
        self, *, dtype: torch.dtype, device: torch.device, max_model_len: int, flags: WorkerFlags = DEFAULTS
    ) -> PagedModel:
        """The model with random weights on the device, ready for a pool as the worker makes it.

        Kernels of this process are launched from now on as the flags say.
        """
        choose_launches(flags.dependent_launch, device)
        choose_tiles(device, are_fixed=flags.deterministic)
        step_kind = pick_attention("auto", device, block_size=BLOCK_SIZE)
        torch.manual_seed(0)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(self.config, dtype=dtype).eval().requires_grad_(False)
        if flags.quantization is not None:
            quantize_at_load(model, flags.quantization)
        return prepare_model(
            model,
            max_model_len=max_model_len,
            step_kind=step_kind,
            fused_steps=pick_steps(
                device,
                step_kind,
                block_size=BLOCK_SIZE,
                wanted=None,
                products=flags.products,
                deterministic=flags.deterministic,
            ),
            deterministic=flags.deterministic,
        )


def _llama(**sizes: Any) -> Callable[[], PretrainedConfig]:
    return lambda: LlamaConfig(bos_token_id=1, eos_token_id=None, pad_token_id=0, **sizes)


def _qwen3(**sizes: Any) -> Callable[[], PretrainedConfig]:
    return lambda: Qwen3Config(
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
        vocab_size=151936,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        **sizes,
    )


LLAMA_8B = Shape(
    "Llama-3.1-8B",
    "8B",
    _llama(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=131072,
    ),
)
LLAMA_1B = Shape(
    "Llama-3.2-1B",
    "1B",
    _llama(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=131072,
        tie_word_embeddings=True,
    ),
)
QWEN3_06B = Shape(
    "Qwen3-0.6B",
    "0.6B",
    _qwen3(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        tie_word_embeddings=True,
    ),
)
QWEN3_17B = Shape(
    "Qwen3-1.7B",
    "1.7B",
    _qwen3(
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=28,
        num_attention_heads=16,
        tie_word_embeddings=True,
    ),
)
QWEN3_8B = Shape(
    "Qwen3-8B",
    "Qwen3-8B",
    _qwen3(hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32),
)
LLAMA_56M = Shape(
    "Llama, 56 M",
    "56M",
    _llama(
        vocab_size=32000,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=8192,
    ),
)
DEMO = Shape(
    "the demo's Llama",
    "demo",
    _llama(
        vocab_size=2048,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=32,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    ),
)
TINY = Shape(
    "tiny Llama",
    "tiny",
    _llama(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=8192,
    ),
)
SHAPES = {shape.short: shape for shape in (LLAMA_8B, LLAMA_1B, QWEN3_06B, QWEN3_17B, QWEN3_8B, LLAMA_56M, DEMO, TINY)}
"""All shapes, by their short names."""


def shape_of(short: str) -> Shape:
    """Return the shape of a short name. Raises click.BadParameter."""
    if short not in SHAPES:
        raise click.BadParameter(f"--cells: {short!r} is not measured here: must be one of {', '.join(SHAPES)}")
    return SHAPES[short]
