"""Values to text: the half of the codec that also runs in cells. It imports nothing, so that a cell starts fast.

The text is JSON in ASCII without newlines. ``None``, ``bool``, short ``int`` and plain ``str`` stand for themselves;
everything else is an array that begins with its tag: ``["f", "0x1.8p+1"]``. Types are exact: a subclass (an enum, a
named tuple, a str that lies about itself) is not a value, because it could behave unlike one.
"""

from __future__ import annotations

from typing import Any

MAX_DEPTH = 64
"""Levels of nesting."""
MAX_NODES = 200_000
"""Values in one value, counting itself."""
_SHORT_INT_BITS = 1024
_TAGS: dict[Any, str] = {list: "l", tuple: "t", set: "s", frozenset: "z"}


class UnsupportedValue(Exception):
    """The value is not built of None, bool, int, float, complex, str, bytes, list, tuple, set, frozenset and dict."""


class ValueTooLarge(UnsupportedValue):
    """It is built of nothing else, but of too many or too deep."""


def encode(value: Any) -> str:
    """One value as one line of ASCII. Raises ``UnsupportedValue`` that says what stood in the way."""
    parts: list[str] = []
    _encode(value, parts, 0)
    return "".join(parts)


def _encode(value: Any, parts: list[str], depth: int) -> None:
    if depth > MAX_DEPTH:
        raise ValueTooLarge(f"nested deeper than {MAX_DEPTH} levels")
    if len(parts) > 3 * MAX_NODES:
        raise ValueTooLarge(f"more than {MAX_NODES} values")
    kind = type(value)
    if value is None:
        parts.append("null")
    elif kind is bool:
        parts.append("true" if value else "false")
    elif kind is int:
        parts.append(str(value) if value.bit_length() <= _SHORT_INT_BITS else f'["i","{value:x}"]')
    elif kind is str:
        parts.append(_text(value))
    elif kind is float:
        parts.append(f'["f","{value.hex()}"]')
    elif kind is complex:
        parts.append(f'["c","{value.real.hex()}","{value.imag.hex()}"]')
    elif kind is bytes:
        parts.append(f'["b","{value.hex()}"]')
    elif kind is dict:
        parts.append('["d"')
        for key, item in value.items():
            parts.append(",")
            _encode(key, parts, depth + 1)
            parts.append(",")
            _encode(item, parts, depth + 1)
        parts.append("]")
    else:
        tag = _TAGS.get(kind)
        if tag is None:
            raise UnsupportedValue(f"unsupported type '{kind.__name__}'")
        parts.append(f'["{tag}"')
        for item in value:
            parts.append(",")
            _encode(item, parts, depth + 1)
        parts.append("]")


def _text(text: str) -> str:
    """A str as JSON; hexadecimal UTF-8 (lone surrogates included) where it is not plain ASCII."""
    if text.isascii() and text.isprintable() and '"' not in text and "\\" not in text:
        return f'"{text}"'
    return '["u","{}"]'.format(text.encode("utf-8", "surrogatepass").hex())
