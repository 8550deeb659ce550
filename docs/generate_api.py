"""Writes docs/reference/api.md from the comments of the .proto files. Usage: python docs/generate_api.py [OUTPUT]"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from importlib.resources import files
from pathlib import Path

from google.protobuf import descriptor_pb2
from grpc_tools import protoc

from quire.cache.v1 import error_pb2

PROTOS = Path(__file__).parent.parent / "protos"
HEADER = """# API reference

This page is generated from the comments in `protos/` by `make protos`. Change the comments, not this page. The
services are `quire.cache.v1.CacheService` (cachemgr), `quire.compute.v1.WorkerService` (worker) and
`quire.engine.v1.EngineService` (`quire serve`). All of them also serve `grpc.health.v1.Health` and server
reflection.
"""

# Field numbers of descriptor.proto, of which source locations are made.
MESSAGES, ENUMS, SERVICES, CHILDREN = 4, 5, 6, 2
Comments = Mapping[tuple[int, ...], str]
FieldProto = descriptor_pb2.FieldDescriptorProto


def load() -> descriptor_pb2.FileDescriptorSet:
    """All files of the contract, with their comments."""
    names = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.glob("quire/**/*.proto"))
    with tempfile.NamedTemporaryFile() as output:
        includes = [f"-I{PROTOS}", f"-I{files('grpc_tools') / '_proto'}"]
        flags = ["--include_source_info", f"--descriptor_set_out={output.name}"]
        if protoc.main(["protoc", *includes, *flags, *names]):
            sys.exit("protoc failed")
        return descriptor_pb2.FileDescriptorSet.FromString(Path(output.name).read_bytes())


def comments_of(file: descriptor_pb2.FileDescriptorProto) -> Comments:
    """The comment before each element, by its path."""
    return {
        tuple(location.path): " ".join(location.leading_comments.split()) for location in file.source_code_info.location
    }


def paragraphs(file: descriptor_pb2.FileDescriptorProto, path: tuple[int, ...]) -> str:
    """The comment before an element with its paragraphs kept."""
    for location in file.source_code_info.location:
        if tuple(location.path) == path:
            return "\n".join(line.removeprefix(" ") for line in location.leading_comments.splitlines()).strip()
    return ""


def type_name(field: FieldProto, entries: Mapping[str, str]) -> str:
    """As in the .proto file, without the package."""
    name = field.type_name.rsplit(".", 1)[-1] if field.type_name else FieldProto.Type.Name(field.type)[5:].lower()
    if name in entries:
        return entries[name]
    return f"repeated {name}" if field.label == FieldProto.LABEL_REPEATED else name


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield "| " + " | ".join(header) + " |"
    yield "|" + " --- |" * len(header)
    for row in rows:
        yield "| " + " | ".join(map(cell, row)) + " |"


def document_service(file: descriptor_pb2.FileDescriptorProto, index: int, comments: Comments) -> Iterator[str]:
    service = file.service[index]
    yield f"## {file.package}.{service.name}\n"
    yield paragraphs(file, (SERVICES, index)) + "\n"
    for number, method in enumerate(service.method):
        request, response = (name.rsplit(".", 1)[-1] for name in (method.input_type, method.output_type))
        request = f"stream {request}" if method.client_streaming else request
        response = f"stream {response}" if method.server_streaming else response
        yield f"### {method.name}\n\n`{request}` → `{response}`\n"
        yield comments.get((SERVICES, index, CHILDREN, number), "") + "\n"


def document_message(file: descriptor_pb2.FileDescriptorProto, index: int, comments: Comments) -> Iterator[str]:
    message = file.message_type[index]
    entries = {
        entry.name: f"map<{type_name(entry.field[0], {})}, {type_name(entry.field[1], {})}>"
        for entry in message.nested_type
        if entry.options.map_entry
    }
    yield f"### {message.name}\n\n{comments.get((MESSAGES, index), '')}\n"
    rows = (
        (f"`{field.name}`", f"`{type_name(field, entries)}`", comments.get((MESSAGES, index, CHILDREN, number), ""))
        for number, field in enumerate(message.field)
    )
    if message.field:
        yield from table(("field", "type", "meaning"), rows)
        yield ""


def document_enum(file: descriptor_pb2.FileDescriptorProto, index: int, comments: Comments) -> Iterator[str]:
    enum = file.enum_type[index]
    prefix = re.sub(r"(?<!^)(?=[A-Z])", "_", enum.name).upper() + "_"
    yield f"### {enum.name}\n\n{comments.get((ENUMS, index), '')}\n"
    domain = enum.options.Extensions[error_pb2.error_domain]
    if domain:
        yield f"The domain of these reasons in an `ErrorInfo` is `{domain}`.\n"
    rows = (
        (f"`{value.name.removeprefix(prefix)}`", *status(value), comments.get((ENUMS, index, CHILDREN, number), ""))
        for number, value in enumerate(enum.value)
        if value.number
    )
    header = ("code", "retry after") if domain else ()
    yield from table((f"`{prefix}…`", *header, "meaning"), rows)
    yield ""


def status(value: descriptor_pb2.EnumValueDescriptorProto) -> tuple[str, ...]:
    """The status of a reason of errors: its gRPC code, and the retry delay. Of another value: nothing."""
    options = value.options.Extensions
    if error_pb2.status_code not in options:
        return ()
    code = error_pb2.StatusCode.Name(options[error_pb2.status_code]).removeprefix("STATUS_CODE_")
    return code, f"{options[error_pb2.retry_delay_ms]} ms" if error_pb2.retry_delay_ms in options else ""


def document() -> Iterator[str]:
    """The page, line by line: services first, then what they are made of, package by package."""
    yield HEADER
    described = [(file, comments_of(file)) for file in load().file]
    for file, comments in described:
        for index in range(len(file.service)):
            yield from document_service(file, index, comments)
    for file, comments in described:
        yield f"## Messages of {file.name}\n"
        for index in range(len(file.enum_type)):
            yield from document_enum(file, index, comments)
        for index in range(len(file.message_type)):
            yield from document_message(file, index, comments)


def main() -> None:
    output = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "reference" / "api.md"
    output.write_text("\n".join(document()).rstrip() + "\n")


if __name__ == "__main__":
    main()
