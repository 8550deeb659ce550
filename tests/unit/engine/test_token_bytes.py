"""The bytes of tokens, and the texts that are made of them, for vocabularies of all kinds."""

import codecs
from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders
from vocabularies import (
    END,
    START,
    byte_level,
    loaded,
    sentence_piece,
    unigram,
    word_ends,
    word_piece,
    words,
)

from quire.client.engine.token_bytes import text_of
from quire.client.engine.tokenizer import Tokenizer

VOCABULARIES = {
    "byte level": byte_level(),
    "byte level, space before": byte_level(add_prefix_space=True),
    "sentence piece": sentence_piece(),
    "sentence piece, no space before": sentence_piece(strips=False),
    "unigram": unigram(),
    "words": words(),
}
OTHERS = {"word piece": word_piece(), "word ends": word_ends()}
BYTES, LLAMA, GEMMA = (
    loaded(VOCABULARIES[name]) for name in ("byte level", "sentence piece", "sentence piece, no space before")
)
EMOJI = "😀".encode()

names = st.sampled_from(sorted(VOCABULARIES))
texts = st.text(st.sampled_from("the model once a é 😀你\ufffd ▁"), max_size=12)


def ids_of(raw: RawTokenizer, tokens: list[str]) -> list[int]:
    found = [raw.token_to_id(token) for token in tokens]
    assert None not in found
    return found


def byte_ids(data: bytes) -> list[int]:
    return ids_of(VOCABULARIES["sentence piece"], [f"<0x{byte:02X}>" for byte in data])


def generated(tokenizer: Tokenizer, prompt: list[int], output: list[int], *, skips: bool = True) -> str:
    detokenizer = tokenizer.detokenizer(prompt, skip_special_tokens=skips)
    return "".join([detokenizer.push([token_id]) for token_id in output] + [detokenizer.flush()])


@given(names, texts, texts, st.lists(st.sampled_from([START, END]), max_size=2), st.booleans())
@example("sentence piece", "", "the model", [START], True)
@example("unigram", "", "the model", [START], True)
@example("sentence piece", "the", " a\ufffd", [], False)
def test_pieces_are_what_the_tokenizer_makes_of_all_tokens(
    name: str, before: str, after: str, specials: list[str], skips: bool
) -> None:
    raw = VOCABULARIES[name]
    tokenizer = loaded(raw)
    assert tokenizer.token_bytes.is_exact
    prompt = ids_of(raw, specials) + tokenizer.encode(before, add_special_tokens=False)
    output = tokenizer.encode(after, add_special_tokens=False) + ids_of(raw, specials[:1])
    before_text = tokenizer.decode(prompt, skip_special_tokens=skips)
    whole = tokenizer.decode(prompt + output, skip_special_tokens=skips)
    assert before_text + generated(tokenizer, prompt, output, skips=skips) == whole


@given(st.lists(st.integers(0, 270), max_size=20))
def test_any_byte_level_tokens_make_the_tokenizers_text(token_ids: list[int]) -> None:
    """But for a character that the end cuts off."""
    begun = codecs.getincrementaldecoder("utf-8")("replace")
    begun.decode(b"".join(map(BYTES.token_bytes.of, token_ids)))
    rest = "\ufffd" if begun.getstate()[0] else ""
    assert generated(BYTES, [], token_ids) + rest == BYTES.decode(token_ids)


@pytest.mark.parametrize("data", [b"\xff", b"\xe4\xbd", b"\x80\x80", b"\xed\xa0\x80", b"\xf0\x9f\x98\xf0", b"\xc3\xff"])
def test_bytes_that_are_no_character_are_replaced_one_by_one_as_sentence_piece_does(data: bytes) -> None:
    a = ids_of(VOCABULARIES["sentence piece"], ["▁a"])
    token_ids = [*a, *byte_ids(data), *a]
    assert generated(LLAMA, [], token_ids) == LLAMA.decode(token_ids) == "a" + "\ufffd" * len(data) + " a"


def test_a_wrong_byte_leaves_the_characters_around_it() -> None:
    """The tokenizer replaces the whole run of bytes, which a stream could not: it has shown the first character."""
    run = byte_ids("你".encode() + b"\xff" + "好".encode())
    assert LLAMA.decode(run) == "\ufffd" * 7
    assert generated(LLAMA, [], run) == "你\ufffd好"


