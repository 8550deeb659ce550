"""Tiny models of many families, with random weights: models that the worker must run, and others that it must refuse.

Weights are drawn wide enough that attention is sharp and greedy tokens change from step to step; windows and chunks
are 8 tokens, so that short sequences feel them; no end token is in reach, so that generation runs its full length.
"""

from __future__ import annotations

import sys
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


NO_ENDS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


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


def build_gpt_oss(**sizes: Any) -> Any:
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
            | sizes
        )
    )


def _phi3_longrope() -> Any:
    factors = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.5, 2.0, 3.0, 4.0]}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, **factors}
    rope["original_max_position_embeddings"] = 16
    return _build(hf.Phi3Config(**_size(rope_parameters=rope, original_max_position_embeddings=16)))


def _llama4(**changes: Any) -> Any:
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
                **changes,
            )
        )
    )


def _deepseek(config: Any) -> Any:
    """Keys of 16, values of 12, from latents of 16 and 8."""
    return _build(
        config(
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
    "gpt_oss": build_gpt_oss,
    "llama4": _llama4,
    "llama4_temperature": lambda: _llama4(floor_scale=4, attn_scale=1.0),
    "deepseek_v2": lambda: _deepseek(hf.DeepseekV2Config),
    "deepseek_v3": lambda: _deepseek(hf.DeepseekV3Config),
    "stablelm": lambda: _build(hf.StableLmConfig(**_size())),  # hands no arguments on to its layers
    "llama_dynamic_rope": lambda: _llama(
        max_position_embeddings=32, rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    ),
    "phi3_longrope": _phi3_longrope,
}

_LINEAR: dict[str, Any] = {
    "head_dim": 16,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_MAMBA2: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_state": 8, "mamba_d_head": 8, "mamba_chunk_size": 8}


def _qwen3_next() -> Any:
    experts = {"num_experts": 4, "num_experts_per_tok": 2}
    widths = {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
    return _build(hf.Qwen3NextConfig(**_size(**_LINEAR, **experts, **widths)))


def _jamba() -> Any:
    layers = {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
    return _build(hf.JambaConfig(**_size(**layers, mamba_d_state=8, num_experts=4, use_mamba_kernels=False)))


def _granite_hybrid() -> Any:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 16}
    layers = ["mamba", "attention", "mamba"]
    return _build(hf.GraniteMoeHybridConfig(**_size(layer_types=layers, **_MAMBA2, **experts)))


def _nemotron_h() -> Any:
    sizes = {"ssm_state_size": 8, "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 1, "chunk_size": 8}
    layers = ["mamba", "attention", "mlp"]
    return _build(hf.NemotronHConfig(**_without("num_hidden_layers"), layers_block_type=layers, head_dim=8, **sizes))


def _gpt(config: Any, **changes: Any) -> Any:
    return _build(config(vocab_size=VOCAB_SIZE, n_embd=32, n_layer=3, n_head=4, n_positions=MAX_LEN, **changes))


def _falcon(**changes: Any) -> Any:
    size = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    return _build(hf.FalconConfig(vocab_size=VOCAB_SIZE, max_position_embeddings=MAX_LEN, **NO_ENDS, **size, **changes))


# Models that run with their own attention, over a cache that is the pool.
CACHED: dict[str, Callable[[], Any]] = {
    "bloom": lambda: _build(hf.BloomConfig(vocab_size=VOCAB_SIZE, hidden_size=32, n_layer=3, n_head=4, **NO_ENDS)),
    "falcon": lambda: _falcon(alibi=False),  # one kv head
    "falcon_alibi": lambda: _falcon(alibi=True, multi_query=False),
    "mpt": lambda: _build(
        hf.MptConfig(vocab_size=VOCAB_SIZE, d_model=32, n_layers=3, n_heads=4, max_seq_len=MAX_LEN, **NO_ENDS)
    ),
    "gptj": lambda: _gpt(hf.GPTJConfig, rotary_dim=4, **NO_ENDS),
    "gpt_neo": lambda: _build(
        hf.GPTNeoConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=32,
            intermediate_size=48,
            num_layers=3,
            num_heads=4,
            attention_types=[[["global", "local", "local"], 1]],
            window_size=WINDOW,
            max_position_embeddings=MAX_LEN,
            **NO_ENDS,
        )
    ),
    "codegen": lambda: _gpt(hf.CodeGenConfig, rotary_dim=4, **NO_ENDS),
    "xglm": lambda: _build(
        hf.XGLMConfig(
            vocab_size=VOCAB_SIZE,
            d_model=32,
            ffn_dim=48,
            num_layers=3,
            attention_heads=4,
            max_position_embeddings=MAX_LEN,
            **NO_ENDS,
        )
    ),
}

# Of these, models with a state per sequence.
STATEFUL: dict[str, Callable[[], Any]] = {
    "mamba2": lambda: _build(
        hf.Mamba2Config(
            vocab_size=VOCAB_SIZE,
            hidden_size=32,
            num_hidden_layers=3,
            state_size=8,
            head_dim=8,
            num_heads=8,
            n_groups=2,
            chunk_size=8,
            **NO_ENDS,
        )
    ),
    "mamba": lambda: _build(  # begins anew when it gets several tokens
        hf.MambaConfig(vocab_size=VOCAB_SIZE, hidden_size=32, num_hidden_layers=3, state_size=8, **NO_ENDS)
    ),
    "qwen3_next": _qwen3_next,
    "qwen3_5": lambda: _build(hf.Qwen3_5TextConfig(**_size(**_LINEAR))),
    "jamba": _jamba,
    "bamba": lambda: _build(hf.BambaConfig(**_size(**_MAMBA2, mamba_n_groups=1, attn_layer_indices=[1]))),
    "granitemoehybrid": _granite_hybrid,
    "nemotron_h": _nemotron_h,
    "falcon_h1": lambda: _build(  # both kinds in every layer
        hf.FalconH1Config(**_size(**_MAMBA2, mamba_d_ssm=64, mamba_n_groups=1, head_dim=8))
    ),
    "lfm2": lambda: _build(  # convolutions only
        hf.Lfm2Config(**_size(layer_types=["conv", "full_attention", "conv"], conv_L_cache=3))
    ),
}

# Models it must refuse at load.
REFUSED: dict[str, Callable[[], Any]] = {
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


# Models it runs as well, each for something in its layers that others don't have.
FURTHER: dict[str, Callable[[], Any]] = {
    "qwen3_moe": lambda: _build(
        hf.Qwen3MoeConfig(**_size(head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16))
    ),
    "olmo": lambda: _build(hf.OlmoConfig(**_size(clip_qkv=2.0))),
    "olmo2": lambda: _build(hf.Olmo2Config(**_size())),
    "granite": lambda: _build(
        hf.GraniteConfig(**_size(residual_multiplier=0.5, attention_multiplier=0.3, embedding_multiplier=2.0))
    ),
    "smollm3": lambda: _build(hf.SmolLM3Config(**_size(no_rope_layers=[1, 0, 1]))),
    "glm4": lambda: _build(hf.Glm4Config(**_size(head_dim=16, attention_bias=True))),
    "cohere": lambda: _build(hf.CohereConfig(**_size())),
    "phi": lambda: _build(hf.PhiConfig(**_size(partial_rotary_factor=0.5))),
    "odd_heads": lambda: _llama(head_dim=12),
    "one_kv_head": lambda: _llama(num_key_value_heads=1),
    "gemma": lambda: _build(hf.GemmaConfig(**_size(head_dim=8))),
}


_LAYER_TYPES = ["sliding_attention", "sliding_attention", "full_attention"]
_WINDOWS: dict[str, Any] = {"sliding_window": WINDOW, "layer_types": _LAYER_TYPES}
_GEMMA_3N: dict[str, Any] = {
    "head_dim": 8,
    "num_kv_shared_layers": 0,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 4,
    "activation_sparsity_pattern": [0.0] * 3,
    "intermediate_size": [48] * 3,
}

# Models with windows that the models page does not try.
WINDOWED: dict[str, Callable[[], Any]] = {
    "cohere2": lambda: _build(hf.Cohere2Config(**_size(**_WINDOWS))),
    "exaone4": lambda: _build(hf.Exaone4Config(**_size(**_WINDOWS, sliding_window_pattern=3))),
    "qwen2_upper_windows": lambda: _build(
        hf.Qwen2Config(**_size(use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1))
    ),
    "gemma3n": lambda: _build(hf.Gemma3nTextConfig(**_size(**_WINDOWS, **_GEMMA_3N))),
    "gemma4": lambda: _build(hf.Gemma4TextConfig(**_size(**_WINDOWS, head_dim=8))),
}


def build(name: str) -> Any:
    """A fresh model of a family, equal at every call: float32, eval mode, on the CPU."""
    return (FAMILIES | CACHED | STATEFUL | REFUSED | FURTHER | WINDOWED)[name]()


def save(name: str, directory: Path) -> Path:
    """Write a checkpoint that from_pretrained() loads, and return its folder."""
    folder = Path(directory, name)
    build(name).save_pretrained(folder)
    return folder


def one_layer_llama(*, max_position_embeddings: int) -> Any:
    """A Llama of one layer with transformers' own random weights: attention that is not sharp."""
    config = hf.LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_position_embeddings,
    )
    return _with_own_weights(config)


def four_layer_llama(*, max_position_embeddings: int) -> Any:
    """A Llama of four layers in bfloat16, of the shapes that a GPU's kernels are made for."""
    config = hf.LlamaConfig(
        vocab_size=1000,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=max_position_embeddings,
        eos_token_id=None,
    )
    return _with_own_weights(config, dtype=torch.bfloat16)


def deep_llama(*, dtype: torch.dtype) -> Any:
    """A Llama of 32 layers with large random weights, which makes much of rounding."""
    config = hf.LlamaConfig(
        vocab_size=2000,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=32,
        num_attention_heads=2,
        max_position_embeddings=MAX_LEN,
        initializer_range=0.2,
    )
    return _with_own_weights(config, dtype=dtype)


def _with_own_weights(config: Any, *, dtype: torch.dtype = torch.float32) -> Any:
    """As transformers draws them."""
    torch.manual_seed(0)
    return hf.AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)


def generate(model: Any, prompt: list[int], num_new: int) -> list[int]:
    """Prompt and greedy tokens of transformers alone, by whole forwards.

    With its cache Phi-3 drops the cached tokens where a longrope changes.
    """
    out = model.generate(
        torch.tensor([prompt], device=model.device),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64, device=model.device),
        max_new_tokens=num_new,
        do_sample=False,
        use_cache=False,
        pad_token_id=0,
    )
    tokens: list[int] = out[0].tolist()
    return tokens


if __name__ == "__main__":  # a family and the folder to save it in
    save(sys.argv[1], Path(sys.argv[2]))
