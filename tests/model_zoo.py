"""Tiny models of many families, with random weights: what the worker must run, and what it must refuse.

Weights are drawn wide enough that attention is sharp and greedy tokens change from step to step; windows and chunks
are 8 tokens, so that short sequences feel them; no end token is in reach, so that generation runs its full length.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as hf

VOCAB_SIZE = 96
MAX_LEN = 128
WINDOW = 8
GAIN = 3.0

_SIZE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LEN,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def _size(**changes: Any) -> dict[str, Any]:
    return _SIZE | changes


def _without(*names: str, **changes: Any) -> dict[str, Any]:
    return {name: value for name, value in _size(**changes).items() if name not in names}


def _build(config: Any, auto: Any = hf.AutoModelForCausalLM) -> Any:
    model = auto.from_config(config).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(11)
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            scale = 0.2 if "embed" in name else GAIN * parameter.shape[-1] ** -0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
        elif "norm" not in name and "ln_" not in name:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def _llama(**changes: Any) -> Any:
    return _build(hf.LlamaConfig(**_size(**changes)))


def _gpt_oss() -> Any:
    return _build(
        hf.GptOssConfig(
            **_size(
                head_dim=8,
                sliding_window=WINDOW,
                layer_types=["sliding_attention", "full_attention", "sliding_attention"],
                num_local_experts=4,
                num_experts_per_tok=2,
                rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            )
        )
    )


def _phi3_longrope() -> Any:
    factors = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.5, 2.0, 3.0, 4.0]}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, **factors}
    rope["original_max_position_embeddings"] = 16
    return _build(hf.Phi3Config(**_size(rope_parameters=rope, original_max_position_embeddings=16)))


def _llama4() -> Any:
    return _build(
        hf.Llama4TextConfig(
            **_size(
                head_dim=8,
                intermediate_size_mlp=48,
                num_local_experts=4,
                num_experts_per_tok=1,
                attention_chunk_size=WINDOW,
                no_rope_layers=[1, 1, 0],
                moe_layers=[1],
            )
        )
    )


def _deepseek() -> Any:
    """Keys of 16, values of 12."""
    return _build(
        hf.DeepseekV3Config(
            **_size(
                num_key_value_heads=4,
                q_lora_rank=16,
                kv_lora_rank=16,
                qk_nope_head_dim=8,
                qk_rope_head_dim=8,
                v_head_dim=12,
                n_routed_experts=4,
                num_experts_per_tok=2,
                n_group=1,
                topk_group=1,
                moe_intermediate_size=16,
                first_k_dense_replace=1,
            )
        )
    )


# Models the worker runs, by family.
FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": _llama,
    "qwen2": lambda: _build(hf.Qwen2Config(**_size())),
    "qwen3": lambda: _build(hf.Qwen3Config(**_size(head_dim=16))),
    "mistral": lambda: _build(hf.MistralConfig(**_size(sliding_window=WINDOW))),
    "gemma2": lambda: _build(
        hf.Gemma2Config(**_size(head_dim=8, sliding_window=WINDOW, attn_logit_softcapping=2.0, query_pre_attn_scalar=4))
    ),
    "gemma3": lambda: _build(
        hf.Gemma3TextConfig(
            **_size(
                head_dim=8,
                sliding_window=WINDOW,
                layer_types=["sliding_attention", "full_attention", "sliding_attention"],
                query_pre_attn_scalar=4,
            )
        )
    ),
    "phi3": lambda: _build(hf.Phi3Config(**_size(sliding_window=WINDOW))),
    "gpt2": lambda: _build(
        hf.GPT2Config(
            vocab_size=VOCAB_SIZE,
            n_embd=32,
            n_layer=3,
            n_head=4,
            n_positions=MAX_LEN,
            bos_token_id=None,
            eos_token_id=None,
            tie_word_embeddings=False,
        )
    ),
    "opt": lambda: _build(
        hf.OPTConfig(
            **_without("intermediate_size", "num_key_value_heads"), ffn_dim=48, word_embed_proj_dim=32, dropout=0.0
        )
    ),
    "gpt_neox": lambda: _build(
        hf.GPTNeoXConfig(
            **_without("num_key_value_heads"),
            rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        )
    ),
    "mixtral": lambda: _build(hf.MixtralConfig(**_size(num_local_experts=4, num_experts_per_tok=2))),
    "gpt_oss": _gpt_oss,
    "llama4": _llama4,
    "deepseek_v3": _deepseek,
    "stablelm": lambda: _build(hf.StableLmConfig(**_size())),  # hands no arguments on to its layers
    "llama_dynamic_rope": lambda: _llama(
        max_position_embeddings=32, rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    ),
    "phi3_longrope": _phi3_longrope,
}

# Models it must refuse at load.
REFUSED: dict[str, Callable[[], Any]] = {
    "bloom": lambda: _build(hf.BloomConfig(vocab_size=VOCAB_SIZE, hidden_size=32, n_layer=2, n_head=4)),
    "falcon": lambda: _build(
        hf.FalconConfig(vocab_size=VOCAB_SIZE, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=False)
    ),
    "gptj": lambda: _build(
        hf.GPTJConfig(vocab_size=VOCAB_SIZE, n_embd=32, n_layer=2, n_head=4, rotary_dim=4, n_positions=MAX_LEN)
    ),
    "mpt": lambda: _build(hf.MptConfig(vocab_size=VOCAB_SIZE, d_model=32, n_layers=2, n_heads=4)),
    "mamba2": lambda: _build(
        hf.Mamba2Config(
            vocab_size=VOCAB_SIZE,
            hidden_size=32,
            num_hidden_layers=2,
            state_size=8,
            head_dim=8,
            num_heads=8,
            n_groups=2,
        )
    ),
    "qwen3_next": lambda: _build(
        hf.Qwen3NextConfig(
            **_size(
                head_dim=16,
                layer_types=["linear_attention", "linear_attention", "full_attention"],
                linear_num_value_heads=4,
                linear_num_key_heads=2,
                linear_key_head_dim=8,
                linear_value_head_dim=8,
                num_experts=4,
                num_experts_per_tok=2,
                moe_intermediate_size=16,
                shared_expert_intermediate_size=16,
            )
        )
    ),
    "bert": lambda: _build(
        hf.BertConfig(
            **_without("num_key_value_heads", "tie_word_embeddings", "pad_token_id"),
            pad_token_id=0,
            tie_word_embeddings=False,
        )
    ),
    "t5": lambda: _build(
        hf.T5Config(vocab_size=VOCAB_SIZE, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4),
        hf.AutoModelForSeq2SeqLM,
    ),
}


def build(name: str) -> Any:
    """A fresh model of a family, equal at every call: float32, eval mode, on the CPU."""
    return (FAMILIES | REFUSED)[name]()


def save(name: str, directory: Path) -> Path:
    """Write a checkpoint that from_pretrained() loads, and return its folder."""
    folder = Path(directory, name)
    build(name).save_pretrained(folder)
    return folder
