"""Which tokens each cache slot holds, who uses it, and which slot a new prompt should take. Host-side: no jax.

A slot keeps its tokens when its request ends, so that the next turn of the episode (the same tokens and more) computes
only what is new. What was computed under older weights is never reused or copied, not even in part.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class SlotTable:
    """``slots`` rows of at most ``columns`` tokens."""

    def __init__(self, slots: int, columns: int) -> None:
        self._ids: NDArray[np.int32] = np.full((slots, columns), -1, np.int32)
        self._lengths: NDArray[np.int32] = np.zeros(slots, np.int32)
        self._valid: NDArray[np.bool_] = np.zeros(slots, bool)  # computed wholly under the current weights
        self._busy: NDArray[np.bool_] = np.zeros(slots, bool)
        self._used_at: NDArray[np.int64] = np.zeros(slots, np.int64)
        self._clock = 0

    def is_busy(self, slot: int) -> bool:
        """Whether a request is using the slot."""
        return bool(self._busy[slot])

    def length(self, slot: int) -> int:
        """Tokens the slot holds."""
        return int(self._lengths[slot])

    def continuation(self, ids: Sequence[int]) -> int | None:
        """The idle slot that holds the longest proper start of ``ids`` and nothing else."""
        held = self._lengths
        candidates = np.flatnonzero(self._valid & ~self._busy & (held > 0) & (held <= len(ids)))
        if not candidates.size:
            return None
        width = int(held[candidates].max())
        same = self._ids[candidates, :width] == np.asarray(ids[:width], np.int32)
        whole = (same | (np.arange(width) >= held[candidates, None])).all(1)
        if not whole.any():
            return None
        return int(max(candidates[whole], key=lambda slot: held[slot]))

    def holder(self, ids: Sequence[int]) -> int | None:
        """Any slot, busy or idle, whose tokens start with ``ids``."""
        candidates = np.flatnonzero(self._valid & (self._lengths >= len(ids)))
        if not candidates.size or not len(ids):
            return None
        same = (self._ids[candidates, : len(ids)] == np.asarray(ids, np.int32)).all(1)
        return int(candidates[same.argmax()]) if same.any() else None

    def least_recent(self, pinned: set[int]) -> int | None:
        """The idle slot, not pinned, that was used longest ago; empty ones first."""
        rank = self._used_at + np.where(self._valid, self._clock + 1, 0)
        usable = ~self._busy
        usable[list(pinned)] = False
        if not usable.any():
            return None
        return int(np.where(usable, rank, np.iinfo(np.int64).max).argmin())

    def take(self, slot: int, *, keep: int) -> None:
        """Give the slot to a request that keeps its first ``keep`` tokens."""
        self._busy[slot] = True
        self._valid[slot] = True
        self._lengths[slot] = keep
        self._touch(slot)

    def extend(self, slot: int, ids: Sequence[int]) -> None:
        """Record that these tokens follow in the cache."""
        start = int(self._lengths[slot])
        self._ids[slot, start : start + len(ids)] = ids
        self._lengths[slot] = start + len(ids)

    def release(self, slot: int) -> None:
        """The request ended; its tokens stay until the slot is taken, unless the weights changed meanwhile."""
        self._busy[slot] = False
        self._touch(slot)

    def forget(self) -> None:
        """The weights changed: nothing that is held now may be reused or copied."""
        self._valid[:] = False

    def _touch(self, slot: int) -> None:
        self._clock += 1
        self._used_at[slot] = self._clock
