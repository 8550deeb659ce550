"""The texts, bytes and positions of tokens in log-probabilities."""

import re

from hypothesis import example, given
from hypothesis import strategies as st
from vocabularies import END, START, byte_level, loaded, sentence_piece, unigram, words

from quire.client.engine.prompt_logprobs import TokenLogprobs
from quire.gateway.openai.answers import CompletionLogprobs
from quire.gateway.token_texts import TokenTexts

VOCABULARIES = {
    "byte level": byte_level(),
    "byte level, space before": byte_level(add_prefix_space=True),
    "sentence piece": sentence_piece(),
    "sentence piece, no space before": sentence_piece(strips=False),
    "unigram": unigram(),
    "words": words(),
}
LLAMA = VOCABULARIES["sentence piece"]
TEXTS = TokenTexts(loaded(LLAMA))

texts = st.text(st.sampled_from("the model once é 😀你\ufffd"), max_size=12)


def ids_of(*tokens: str) -> list[int]:
    return [LLAMA.token_to_id(token) for token in tokens]


def raw_of(text: str) -> bytes:
    """Return the bytes of a token's text."""
    if not text.startswith("bytes:"):
        return text.encode()
    written = text.removeprefix("bytes:").encode()
    return re.sub(rb"\\x(..)", lambda found: bytes.fromhex(found[1].decode()), written)


@given(st.sampled_from(sorted(set(VOCABULARIES) - {"unigram", "words"})), texts, texts)
@example("sentence piece", "the", " the")
@example("sentence piece", " the", "the")
def test_the_tokens_of_a_prompt_join_to_its_text(name: str, before: str, after: str) -> None:
    tokenizer = loaded(VOCABULARIES[name])
    text = f"{before}{END}{after}"
    tokens = [each for each in TokenTexts(tokenizer).of_prompt(text, tokenizer.encode(text)) if each.text != START]
    assert b"".join(raw_of(token.text) for token in tokens) == text.encode()
    for token in tokens:
        assert token.text.startswith("bytes:") or text[token.position :].startswith(token.text)
        assert token.position < len(text) or not token.text


@given(st.sampled_from(sorted(VOCABULARIES)), texts)
def test_positions_stay_in_a_text_that_the_tokenizer_changes(name: str, text: str) -> None:
    tokenizer = loaded(VOCABULARIES[name])
    positions = [token.position for token in TokenTexts(tokenizer).of_prompt(text, tokenizer.encode(text))]
    assert positions == sorted(positions)
    assert all(0 <= position <= len(text) for position in positions)


@given(st.lists(st.integers(0, LLAMA.get_vocab_size() + 3), max_size=16), st.booleans())
def test_positions_are_those_in_the_generated_text(token_ids: list[int], skips: bool) -> None:
    tokenizer = loaded(LLAMA)
    tokens = TEXTS.after(ids_of("▁the"), skip_special_tokens=skips, num_characters=3)
    detokenizer = tokenizer.detokenizer(ids_of("▁the"), skip_special_tokens=skips)
    text = "the" + detokenizer.push(token_ids)
    for token_id in token_ids:
        added, name = tokens.bytes_of(token_id), tokens.text_of(token_id)
        position = tokens.take(token_id)
        if added and not name.startswith("bytes:"):
            assert text[position : position + len(name)] == name
        assert position <= len(text) + 4  # bytes that begin a character at the end are not in the text


def test_a_character_that_breaks_off_counts_as_its_replacements() -> None:
    tokens = TEXTS.after([], skip_special_tokens=True)
    positions = [tokens.take(token_id) for token_id in ids_of("<0xF0>", "<0x9F>", "a", "<0xFF>", "a")]
    assert positions == [0, 0, 2, 3, 4]


def test_a_text_that_two_tokens_have_is_one_key_and_the_others_are_ids() -> None:
    letter, byte, cut, other = ids_of("a", "<0x61>", "<0xF0>", "<0xF1>")
    logprobs = CompletionLogprobs(TEXTS, TEXTS.after(ids_of("▁the"), skip_special_tokens=True))
    entry = TokenLogprobs(byte, -3.0, ((letter, -1.0), (cut, -2.0), (other, -2.5)))
    [top] = logprobs.part([entry])["top_logprobs"]
    assert top == {f"token_id:{letter}": -1.0, "bytes:\\xf0": -2.0, "bytes:\\xf1": -2.5, "a": -3.0}


def test_without_a_tokenizer_tokens_are_their_ids() -> None:
    texts = TokenTexts(None)
    tokens = texts.after([1], skip_special_tokens=True)
    assert (tokens.text_of(17), tokens.bytes_of(17), tokens.take(17), tokens.take(18)) == ("token_id:17", b"", 0, 0)
    assert [token.text for token in texts.of_prompt("", [5])] == ["token_id:5"]


def test_a_token_that_the_tokenizer_does_not_have_is_its_id() -> None:
    assert TEXTS.of(10**6) == TEXTS.after([], skip_special_tokens=True).text_of(10**6) == "token_id:1000000"
