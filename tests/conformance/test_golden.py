"""The bytes of every message do not change. Go reads the same file, in client/go."""

import pytest
from conformance import golden
from conformance.golden import Entry
from google.protobuf import text_format

ENTRIES = golden.read()


@pytest.mark.parametrize("entry", ENTRIES, ids=[f"{index}-{entry.name}" for index, entry in enumerate(ENTRIES)])
def test_text_and_bytes_say_the_same(entry: Entry) -> None:
    from_text, from_wire = golden.new_message(entry.name), golden.new_message(entry.name)
    text_format.Parse(entry.text, from_text)
    from_wire.ParseFromString(entry.wire)
    assert from_text.SerializeToString(deterministic=True) == entry.wire
    assert from_wire == from_text


def test_every_message_and_every_field_has_its_bytes() -> None:
    canonical = [(m.DESCRIPTOR.full_name, m.SerializeToString(deterministic=True)) for m in golden.canonical_messages()]
    assert [(entry.name, entry.wire) for entry in ENTRIES] == canonical