@pytest.mark.parametrize("tokenizer", [BYTES, LLAMA, GEMMA], ids=["bytes", "llama", "gemma"])
def test_a_real_replacement_character_at_the_end_is_kept(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("a\ufffd", add_special_tokens=False)
    assert generated(tokenizer, [], token_ids) == "a\ufffd"
    as_bytes = [*tokenizer.encode("a", add_special_tokens=False), *byte_ids("\ufffd".encode())]
    assert generated(LLAMA, [], as_bytes).endswith("\ufffd")


def test_a_character_that_the_end_cuts_off_is_left_out() -> None:
    assert generated(LLAMA, [], byte_ids(EMOJI[:3])) == ""
    assert generated(LLAMA, byte_ids(EMOJI[:2]), byte_ids(b"ok")) == "ok"


@given(st.sampled_from(sorted(set(VOCABULARIES) - {"words"})), texts)
def test_bytes_of_tokens_join_to_the_text(name: str, text: str) -> None:
    tokenizer = loaded(VOCABULARIES[name])
    pieces = tokenizer.pieces()
    token_ids = tokenizer.encode(text)
    joined = b"".join(map(pieces.take, token_ids))
    assert joined.decode() == tokenizer.decode(token_ids)


def test_the_bytes_of_a_token() -> None:
    raw = VOCABULARIES["sentence piece"]
    tokens = ["▁the", "the", "<0xF0>", "<0x41>", "▁", END]
    found = [LLAMA.token_bytes.of(token_id) for token_id in ids_of(raw, tokens)]
    assert found == [b" the", b"the", b"\xf0", b"A", b" ", b"</s>"]
    assert LLAMA.token_bytes.of(10**6) == b""
    ids = ids_of(VOCABULARIES["byte level"], ["Ġthe", "ð", END])
    assert [BYTES.token_bytes.of(token_id) for token_id in ids] == [b" the", b"\xf0", b"</s>"]


def test_only_the_first_word_of_a_text_loses_its_space() -> None:
    the, start, space = ids_of(VOCABULARIES["sentence piece"], ["▁the", START, "▁"])
    after_start = LLAMA.pieces([start])
    assert [after_start.take(each) for each in (the, the)] == [b"the", b" the"]
    assert LLAMA.pieces([start], skip_special_tokens=False).next(the) == b" the"
    assert GEMMA.pieces().next(GEMMA.encode(" the")[1]) == b" the"
    bare = LLAMA.pieces()
    assert [bare.take(each) for each in (start, space, the)] == [b"", b"", b" the"]


@pytest.mark.parametrize(
    ("raw", "text"),
    [(b"\xf0\x9f", "bytes:\\xf0\\x9f"), (b" \xe2", "bytes: \\xe2"), (b"\\\xff", "bytes:\\x5c\\xff"), (b" the", " the")],
)
def test_a_part_of_a_character_is_written_by_its_bytes(raw: bytes, text: str) -> None:
    assert text_of(raw) == text


@pytest.mark.parametrize("name", sorted(OTHERS))
@given(data=st.data())
def test_tokens_without_bytes_of_their_own_make_the_tokenizers_text(name: str, data: st.DataObject) -> None:
    raw = OTHERS[name]
    tokenizer = loaded(raw)
    assert not tokenizer.token_bytes.is_exact
    ids = st.integers(0, raw.get_vocab_size() - 1)
    prompt = data.draw(st.lists(ids, min_size=1, max_size=4))
    output = data.draw(st.lists(ids, max_size=12))
    assert tokenizer.decode(prompt) + generated(tokenizer, prompt, output) == tokenizer.decode(prompt + output)


def test_tokens_without_bytes_of_their_own_have_the_text_that_they_add() -> None:
    raw = OTHERS["word piece"]
    found = [loaded(raw).token_text(token_id) for token_id in ids_of(raw, ["the", "##del", "n't", "."])]
    assert found == [" the", "del", "n't", "."]


@pytest.mark.parametrize(
    "steps",
    [
        [decoders.ByteFallback(), decoders.Metaspace()],
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 2, 0)],
        [decoders.Strip(" ", 1, 0), decoders.Fuse()],
        [decoders.CTC()],
    ],
)
def test_an_unknown_decoder_makes_the_text_itself(steps: list[decoders.Decoder]) -> None:
    raw = sentence_piece()
    raw.decoder = decoders.Sequence(steps)
    assert not loaded(raw).token_bytes.is_exact


@pytest.mark.parametrize("make", [byte_level, sentence_piece, word_piece])
def test_a_long_text_costs_no_memory(make: Callable[[], RawTokenizer]) -> None:
    tokenizer = loaded(make())
    detokenizer = tokenizer.detokenizer()
    end = tokenizer.encode(END, add_special_tokens=False)[-1:]
    assert detokenizer.push(end * 1000) == ""
    a = tokenizer.encode("a", add_special_tokens=False)
    for _ in range(100):
        detokenizer.push([*end, *a])
    held = [len(value) for value in vars(detokenizer).values() if isinstance(value, list | str)]
    assert all(length <= 64 for length in held)
