"""One canonical instance of every message of the contract, as text and as bytes: golden.txt, read from Python and Go.

    python tests/conformance/golden.py     writes golden.txt anew, with every field of every message set

An entry that changes means that bytes which others have stored or send no longer say the same. Entries that come anew
are fine. Of a oneof each alternative has an entry of its own.

    message: quire.cache.v1.RenewLeaseRequest
    lease_id: "lease_id-1"
    wire: 0a0a6c656173655f69642d31
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from google.protobuf import message_factory, text_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor, OneofDescriptor
from google.protobuf.message import Message

from quire.cache.v1 import attach_pb2, cache_service_pb2, error_pb2, grant_pb2
from quire.compute.v1 import worker_service_pb2
from quire.engine.v1 import engine_service_pb2

PATH = Path(__file__).with_name("golden.txt")
FILES = (error_pb2, grant_pb2, attach_pb2, cache_service_pb2, worker_service_pb2, engine_service_pb2)
HEADER = "# Written by golden.py, which says what this is.\n"

_INTEGERS = {FieldDescriptor.TYPE_INT32: 2**31 - 1, FieldDescriptor.TYPE_INT64: 2**63 - 1}
_FLOATS = (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE)


@dataclass(frozen=True, slots=True)
class Entry:
    """A message's full name, its text and its bytes."""

    name: str
    text: str
    wire: bytes


def descriptors() -> list[Descriptor]:
    """Every message of the contract, those of map fields not counted, in the order of the files."""
    return [descriptor for file in FILES for descriptor in file.DESCRIPTOR.message_types_by_name.values()]


def new_message(name: str) -> Message:
    """An empty message by its full name."""
    (descriptor,) = [descriptor for descriptor in descriptors() if descriptor.full_name == name]
    return message_factory.GetMessageClass(descriptor)()


def read() -> list[Entry]:
    """The entries of golden.txt."""
    paragraphs = PATH.read_text().removeprefix(HEADER).strip().split("\n\n")
    return [_parse(paragraph.splitlines()) for paragraph in paragraphs]


def _parse(lines: list[str]) -> Entry:
    first, *text, last = lines
    assert first.startswith("message: "), first
    assert last.startswith("wire: ") or last == "wire:", last
    return Entry(first.removeprefix("message: "), "\n".join(text), bytes.fromhex(last.removeprefix("wire:")))


def write() -> None:
    """Writes golden.txt anew."""
    PATH.write_text(HEADER + "".join(f"\n{_entry(message)}" for message in canonical_messages()))


def _entry(message: Message) -> str:
    text = text_format.MessageToString(message)
    wire = message.SerializeToString(deterministic=True).hex()
    return f"message: {message.DESCRIPTOR.full_name}\n{text}wire: {wire}".rstrip() + "\n"


def canonical_messages() -> Iterator[Message]:
    """Each message with all fields set; one with a oneof once for each alternative."""
    for descriptor in descriptors():
        for chosen in _alternatives(descriptor):
            message = message_factory.GetMessageClass(descriptor)()
            _fill(message, chosen)
            message.SetInParent()
            yield message


def _oneofs(descriptor: Descriptor) -> list[OneofDescriptor]:
    """Without those that only say that a field is optional."""
    return [oneof for oneof in descriptor.oneofs if not oneof.name.startswith("_")]


def _alternatives(descriptor: Descriptor) -> list[FieldDescriptor | None]:
    oneofs = _oneofs(descriptor)
    assert len(oneofs) <= 1, f"{descriptor.full_name}: which alternatives belong together is not decided"
    return list(oneofs[0].fields) if oneofs else [None]


def _fill(message: Message, chosen: FieldDescriptor | None) -> None:
    excluded = {field.name for oneof in _oneofs(message.DESCRIPTOR) for field in oneof.fields}
    for field in message.DESCRIPTOR.fields:
        if field.name not in excluded or field is chosen:
            _set(message, field)


def _set(message: Message, field: FieldDescriptor) -> None:
    """Gives a field a value made of its name and number: two fields that were exchanged would not look alike."""
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
        at = "OUT_OF_BLOCKS" if key.type == FieldDescriptor.TYPE_STRING else _scalar(key, field.number)
        getattr(message, field.name)[at] = _scalar(value, field.number)
    elif field.message_type is not None:
        child = getattr(message, field.name).add() if field.is_repeated else getattr(message, field.name)
        _fill(child, _alternatives(field.message_type)[0])
        child.SetInParent()
    elif field.is_repeated:
        values = [_scalar(field, field.number), _scalar(field, field.number + 1)]
        getattr(message, field.name).extend([*values, *_largest(field)])
    else:
        setattr(message, field.name, _scalar(field, field.number))


def _scalar(field: FieldDescriptor, number: int) -> str | bytes | bool | float | int:
    if field.type == FieldDescriptor.TYPE_STRING:
        return f"{field.name}-{number}-é"
    if field.type == FieldDescriptor.TYPE_BYTES:
        return bytes([0, number, 255])
    if field.type == FieldDescriptor.TYPE_BOOL:
        return True
    if field.type in _FLOATS:
        return number + 0.5
    if field.type == FieldDescriptor.TYPE_ENUM:
        values = field.enum_type.values
        return int(values[min(number, len(values) - 1)].number)
    assert field.type in _INTEGERS, f"{field.full_name} is of a type that the contract does not use"
    return number * 1000


def _largest(field: FieldDescriptor) -> list[int]:
    """Numbers at which encodings differ."""
    return [0, -1, _INTEGERS[field.type]] if field.type in _INTEGERS else []


if __name__ == "__main__":
    write()
