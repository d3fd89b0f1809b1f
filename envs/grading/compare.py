"""Is what came back what was expected? Strict in types, on the host, on values the codec rebuilt."""

from __future__ import annotations

import math
from typing import Any


def equal(got: Any, expected: Any, *, rel_tol: float = 0.0) -> bool:
    """Same value and same types all the way down: ``True`` is not ``1``, ``1`` is not ``1.0``, ``[1]`` is not ``(1,)``.

    ``nan`` equals ``nan``. With ``rel_tol`` > 0 a number (no bool) is compared to an expected float within that
    relative tolerance; keys of dicts and members of sets stay exact.
    """
    if rel_tol > 0.0:
        return _close(got, expected, rel_tol)
    return bool(_canonical(got) == _canonical(expected))


def _canonical(value: Any) -> Any:
    """A hashable stand-in in which equal means equal with types."""
    kind = type(value)
    if kind in (list, tuple):
        return kind.__name__, tuple(map(_canonical, value))
    if kind in (set, frozenset):
        return kind.__name__, frozenset(map(_canonical, value))
    if kind is dict:
        return "dict", frozenset((_canonical(key), _canonical(item)) for key, item in value.items())
    if kind is float and math.isnan(value):
        return "float", "nan"
    if kind is complex:
        return "complex", _canonical(value.real), _canonical(value.imag)
    return kind.__name__, value


def _close(got: Any, expected: Any, rel_tol: float) -> bool:
    kind = type(expected)
    if kind is float and type(got) in (int, float):
        if math.isnan(expected):
            return math.isnan(float(got))
        try:
            return math.isclose(got, expected, rel_tol=rel_tol)
        except OverflowError:
            return False
    if kind is not type(got):
        return False
    if kind in (list, tuple):
        return len(got) == len(expected) and all(_close(g, e, rel_tol) for g, e in zip(got, expected, strict=True))
    if kind is dict:
        wanted = {_canonical(key): item for key, item in expected.items()}
        found = {_canonical(key): item for key, item in got.items()}
        return wanted.keys() == found.keys() and all(_close(found[key], wanted[key], rel_tol) for key in wanted)
    return bool(_canonical(got) == _canonical(expected))


def show(value: Any, *, max_chars: int = 1000) -> str:
    """``repr`` for people: sets in a fixed order, huge integers and long texts cut."""
    text = _show(value)
    return text if len(text) <= max_chars else f"{text[: max_chars // 2]}...{text[-max_chars // 2 :]}"


def _show(value: Any) -> str:
    kind = type(value)
    if kind is int and value.bit_length() > 10_000:
        return f"<int of {value.bit_length()} bits>"
    if kind is list:
        return f"[{', '.join(map(_show, value))}]"
    if kind is tuple:
        return f"({', '.join(map(_show, value))}{',' if len(value) == 1 else ''})"
    if kind is set and value:
        return f"{{{', '.join(sorted(map(_show, value)))}}}"
    if kind is frozenset and value:
        return f"frozenset({{{', '.join(sorted(map(_show, value)))}}})"
    if kind is dict:
        return f"{{{', '.join(f'{_show(key)}: {_show(item)}' for key, item in value.items())}}}"
    return repr(value)
