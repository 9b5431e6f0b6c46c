"""From JSON to the dataclasses of the report, strictly: whatever is in a file, nothing of another type comes in.

A field that is not known is ignored, since newer versions add some. A field that is missing has its default, or is an
error; so is a value of another type.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

MAX_TEXT = 4096  # letters kept of a text; whoever chose it may have chosen a long one
MAX_INTEGER = 1 << 64

T = TypeVar("T")


class DecodeError(ValueError):
    """A value is not what it should be; says which one, and what was expected."""


def decode_fields(kind: type[T], fields: dict[str, Any], *, where: str = "") -> T:
    """An instance of the dataclass ``kind`` from a JSON object.

    Args:
        kind: a dataclass of ``str``, ``int``, ``float``, ``bool``, dataclasses, tuples of these, mappings from ``str``
            to these, and unions with ``None``.
        fields: the object, as ``json`` returns it.
        where: name of the field that holds the object, for messages.

    Raises:
        DecodeError: a field is missing or of another type.
    """
    values = {}
    for name, hint, is_needed in _fields_of(cast(Any, kind)):
        path = f"{where}.{name}" if where else name
        if name in fields:
            values[name] = decode_value(hint, fields[name], path)
        elif is_needed:
            raise DecodeError(f"has no field {path!r}")
    return kind(**values)


def decode_value(hint: Any, value: Any, where: str) -> Any:
    """``value`` as the type ``hint`` says, or :class:`DecodeError`."""
    origin, arguments = _parts_of(hint)
    if origin in (Union, types.UnionType):
        if value is None:
            return None
        return decode_value(next(kind for kind in arguments if kind is not type(None)), value, where)
    if origin is tuple:
        return _decode_tuple(arguments, value, where)
    if origin is dict:
        _expect(isinstance(value, dict), where, "an object", value)
        return {
            name[:MAX_TEXT]: decode_value(arguments[1], item, f"{where}.{name[:80]}") for name, item in value.items()
        }
    if dataclasses.is_dataclass(hint):
        _expect(isinstance(value, dict), where, "an object", value)
        return decode_fields(cast(Any, hint), value, where=where)
    return _decode_scalar(hint, value, where)


def _decode_tuple(arguments: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    _expect(isinstance(value, list), where, "a list", value)
    if arguments[-1] is Ellipsis:
        return tuple(decode_value(arguments[0], item, f"{where}[{index}]") for index, item in enumerate(value))
    _expect(len(value) == len(arguments), where, f"a list of {len(arguments)}", value)
    return tuple(
        decode_value(hint, item, f"{where}[{index}]")
        for index, (hint, item) in enumerate(zip(arguments, value, strict=True))
    )


def _decode_scalar(hint: Any, value: Any, where: str) -> Any:
    if hint is str:
        _expect(isinstance(value, str), where, "a text", value)
        return value if len(value) <= MAX_TEXT else value[:MAX_TEXT] + "..."
    if hint is bool:
        _expect(isinstance(value, bool), where, "true or false", value)
        return value
    if hint is int:
        is_good = isinstance(value, int) and not isinstance(value, bool) and abs(value) <= MAX_INTEGER
        _expect(is_good, where, "a whole number below 2^64", value)
        return value
    if hint is float:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        is_good = is_number and abs(value) <= MAX_INTEGER and math.isfinite(value)
        _expect(is_good, where, "a number below 2^64", value)
        return float(value)
    raise TypeError(f"no way to decode a {hint}")


@functools.cache
def _fields_of(kind: Any) -> tuple[tuple[str, Any, bool], ...]:
    hints = get_type_hints(kind)
    return tuple(
        (
            field.name,
            hints[field.name],
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING,
        )
        for field in dataclasses.fields(kind)
    )


@functools.cache
def _parts_of(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    return get_origin(hint), get_args(hint)


def _expect(is_good: bool, where: str, expected: str, value: Any) -> None:
    if is_good:
        return
    if isinstance(value, (dict, list)):
        found = "an object" if isinstance(value, dict) else f"a list of {len(value)}"
    elif isinstance(value, int) and abs(value) > MAX_INTEGER:
        found = "a larger one"
    else:
        found = f"{value!a:.80}"
    raise DecodeError(f"has in field {where!a:.200} not {expected} but {found}")
