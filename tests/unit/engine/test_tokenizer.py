"""Text in pieces: never half a character, never a part of a stop string, nothing lost."""

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers

from quire.client.engine.outputs import SampleText
from quire.client.engine.scheduling.sequence import FinishReason
from quire.client.engine.tokenizer import StopStrings, Tokenizer
from quire.client.errors import InvalidRequest

SPECIAL = 256


def byte_tokenizer() -> Tokenizer:
    """One token per byte, and one special token."""
    raw = RawTokenizer(
        models.BPE(vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[])
    )
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["<end>"])
    return Tokenizer(raw)


def word_tokenizer() -> Tokenizer:
    """Words that begin with a blank; the decoder drops it at the beginning of a text."""
    words = ["▁once", "▁upon", "▁a", "▁time", "s", "▁", "<unk>"]
    raw = RawTokenizer(models.WordLevel(vocab={word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    raw.decoder = decoders.Metaspace()
    return Tokenizer(raw)


BYTES = byte_tokenizer()
WORDS = word_tokenizer()


@given(st.text(max_size=30), st.integers(0, 5))
@example("héllo 😀 wörld", 2)
def test_pieces_make_the_text_and_each_is_whole(text: str, num_prompt: int) -> None:
    token_ids = BYTES.encode(text)
    detokenizer = BYTES.detokenizer(BYTES.encode("prompt")[:num_prompt])
    pieces = [detokenizer.push([token_id]) for token_id in token_ids]
    assert "".join(pieces) == text
    assert "\ufffd" in text or all("\ufffd" not in piece for piece in pieces)
    assert detokenizer.flush() == ""


def test_half_a_character_is_never_shown() -> None:
    detokenizer = BYTES.detokenizer()
    token_ids = BYTES.encode("a😀")
    assert [detokenizer.push([token_id]) for token_id in token_ids] == ["a", "", "", "", "😀"]
    assert detokenizer.push(token_ids[:3]) == "a"
    assert detokenizer.flush() == ""


def test_bytes_that_are_no_character_do_not_hold_text_back_for_ever() -> None:
    detokenizer = BYTES.detokenizer()
    stray = BYTES.encode("😀")[1]
    text = "".join(detokenizer.push([stray]) for _ in range(16))
    assert set(text) == {"\ufffd"}
    assert detokenizer.push(BYTES.encode("ok")) == "ok"


def test_special_tokens_have_no_text() -> None:
    detokenizer = BYTES.detokenizer()
    assert detokenizer.push([SPECIAL] * 1000) == ""
    assert detokenizer.push(BYTES.encode("x")) == "x"


def test_the_blank_between_prompt_and_output_is_kept() -> None:
    assert WORDS.decode([0, 1]) == "once upon"
    assert WORDS.detokenizer([0]).push([1]) == " upon"
    assert WORDS.detokenizer([]).push([1]) == "upon"


@given(st.lists(st.integers(0, 5), min_size=1, max_size=20), st.lists(st.integers(0, 5), max_size=20))
def test_pieces_are_what_the_whole_text_has_after_the_prompt(prompt: list[int], output: list[int]) -> None:
    detokenizer = WORDS.detokenizer(prompt)
    text = "".join(detokenizer.push([token_id]) for token_id in output) + detokenizer.flush()
    assert WORDS.decode(prompt) + text == WORDS.decode(prompt + output)


def test_a_prompt_that_ends_in_half_a_character_does_no_harm() -> None:
    detokenizer = BYTES.detokenizer(BYTES.encode("😀")[:2])
    assert detokenizer.push(BYTES.encode("ok")) == "ok"


# Stop strings.


@given(
    st.lists(st.text("ab", max_size=4), max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_text_ends_before_the_first_stop_string_however_it_is_cut(pieces: list[str], stop: list[str]) -> None:
    search = StopStrings(stop)
    shown = ""
    whole = ""
    for piece in pieces:
        whole += piece
        shown += search.push(piece)
        found = [whole.index(s) for s in stop if s in whole]
        if found:
            # What was met first, as text came in, decides; nothing of it is shown.
            assert search.matched is not None
            assert search.push("ab") == ""
            break
        assert whole.startswith(shown)
        held = whole[len(shown) :]
        assert all(len(held) < len(s) for s in stop if s.startswith(held)) or not held
    shown += search.flush()
    if search.matched is None:
        assert shown == whole
    else:
        assert not any(s in shown for s in stop)
        assert whole.startswith(shown + search.matched)


def test_nothing_is_held_back_without_need() -> None:
    search = StopStrings(["STOP"])
    assert search.push("a S") == "a "
    assert search.push("T") == ""
    assert search.push("x") == "STx"
    assert search.push("ST") == ""
    assert search.flush() == "ST"


def test_the_token_that_ends_a_sample_has_no_text() -> None:
    text = SampleText(BYTES.detokenizer(), ())
    (letter,) = BYTES.encode("x")
    assert text.push((letter,), None) == "x"
    assert text.push((letter,), FinishReason.STOP) == ""
    assert SampleText(BYTES.detokenizer(), ()).push((letter,), FinishReason.LENGTH) == "x"


def test_what_was_held_back_is_shown_at_the_end() -> None:
    text = SampleText(BYTES.detokenizer(), ("xy",))
    (letter,) = BYTES.encode("x")
    assert text.push((letter,), None) == ""
    assert text.push((letter,), FinishReason.LENGTH) == "xx"


def test_special_tokens_may_be_part_of_the_text() -> None:
    token_ids = [*BYTES.encode("a"), *BYTES.encode("<end>"), *BYTES.encode("b")]
    assert len(token_ids) == 3
    assert BYTES.detokenizer().push(token_ids) == "ab"
    assert BYTES.detokenizer(skip_special_tokens=False).push(token_ids) == "a<end>b"


def test_what_a_sample_stops_at_may_be_part_of_its_text() -> None:
    text = SampleText(BYTES.detokenizer(), ("xy",), keep_stop=True)
    pieces = [text.push((token_id,), None) for token_id in BYTES.encode("axyz")]
    assert ("".join(pieces), text.stop_string) == ("axy", "xy")
    (letter,) = BYTES.encode("x")
    assert SampleText(BYTES.detokenizer(), (), keep_stop=True).push((letter,), FinishReason.STOP) == "x"


@pytest.mark.parametrize(
    ("stop", "min_tokens", "pieces", "is_met"),
    [
        ("ab", 3, "ab", True),  # one that begins in the first tokens and ends after them
        ("ab", 2, "ab", True),
        ("ab", 4, "abab", True),
        ("ab", 6, "ababab", False),
        ("abab", 3, "", True),
        ("bab", 3, "a", True),
        ("babab", 5, "a", True),
        ("ba", 4, "aba", True),
    ],
)
def test_a_stop_string_that_ends_in_the_first_tokens_is_not_met(
    stop: str, min_tokens: int, pieces: str, is_met: bool
) -> None:
    text = SampleText(BYTES.detokenizer(), (stop,), min_tokens=min_tokens)
    found = "".join(text.push((token_id,), None) for token_id in BYTES.encode("ababab")) + text.flush()
    assert (found, text.stop_string is not None) == (pieces, is_met)


@given(
    st.text("ab", max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(0, 12),
)
def test_a_sample_ends_at_the_first_stop_string_after_min_tokens(text: str, stop: list[str], min_tokens: int) -> None:
    """As a search in the text after each token finds it; each letter is a token."""
    sample = SampleText(BYTES.detokenizer(), tuple(stop), min_tokens=min_tokens)
    shown = ""
    for count, token_id in enumerate(BYTES.encode(text), start=1):
        shown += sample.push((token_id,), None)
        begins = [count - len(each) for each in stop if text[:count].endswith(each)]
        if count > min_tokens and begins:
            assert sample.stop_string is not None
            assert shown == text[: min(begins)]
            return
        assert sample.stop_string is None
    assert shown + sample.flush() == text


def test_a_bad_word_is_encoded_with_and_without_a_space() -> None:
    assert BYTES.encode_word("ab") == [tuple(BYTES.encode("ab")), tuple(BYTES.encode(" ab"))]
    assert BYTES.encode_word(" ab") == [tuple(BYTES.encode(" ab"))]
    with pytest.raises(InvalidRequest, match="bad_words"):
        BYTES.encode_word("\ud800")


def test_without_a_tokenizer_there_is_no_text() -> None:
    assert SampleText(None, ()).push((5,), FinishReason.LENGTH) == ""


@pytest.mark.parametrize("stop", [(), ("never",)])
def test_tokens_have_the_same_text_one_by_one_and_together(stop: tuple[str, ...]) -> None:
    token_ids = BYTES.encode("a \u00e9 b \U0001f642 c")
    one_by_one, together = (SampleText(BYTES.detokenizer(), stop) for _ in range(2))
    pieces = [one_by_one.push((token_id,), None) for token_id in token_ids[:-1]]
    pieces.append(one_by_one.push(token_ids[-1:], FinishReason.LENGTH))
    assert "".join(pieces) == together.push(token_ids, FinishReason.LENGTH) == BYTES.decode(token_ids)


# Files.


def test_loads_a_file_or_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    BYTES._raw.save(str(path))
    for source in (tmp_path, path):
        assert Tokenizer.load(str(source)).encode("hi") == BYTES.encode("hi")
    assert Tokenizer.load(str(path)).vocabulary_size == 257


def test_says_what_is_missing_or_broken(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        Tokenizer.load(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="no tokenizer"):
        Tokenizer.load(str(tmp_path))


def test_special_tokens_that_are_kept_are_part_of_the_text() -> None:
    end, other = BYTES.encode("<end>"), BYTES.encode("b")
    kept = BYTES.detokenizer(kept_special_tokens=end)
    assert "".join(kept.push([token_id]) for token_id in [*other, *end, *other]) == "b<end>b"
    assert BYTES.detokenizer(kept_special_tokens=other).push([*other, *end]) == "b"


def test_an_ordinary_part_of_a_text_has_no_special_tokens() -> None:
    [end] = BYTES.encode("<end>")
    token_ids = BYTES.encode_parts(["a<end>", "<end>", "b", "", "<end>c"])
    assert BYTES.decode(token_ids, skip_special_tokens=False) == "a<end><end>b<end>c"
    assert token_ids.count(end) == 2
    assert BYTES.encode_parts(["a<end>b"]) == BYTES.encode("a<end>b", add_special_tokens=False)
    with pytest.raises(InvalidRequest, match="surrogate"):
        BYTES.encode_parts(["", "\ud800", ""])


def test_tokens_of_a_text_are_counted_up_to_a_place_in_it() -> None:
    parts = ["a<end>", "<end>", "b\u00e9", "", "<end>c"]
    prefixes = [[""], ["a"], ["a<end>"], ["a<end>", "<en"], ["a<end>", "<end>", "b"], parts]
    token_ids, counts = BYTES.encode_to_places(parts, prefixes)
    assert token_ids == BYTES.encode_parts(parts)
    assert counts == [len(BYTES.encode_parts(prefix)) for prefix in prefixes]
    text = "a<end>b"
    assert BYTES.encode_to_places([text], [["a"], ["a<en"], [text]]) == (
        BYTES.encode(text, add_special_tokens=False),
        [1, 1, len(BYTES.encode(text, add_special_tokens=False))],
    )


def test_a_vocabulary_that_has_a_special_token_as_a_word_is_refused_for_its_text() -> None:
    from tokenizers import AddedToken, models
    from tokenizers import Tokenizer as RawTokenizer

    raw = RawTokenizer(models.Unigram([("<unk>", 0.0), ("<end>", -1.0), ("a", -1.0)], unk_id=0))
    raw.add_special_tokens([AddedToken("<end>", special=True)])
    with pytest.raises(InvalidRequest, match="without special tokens"):
        Tokenizer(raw).encode_parts(["a", "<end>", "a"])
