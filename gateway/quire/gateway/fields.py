"""Reading of a JSON body, field by field. Pure.

Each read names the field and its allowed values; `end` refuses fields that were not read, or notes them if the gateway
ignores unknown ones. So an unknown field, a wrong type and a value out of range are each a 400 with the field's path in
`param`. A null field counts as not given, an unknown one too.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

from quire.compute.v1.sampling_ranges import Range
from quire.gateway.errors import HttpError, invalid

MAX_INT32 = 2**31 - 1
_MAX_SHOWN_NAMES = 20
# Python parses JSON in one piece: 100 ns for a number, 600 ns for an object. Meanwhile the event loop stands.
_MAX_COMMAS = 2**20
_MAX_BRACKETS = 2**18

Default = TypeVar("Default")


def parse_body(body: bytes, *, ignores_unknown: bool = False) -> "Fields":
    """Return the fields of a body. Raises HttpError if it is no JSON object, or has too many values."""
    _check_values(body)
    try:
        value = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        # UnicodeDecodeError is a ValueError; so is an integer of thousands of digits.
        why = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise HttpError(400, f"the body is no JSON: {why}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise HttpError(400, f"the body is {_kind(value)}, must be a JSON object", code="invalid_json")
    return Fields(value, ignored=[] if ignores_unknown else None)


def _check_values(body: bytes) -> None:
    """Raise HttpError for a body of more values than are parsed in one piece. Signs within its texts count, too."""
    for signs, limit in ((b",", _MAX_COMMAS), (b"[{", _MAX_BRACKETS)):
        count = sum(body.count(sign) for sign in (signs[i : i + 1] for i in range(len(signs))))
        if count > limit:
            names = " and ".join(repr(chr(sign)) for sign in signs)
            message = f"the body has {count} {names}, in texts too, must be at most {limit}"
            raise HttpError(400, message, code="too_many_values")


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


class Fields:
    """The fields of one JSON object, and its path in the body."""

    def __init__(self, values: Mapping[str, Any], path: str = "", *, ignored: list[str] | None = None) -> None:
        """path is "" for the body itself, else as "messages[0]". None as ignored: `end` refuses unknown fields."""
        self.ignored = ignored
        """Paths of unknown fields of the whole body, as far as it was read; None: they are refused."""
        self._values = values
        self._path = path
        self._read: set[str] = set()
        self.without_effect: dict[str, str] = {}
        """Reasons by path: known parts of this object's fields that have no effect."""
        self.aliases: dict[str, str] = {}
        """Paths of fields by the names that errors of the engine have for them: "grammar", "salt"."""

    def path_of(self, name: str) -> str:
        """Return the path of a field, for `param`."""
        return f"{self._path}.{name}" if self._path else name

    def has(self, name: str) -> bool:
        """Return whether a field is given and not null. It still has to be read then."""
        if self._values.get(name) is None:
            self._read.add(name)
            return False
        return True

    def take(self, name: str) -> Any:
        """Return a field's value as it is; None if it is null or not given."""
        self._read.add(name)
        return self._values.get(name)

    def require(self, name: str) -> Any:
        """Return a field's value as it is. Raises HttpError if it is not given."""
        value = self.take(name)
        if value is None:
            path = self.path_of(name)
            raise HttpError(400, f"{path} is missing", code="missing_field", param=path)
        return value

    def string(self, name: str, default: Default = None) -> str | Default:  # type: ignore[assignment]
        """Return a string."""
        value = self.take(name)
        return default if value is None else text_of(self.path_of(name), value)

    def choice(self, name: str, choices: Iterable[str], default: Default = None) -> str | Default:  # type: ignore[assignment]
        """Return one of some strings."""
        value, allowed = self.take(name), tuple(choices)
        if value is None:
            return default
        if not isinstance(value, str) or value not in allowed:
            raise invalid(self.path_of(name), value, " or ".join(map(repr, allowed)))
        return value

    def boolean(self, name: str, default: Default = False) -> bool | Default:  # type: ignore[assignment]
        """Return a boolean."""
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise invalid(self.path_of(name), value, "true or false")
        return value

    def integer(self, name: str, default: Default = None, *, low: int = 0, high: int = MAX_INT32) -> int | Default:  # type: ignore[assignment]
        """Return an integer from low to high."""
        value = self.take(name)
        return default if value is None else integer_of(self.path_of(name), value, low=low, high=high)

    def number(self, name: str, default: Default = None, *, allowed: Range) -> float | Default:  # type: ignore[assignment]
        """Return a number in a range."""
        value = self.take(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not allowed.allows(value):
            raise invalid(self.path_of(name), value, f"a number in {allowed.text}")
        return float(value)

    def array(self, name: str, *, max_length: int) -> list[Any] | None:
        """Return a list of at most this many values; None if it is not given."""
        value = self.take(name)
        return None if value is None else array_of(self.path_of(name), value, max_length=max_length)

    def object(self, name: str) -> "Fields | None":
        """Return the fields of an object; None if it is not given. Call its `end` too."""
        value = self.take(name)
        return None if value is None else object_of(self.path_of(name), value, ignored=self.ignored)

    def objects(self, name: str, *, max_length: int) -> "list[Fields] | None":
        """Return the fields of each object in a list; None if it is not given. Call `end` of each."""
        values, path = self.array(name, max_length=max_length), self.path_of(name)
        if values is None:
            return None
        return [object_of(f"{path}[{i}]", each, ignored=self.ignored) for i, each in enumerate(values)]

    def mapping(self, name: str) -> Mapping[str, Any] | None:
        """Return an object as it is; None if it is not given."""
        value = self.take(name)
        if value is not None and not isinstance(value, dict):
            raise invalid(self.path_of(name), value, "an object")
        return value

    def ignore(self, *names: str) -> None:
        """Allow these fields with any value: they change nothing in the result."""
        self._read.update(names)

    def refuse(self, name: str, why: str, *, unless: tuple[Any, ...] = ()) -> None:
        """Raise HttpError with the reason why this field is not supported, if it is given; `unless` is allowed."""
        value = self.take(name)
        if value is None or any(value == each and type(value) is type(each) for each in unless):
            return
        raise HttpError(
            400, f"{self.path_of(name)} is not supported: {why}", code="unsupported_value", param=self.path_of(name)
        )

    def end(self) -> None:
        """Raise HttpError for a field that is not null and was not read, or note it as ignored."""
        for name, value in self._values.items():
            if name in self._read or value is None:
                continue
            path = self.path_of(name if len(name) <= 64 else f"{name[:63]}…")
            if self.ignored is None:
                place = self._path or "this endpoint"
                raise HttpError(400, f"{path!r} is no field of {place}", code="unknown_field", param=path)
            self.ignored.append(path)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names given."""
        return iter(self._values)


def _kind(value: Any) -> str:
    kinds: tuple[tuple[type, str], ...] = (
        (bool, "a boolean"),
        (int, "a number"),
        (float, "a number"),
        (str, "a string"),
        (list, "a list"),
        (dict, "an object"),
    )
    return next((text for kind, text in kinds if isinstance(value, kind)), "null")


def text_of(path: str, value: Any) -> str:
    """Return a string that can be encoded. Raises HttpError."""
    if not isinstance(value, str):
        raise invalid(path, value, "a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise invalid(path, ascii(value[error.start]), "text without lone surrogates") from None
    return value


def integer_of(path: str, value: Any, *, low: int, high: int) -> int:
    """Return an integer from low to high. Raises HttpError."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise invalid(path, value, f"an integer from {low} to {high}")
    return value


def array_of(path: str, value: Any, *, max_length: int) -> list[Any]:
    """Return a list of at most this many values. Raises HttpError."""
    if not isinstance(value, list):
        raise invalid(path, value, "a list")
    if len(value) > max_length:
        raise HttpError(
            400, f"{path} has {len(value)} values, must be at most {max_length}", code="too_many_values", param=path
        )
    return value


def object_of(path: str, value: Any, *, ignored: list[str] | None = None) -> Fields:
    """Return the fields of an object; `ignored` is that of the body. Raises HttpError."""
    if not isinstance(value, dict):
        raise invalid(path, value, "an object")
    return Fields(value, path, ignored=ignored)


def token_ids_of(path: str, values: list[Any]) -> list[int]:
    """Return token ids; the model's vocabulary is looked at later. Raises HttpError."""
    for kind in {type(value) for value in values}:
        if kind is not int:
            raise invalid(path, kind.__name__, "a list of integers, the token ids")
    for value in (min(values), max(values)) if values else ():
        if not 0 <= value <= MAX_INT32:
            raise invalid(path, value, f"token ids from 0 to {MAX_INT32}")
    return values
