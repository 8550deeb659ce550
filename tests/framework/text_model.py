"""A tiny model with random weights that has a tokenizer and an end token: for grammars, which need both.

Its tokens are all bytes, some pieces of JSON that span several bytes, and one end token. It is a Llama; with a window,
a Qwen 2 with one full layer and one windowed layer.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import lora_zoo
import torch
import transformers as hf
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

PIECES = ('{"', '":', '",', '"}', "tr", "ue", "true", "nu", "ll", "null", "0.", "00", "ab", "the", "\\n", "},", "],")
END = "</s>"
MAX_LEN = 2048


def make_tokenizer() -> Tokenizer:
    """Return a byte-level BPE with merges that build PIECES."""
    vocab = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = []
    for piece in PIECES:
        for end in range(2, len(piece) + 1):
            left, right = piece[: end - 1], piece[end - 1]
            if piece[:end] not in vocab:
                vocab[piece[:end]] = len(vocab)
                merges.append((left, right))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    return tokenizer


def save(
    folder: Path,
    *,
    seed: int = 11,
    window: int | None = None,
    tokenizer: Tokenizer | None = None,
    **changes: object,
) -> Path:
    """Write a checkpoint with its tokenizer, and return its folder. window: of the second layer, in tokens.

    A tokenizer that is given has the token END.
    """
    tokenizer = tokenizer or make_tokenizer()
    kind: type[hf.PretrainedConfig] = hf.LlamaConfig
    if window is not None:
        kind = hf.Qwen2Config
        changes |= {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 1}
    config = {
        "vocab_size": tokenizer.get_vocab_size() + 5,  # more logits than tokens, as many models have
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_LEN,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "pad_token_id": None,
        "eos_token_id": tokenizer.token_to_id(END),
    }
    model = hf.AutoModelForCausalLM.from_config(kind(**(config | changes))).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            scale = 0.2 if "embed" in name else 3 * parameter.shape[-1] ** -0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def save_adapters(model: Path, names: Sequence[str]) -> None:
    """Write adapters of a checkpoint beside it, in folders of these names, each with other weights."""
    hf.logging.disable_progress_bar()
    loaded = hf.AutoModelForCausalLM.from_pretrained(model)
    for seed, name in enumerate(names):
        lora_zoo.save(loaded, model.parent / name, seed=seed, rank=3 + seed)


if __name__ == "__main__":  # the folder to save it in; the window, 0 for none; the names of adapters
    save(Path(sys.argv[1]), window=int(sys.argv[2]) or None)
    if sys.argv[3:]:
        save_adapters(Path(sys.argv[1]), sys.argv[3:])
