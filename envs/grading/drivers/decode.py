"""Text to values: the half of the codec that reads what an untrusted process wrote. It never runs anything."""

from __future__ import annotations

import json
from typing import Any

from palaestra.envs.grading.drivers.encode import MAX_DEPTH

MAX_COLLIDING = 64
"""Members of one set, or keys of one dict, that may have the same hash."""


class MalformedValue(Exception):
    """The text is not what ``encode`` writes; whoever wrote it is broken or lying."""


def decode(text: str | bytes) -> Any:
    """The value that ``encode`` wrote, with exactly its type. Raises ``MalformedValue`` on anything else."""
    try:
        return _decode(json.loads(text, parse_float=_no_float, parse_constant=_no_float), 0)
    except MalformedValue:
        raise
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, OverflowError) as error:
        raise MalformedValue(f"{type(error).__name__}: {error}") from None


def _no_float(text: str) -> Any:
    raise MalformedValue(f"bare float {text[:40]}")


def _decode(node: Any, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise MalformedValue(f"nested deeper than {MAX_DEPTH} levels")
    if node is None or type(node) in (bool, int, str):
        return node
    if type(node) is not list or not node or type(node[0]) is not str:
        raise MalformedValue("an array must begin with its tag")
    tag, items = node[0], node[1:]
    if tag in _SCALARS:
        arity, build = _SCALARS[tag]
        if len(items) != arity or any(type(item) is not str for item in items):
            raise MalformedValue(f"tag {tag!r} takes {arity} texts")
        return build(*items)
    values = [_decode(item, depth + 1) for item in items]
    if tag == "d":
        if len(values) % 2:
            raise MalformedValue("a dict needs pairs")
        return dict(zip(_spread(values[::2]), values[1::2]))  # noqa: B905 - strict= is newer than the oldest cell's Python
    if tag not in _CONTAINERS:
        raise MalformedValue(f"unknown tag {tag[:20]!r}")
    return _CONTAINERS[tag](_spread(values) if tag in "sz" else values)


def _spread(members: list[Any]) -> list[Any]:
    """Refuse members made to collide in a hash table, which would take quadratic time to build, and to compare."""
    counts: dict[int, int] = {}
    for value in map(hash, members):
        counts[value] = counts.get(value, 0) + 1
    if max(counts.values(), default=0) > MAX_COLLIDING:
        raise MalformedValue("members of a set or keys of a dict collide")
    return members


def _unhexed(digits: str) -> str:
    return bytes.fromhex(digits).decode("utf-8", "surrogatepass")


_SCALARS: dict[str, Any] = {
    "i": (1, lambda digits: int(digits, 16)),
    "f": (1, float.fromhex),
    "c": (2, lambda real, imag: complex(float.fromhex(real), float.fromhex(imag))),
    "b": (1, bytes.fromhex),
    "u": (1, _unhexed),
}
_CONTAINERS: dict[str, Any] = {"l": list, "t": tuple, "s": set, "z": frozenset}
