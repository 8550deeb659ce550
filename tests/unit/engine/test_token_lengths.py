"""A text has at least as many tokens as its length says, for each kind of tokenizer; or there is no bound."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer

from quire.client.engine.tokenizer import Tokenizer

BYTES = {f"<0x{byte:02X}>": byte for byte in range(256)}
WORDS = ["▁", "▁a", "aa", "▁▁▁▁", "é", "ab"]


def byte_level(**options: Any) -> RawTokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate([*letters, "aa", "aaaa", "ĠĠĠĠ"])}
    merges = [("a", "a"), ("aa", "aa")]
    raw = RawTokenizer(models.BPE(vocab=vocabulary, merges=merges))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken("<end>", special=True, **options)])
    return raw


def sentence_piece() -> RawTokenizer:
    vocabulary = {token: index for index, token in enumerate([*BYTES, *WORDS, "a", "b"])}
    raw = RawTokenizer(models.BPE(vocab=vocabulary, merges=[("a", "a"), ("▁", "a")], byte_fallback=True))
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return raw


def composing() -> RawTokenizer:
    raw = byte_level()
    raw.normalizer = normalizers.NFC()
    return raw


KINDS = {"byte level": byte_level, "SentencePiece": sentence_piece, "NFC": composing}


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.text(st.sampled_from("aab  é漢😀\u0301\u1100\u1161\u11a8<end>"), max_size=60))
def test_a_text_has_no_fewer_tokens_than_its_length_says(kind: str, text: str) -> None:
    tokenizer = Tokenizer(KINDS[kind]())
    assert tokenizer.max_token_characters > 0
    assert tokenizer.least_tokens(len(text)) <= len(tokenizer.encode(text, add_special_tokens=False))


def without(**changes: Any) -> RawTokenizer:
    raw = byte_level()
    for name, value in changes.items():
        setattr(raw, name, value)
    return raw


UNBOUNDED = {
    "white space is removed": without(normalizer=normalizers.Strip()),
    "parts are removed": without(pre_tokenizer=pre_tokenizers.WhitespaceSplit()),
    "an added token takes the white space behind it": byte_level(rstrip=True),
    "one token for a run of unknown characters": RawTokenizer(
        models.BPE(vocab={"<unk>": 0, "a": 1}, merges=[], unk_token="<unk>", fuse_unk=True)
    ),
    "unknown characters are left out": RawTokenizer(models.BPE(vocab={"a": 0}, merges=[])),
    "another model": RawTokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>")),
}


@pytest.mark.parametrize("why", UNBOUNDED)
def test_there_is_no_bound_where_any_length_of_text_may_become_few_tokens(why: str) -> None:
    tokenizer = Tokenizer(UNBOUNDED[why])
    assert (tokenizer.max_token_characters, tokenizer.least_tokens(1_000)) == (0, 0)
