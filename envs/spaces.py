"""Text as it really is. Gymnasium's ``Text`` rejects "", newlines and most of Unicode; this one doesn't."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.spaces import Space

_SURROGATES = range(0xD800, 0xE000)
_SCALAR_VALUES = 0x110000 - len(_SURROGATES)


class UnicodeText(Space[str]):
    """Any ``str`` that can be written as UTF-8 (no lone surrogates), of at most ``max_chars`` characters.

    The empty text and newlines are members. Length counts Unicode code points. In a vector environment texts are
    batched as a tuple of ``str``, as Gymnasium does for every space without a shape.

    >>> space = UnicodeText(20, seed=1)
    >>> "" in space, "naïve\\n🙂" in space, "\\ud800" in space, "x" * 21 in space
    (True, True, False, False)
    """

    def __init__(self, max_chars: int, *, seed: int | np.random.Generator | None = None) -> None:
        if max_chars < 0:
            raise ValueError(f"max_chars must be at least 0, got {max_chars}")
        self.max_chars = int(max_chars)
        super().__init__(shape=None, dtype=None, seed=seed)

    @property
    def is_np_flattenable(self) -> bool:
        """Text has no natural flattening into an array."""
        return False

    def sample(self, mask: Any | None = None, probability: Any | None = None) -> str:
        """A text of up to 100 characters: half of them ASCII, half from all of Unicode."""
        if mask is not None or probability is not None:
            raise ValueError("UnicodeText.sample takes neither mask nor probability")
        rng = self.np_random
        length = int(rng.integers(0, min(self.max_chars, 100) + 1))
        anywhere = rng.integers(0, _SCALAR_VALUES, length)
        codes = np.where(rng.random(length) < 0.5, rng.integers(0, 128, length), anywhere)
        return "".join(chr(int(code) + (len(_SURROGATES) if code >= _SURROGATES.start else 0)) for code in codes)

    def contains(self, x: Any) -> bool:
        """Whether ``x`` is a ``str`` within the bound that UTF-8 can carry."""
        if not isinstance(x, str) or len(x) > self.max_chars:
            return False
        return x.isascii() or is_encodable(x)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UnicodeText) and self.max_chars == other.max_chars

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"UnicodeText({self.max_chars})"


def is_encodable(text: str) -> bool:
    """No lone surrogate in it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
