"""Strict JSON for frozen dataclasses: what is read has exactly the fields and types that the class declares.

    type hint                  JSON
    str, int, float, bool      that and nothing else: 1 is no float, true is no integer
    X | None, int | str        null or X; either
    tuple[X, ...]              a list
    Mapping[str, X]            an object with any keys
    a dataclass                an object with every field and no other key

A wrong value raises `FieldError` with its place in the document, such as `graphs.target.inputs[3].dtype`.
"""

from __future__ import annotations

import json
import re
from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from xpress_export.errors import BundleError

_LINE_WIDTH = 110


class FieldError(BundleError):
    """A field that is wrong in itself; the decoder puts the record's own place in front of its name."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field} {problem}")
        self.field, self.problem = field, problem


def dump(value: Any, indent: str = "", lead: int = 0) -> str:
    """JSON indented by 2, each container on one line where it fits; ASCII, so that any name survives.

    lead: characters before the value on its line, indentation aside.
    """
    flat = json.dumps(value, allow_nan=False)
    is_leaf = not value or not isinstance(value, (dict, list, tuple))
    if is_leaf or len(indent) + lead + len(flat) < _LINE_WIDTH:
        return flat
    deeper = indent + "  "
    if isinstance(value, dict):
        keys = {key: f"{json.dumps(key)}: " for key in value}
        items = [text + dump(value[key], deeper, len(text)) for key, text in keys.items()]
    else:
        items = [dump(item, deeper) for item in value]
    left, right = "{}" if isinstance(value, dict) else "[]"
    return left + ",".join(f"\n{deeper}{item}" for item in items) + f"\n{indent}{right}"


def show(value: object) -> str:
    """A value as a message prints it: ASCII, and short."""
    text = json.dumps(value) if value is None or isinstance(value, bool) else ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def load_object(text: str) -> dict[str, Any]:
    """The JSON object in `text`, refusing repeated keys and NaN."""
    try:
        value = json.loads(text, object_pairs_hook=_no_repeats, parse_constant=_no_constant)
    except (ValueError, RecursionError) as err:
        problem = "this is not valid JSON" if text.rstrip().endswith("}") else "the file is cut short"
        raise BundleError(f"{problem} ({err})") from err
    if not isinstance(value, dict):
        raise BundleError(f"one JSON object was expected, got {_kind(value)}")
    return value


def require(raw: dict[str, Any], key: str) -> Any:
    """`raw[key]`, which has to be there."""
    if key not in raw:
        raise FieldError(key, "is missing")
    return raw[key]


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError(f"an object repeats one of its keys {show([key for key, _ in pairs])}")
    return found


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def decode(hint: Any, value: Any, where: str) -> Any:
    """`value`, as JSON gave it, checked against a type hint and made of tuples and dataclasses.

    where: its place in the document, empty for the document itself.
    """
    origin, args = get_origin(hint), get_args(hint)
    if origin is UnionType:
        return _decode_union(args, value, where)
    if is_dataclass(hint):
        return _decode_record(hint, value, where)
    if origin is tuple:
        _expect(list, value, where)
        return tuple(decode(args[0], item, f"{where}[{n}]") for n, item in enumerate(value))
    if origin is not None:  # Mapping[str, item]
        _expect(dict, value, where)
        return {key: decode(args[1], item, f"{where}.{key_name(key)}") for key, item in value.items()}
    _expect(hint, value, where)
    return value


def _decode_union(options: tuple[Any, ...], value: Any, where: str) -> Any:
    """`X | None`, or a union of plain types such as `int | str`."""
    if value is None and NoneType in options:
        return None
    rest = [option for option in options if option is not NoneType]
    if len(rest) == 1:
        return decode(rest[0], value, where)
    if type(value) not in rest:
        _expect(rest[0], value, where, " or ".join(_KINDS[option] for option in rest))
    return value


def _decode_record(cls: Any, value: Any, where: str) -> Any:
    _expect(dict, value, where)
    hints = _hints(cls)
    prefix = f"{where}." if where else ""
    for key in value:
        if key not in hints:
            raise FieldError(f"{prefix}{key_name(key)}", f"is unknown, expected only {', '.join(hints)}")
    for key in hints:
        if key not in value:
            raise FieldError(f"{prefix}{key}", "is missing")
    decoded = {key: decode(hint, value[key], f"{prefix}{key}") for key, hint in hints.items()}
    try:
        return cls(**decoded)
    except FieldError as err:
        raise FieldError(f"{prefix}{err.field}", err.problem) from err


@cache
def _hints(cls: Any) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in fields(cls)}


_KINDS: dict[type, str] = {
    str: "a string",
    int: "an integer",
    float: "a number with a decimal point",
    bool: "true or false",
    list: "a list",
    dict: "an object",
    NoneType: "null",
}


def _kind(value: object) -> str:
    return _KINDS[type(value)]


def _expect(kind: type, value: Any, where: str, described: str = "") -> None:
    if type(value) is not kind:
        got = _kind(value) if isinstance(value, (dict, list)) else show(value)
        raise FieldError(where, f"should be {described or _KINDS[kind]}, got {got}")


def key_name(key: str) -> str:
    """A key of a document as part of a place in it."""
    return key if re.fullmatch(r"[\w-]+", key, re.ASCII) else show(key)
