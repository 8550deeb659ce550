"""Tokenizers with small vocabularies, as models have them: byte-level, SentencePiece's, and others.

All have the special tokens START and END.
"""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from quire.client.engine import tokenizer as engine_tokenizer

START, END = "<s>", "</s>"
SPACE = "▁"
PIECES = ("▁the", "▁model", "▁a", "▁once", "▁▁", "the", "model", "once", "é", "\ufffd")


def byte_level(*, add_prefix_space: bool = False) -> Tokenizer:
    """Return a vocabulary like GPT-2's, with " the" as one token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: index for index, symbol in enumerate(alphabet)}
    raw = _merged(vocab, ("Ġthe", "th", "mo", "Ġmo"))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    return _with_specials(raw)


def sentence_piece(*, begins: bool = True, strips: bool = True) -> Tokenizer:
    """Return a vocabulary like Llama 2's; with begins a text gets START before it.

    With strips the tokenizer puts a space before a text, and its decoder takes it away; Gemma's does neither.
    """
    vocab = {"<unk>": 0}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    for letter in (SPACE, *sorted(set("".join(PIECES)) - {SPACE})):
        vocab[letter] = len(vocab)
    raw = _merged(vocab, PIECES, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    spaces = normalizers.Replace(" ", SPACE)
    raw.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces] if strips else [spaces])
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    raw.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strips else steps)
    return _with_specials(raw, begins=begins)


def unigram() -> Tokenizer:
    """Return a vocabulary like T5's: words begin with SPACE."""
    letters = sorted(set("".join(PIECES)) | set("bcdefghijklmnopqrstuvwxyz"))
    scores = [("<unk>", 0.0), *((piece, -1.0) for piece in PIECES if len(piece) > 1)]
    raw = Tokenizer(models.Unigram([*scores, *((letter, -5.0) for letter in letters)], unk_id=0))
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.decoder = decoders.Metaspace()
    return _with_specials(raw)


def words() -> Tokenizer:
    """Return a vocabulary of whole words, without a decoder."""
    raw = Tokenizer(models.WordLevel({"<unk>": 0, "the": 1, "model": 2, "a": 3}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return _with_specials(raw)


def word_piece() -> Tokenizer:
    """Return a vocabulary like BERT's: its decoder changes the space before marks, so its tokens have no bytes."""
    vocab = {"[UNK]": 0, "the": 1, "mo": 2, "##del": 3, ".": 4, "do": 5, "n't": 6, "a": 7}
    raw = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    raw.decoder = decoders.WordPiece()
    return _with_specials(raw)


def word_ends() -> Tokenizer:
    """Return a vocabulary like the first GPT's: the last token of a word ends in "</w>"."""
    vocab = {"the</w>": 0, "mo": 1, "del</w>": 2, "a</w>": 3, "a": 4}
    raw = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    raw.decoder = decoders.BPEDecoder()
    return _with_specials(raw)


def loaded(raw: Tokenizer) -> engine_tokenizer.Tokenizer:
    """Return a vocabulary as the engine has it."""
    return engine_tokenizer.Tokenizer(raw)


def _merged(vocab: dict[str, int], pieces: tuple[str, ...], **options: object) -> Tokenizer:
    """Return a BPE with merges that build the pieces from the left."""
    merges = []
    for piece in pieces:
        for end in range(2, len(piece) + 1):
            if piece[:end] not in vocab:
                vocab[piece[:end]] = len(vocab)
                merges.append((piece[: end - 1], piece[end - 1]))
    return Tokenizer(models.BPE(vocab=vocab, merges=merges, **options))


def _with_specials(raw: Tokenizer, *, begins: bool = False) -> Tokenizer:
    raw.add_special_tokens([AddedToken(START, special=True), AddedToken(END, special=True, normalized=False)])
    if begins:
        start = raw.token_to_id(START)
        raw.post_processor = processors.TemplateProcessing(single=f"{START} $A", special_tokens=[(START, start)])
    return raw
