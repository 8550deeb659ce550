"""A lower bound of a text's tokens from its length, so that a text that can't fit is refused before it is encoded.

Each character's first byte is in exactly one token, if the tokenizer leaves out no part of a text. So a text has at
least its characters, divided by the most characters that begin in one token. There is no bound if something may leave
out any length of text: a normalizer or a split that removes, an unknown token for a run of characters, an added token
that takes the white space beside it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quire.client.engine.token_bytes import TokenBytes

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RawTokenizer

# Unicode's compositions: at most this many characters become one.
_COMPOSED = {"NFC": 4, "NFKC": 4, "NFD": 1, "NFKD": 1}
_WHOLE_SPLITS = frozenset({"ByteLevel", "Digits", "Metaspace", "UnicodeScripts"})


def max_token_characters(raw: RawTokenizer, token_bytes: TokenBytes) -> int:
    """Return the most characters of a text that become one token; 0 if there is no such limit. Looks at each token."""
    shrinking = _shrinking_of(_state(raw.normalizer))
    added = raw.get_added_tokens_decoder().values()
    if not shrinking or not token_bytes.is_exact or any(token.lstrip or token.rstrip for token in added):
        return 0
    if not _keeps_all(_state(raw.pre_tokenizer)) or not _has_token_for_all(raw):
        return 0
    longest = max((_num_begun(token_bytes.of(token_id)) for token_id in raw.get_vocab().values()), default=0)
    return longest * shrinking


def _state(part: Any) -> Mapping[str, Any] | None:
    return None if part is None else json.loads(part.__getstate__())


def _shrinking_of(normalizer: Mapping[str, Any] | None) -> int:
    """Return the most characters that the normalizer makes one of; 0 if it may remove any number."""
    if normalizer is None or normalizer["type"] == "Prepend":
        return 1
    if normalizer["type"] == "Sequence":
        most = 1
        for each in normalizer["normalizers"]:
            most *= _shrinking_of(each)
        return most
    if normalizer["type"] == "Replace":
        pattern = normalizer["pattern"].get("String", "")
        return 1 if 0 < len(pattern) <= len(normalizer["content"]) else 0
    return _COMPOSED.get(normalizer["type"], 0)


def _keeps_all(splitter: Mapping[str, Any] | None) -> bool:
    """Return whether all of a text is in its parts."""
    if splitter is None or splitter["type"] in _WHOLE_SPLITS:
        return True
    if splitter["type"] == "Sequence":
        return all(map(_keeps_all, splitter["pretokenizers"]))
    return splitter["type"] in ("Split", "Punctuation") and splitter["behavior"] != "Removed"


def _has_token_for_all(raw: RawTokenizer) -> bool:
    """Return whether each character becomes a token: of its bytes, or an unknown one of its own."""
    from tokenizers.models import BPE

    if not isinstance(raw.model, BPE):
        return False
    if raw.model.byte_fallback or "ByteLevel" in json.dumps(_state(raw.pre_tokenizer)):
        return True
    return raw.model.unk_token is not None and not raw.model.fuse_unk


def _num_begun(token: bytes) -> int:
    """Return how many characters begin in a token, at least one."""
    return max(1, sum(byte & 0xC0 != 0x80 for byte in token))
