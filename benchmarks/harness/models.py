"""Models with random weights, written as checkpoints: only their shapes matter for the measurements."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypeVar

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import ByteLevel, WhitespaceSplit
from transformers import (
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

END = "<|end|>"
Model = TypeVar("Model", bound=PreTrainedModel)


def llama_56m(directory: Path) -> LlamaForCausalLM:
    """56 M parameters: hidden 512, 8 layers, 8 query and 4 key heads, vocabulary 32,000."""
    return _llama(directory, vocabulary=32000, hidden=512, intermediate=1408, num_layers=8, num_heads=8)


def tiny_llama(directory: Path) -> LlamaForCausalLM:
    """A model of which a step takes next to nothing: 2 layers, hidden 32."""
    return _llama(directory, vocabulary=512, hidden=32, intermediate=64, num_layers=2, num_heads=2)


def gpt2_small(directory: Path, dtype: torch.dtype) -> GPT2LMHeadModel:
    """124 M parameters: hidden 768, 12 layers, 12 heads, vocabulary 50,257, 1,024 positions."""
    config = GPT2Config(bos_token_id=0, eos_token_id=None, pad_token_id=0)
    return _saved(config, GPT2LMHeadModel, directory, dtype)


def tiny_gpt2(directory: Path, dtype: torch.dtype) -> GPT2LMHeadModel:
    """A GPT-2 with 2 layers and hidden 32."""
    config = GPT2Config(
        vocab_size=512, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=None, pad_token_id=0
    )
    return _saved(config, GPT2LMHeadModel, directory, dtype)


def block_bytes(model: Path, block_size: int) -> int:
    """Bytes of a block of keys and values in float32."""
    config = json.loads((model / "config.json").read_text())
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    return 2 * 4 * block_size * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim


def number_tokenizer(directory: Path, vocabulary: int) -> None:
    """A tokenizer of a model above: the text of a token is its id in digits, and spaces are between tokens."""
    raw = Tokenizer(WordLevel({str(token_id): token_id for token_id in range(vocabulary)}, unk_token="0"))
    raw.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=raw).save_pretrained(directory)


def byte_tokenizer(directory: Path) -> None:
    """A tokenizer of a model above, which gets an end token: each byte of a text is a token, so it has one encoding."""
    alphabet = [*sorted(ByteLevel.alphabet()), END]
    raw = Tokenizer(BPE({letter: token_id for token_id, letter in enumerate(alphabet)}, []))
    raw.pre_tokenizer = ByteLevel(add_prefix_space=False)
    raw.decoder = ByteLevelDecoder()
    PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=END).save_pretrained(directory)
    GenerationConfig(eos_token_id=alphabet.index(END)).save_pretrained(directory)


def _llama(
    directory: Path, *, vocabulary: int, hidden: int, intermediate: int, num_layers: int, num_heads: int
) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads // 2,
        max_position_embeddings=8192,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    return _saved(config, LlamaForCausalLM, directory, torch.float32)


def _saved(config: object, kind: type[Model], directory: Path, dtype: torch.dtype) -> Model:
    torch.manual_seed(0)
    model = kind(config).eval().requires_grad_(False).to(dtype)
    model.generation_config.eos_token_id = None
    model.save_pretrained(directory)
    return model
