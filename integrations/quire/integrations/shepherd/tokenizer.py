"""The files of a tokenizer as one archive, for an smg that has no access to their folder."""

from __future__ import annotations

import io
import zipfile

from quire.gateway.chat.templates import find_file

_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja", "config.json", "generation_config.json"),
)


def archive_of(source: str) -> bytes:
    """Return a zip archive of a tokenizer's files; nothing if there are none. Blocks on files and the network."""
    found = [path for name in _TOKENIZER_FILES if (path := find_file(source, name)) is not None]
    if not any(path.name == _TOKENIZER_FILES[0] for path in found):
        return b""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in found:
            # The date is always the same: equal files have equal digests.
            archive.writestr(zipfile.ZipInfo(path.name), path.read_bytes(), zipfile.ZIP_DEFLATED)
    return buffer.getvalue()
