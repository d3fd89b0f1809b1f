"""The names in repair lines, which split each belongs to, and which of them CPython may suggest for another."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from functools import cache
from typing import Literal

Split = Literal["train", "held_out"]

# fmt: off
VERBS = (
    "load", "read", "send", "find", "make", "push", "pull", "scan", "pick", "copy", "save", "open", "fill", "move",
    "hold", "wrap",
)
NOUNS = (
    "row", "col", "key", "tag", "job", "log", "map", "bit", "box", "day", "cup", "pin", "web", "net", "arc", "hub",
)
# fmt: on


def split_of(name: str) -> Split:
    """The split that a name belongs to, for good: by checksum, about a fifth is held out."""
    return "held_out" if zlib.crc32(name.encode()) % 5 == 0 else "train"


@cache
def names(split: Split) -> tuple[str, ...]:
    """The names of one split: 191 for training, 65 held out."""
    return tuple(name for verb in VERBS for noun in NOUNS if split_of(name := f"{verb}_{noun}") == split)


def is_suggested(wrong: str, candidate: str) -> bool:
    """Whether CPython may offer ``candidate`` for ``wrong``: edit distance at most a third of both lengths.

    The rule of ``Python/suggestions.c`` (and of ``traceback.py`` since 3.12) for lower-case names: an insertion, a
    deletion and a substitution cost 2 each, and the cost may be (len + len + 3) * 2 // 6.
    """
    return _edit_cost(wrong, candidate) <= (len(wrong) + len(candidate) + 3) * 2 // 6


@cache
def neighbours(split: Split) -> Mapping[str, frozenset[str]]:
    """Name to the other names of its split that CPython may suggest for it; computed once."""
    pool = names(split)
    found: dict[str, set[str]] = {name: set() for name in pool}
    for index, first in enumerate(pool):
        for second in pool[:index]:
            if is_suggested(first, second):
                found[first].add(second)
                found[second].add(first)
    return {name: frozenset(near) for name, near in found.items()}


def _edit_cost(a: str, b: str) -> int:
    start = 0
    while start < min(len(a), len(b)) and a[start] == b[start]:
        start += 1
    a, b = a[start:], b[start:]
    row = [2 * column for column in range(len(b) + 1)]
    for index, x in enumerate(a):
        diagonal, row[0] = row[0], 2 * (index + 1)
        for column, y in enumerate(b, 1):
            above = row[column]
            row[column] = diagonal if x == y else 2 + min(diagonal, above, row[column - 1])
            diagonal = above
    return row[-1]
