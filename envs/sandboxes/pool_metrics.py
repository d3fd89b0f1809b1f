"""What a pool has done and holds, as numbers."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Retirement = Literal["failed", "protocol", "idle"]
"""Why a host was given up: its supervisor is gone or does not answer; it sent what is no frame; nobody needed it."""
_LATEST = 1000


@dataclass(frozen=True, slots=True)
class PoolMetrics:
    """A pool at one moment. Counts are since it was opened."""

    backend: str
    hosts: int
    """Hosts that run, those included that take no more cells and wait for their last one to be given back."""
    hosts_starting: int
    cells: int
    """Cells that are in use, being made, or warm."""
    warm: int
    waiting: int
    """Callers of ``acquire`` who have no cell yet."""
    acquired: int
    from_warm: int
    """Of ``acquired``, those that were ready."""
    renewed: int
    stale: int
    """Warm cells that were found dead or unfit, and so not handed out."""
    hosts_started: int
    hosts_retired: Mapping[Retirement, int]
    host_failures: int
    """Attempts to start a host that failed."""
    cell_failures: int
    """Attempts to make a cell that failed."""
    acquire_s_p50: float | None
    """Seconds that half of the latest 1,000 callers of ``acquire`` waited at most; None before the first."""
    acquire_s_p95: float | None


@dataclass(slots=True)
class Counts:
    """What a pool counts as it goes."""

    acquired: int = 0
    from_warm: int = 0
    renewed: int = 0
    stale: int = 0
    hosts_started: int = 0
    host_failures: int = 0
    cell_failures: int = 0
    waiting: int = 0
    hosts_retired: Counter[Retirement] = field(default_factory=Counter)
    waits_s: deque[float] = field(default_factory=lambda: deque(maxlen=_LATEST))

    def wait_s(self, share: float) -> float | None:
        """The wait that this share of the latest callers did not exceed."""
        ordered = sorted(self.waits_s)
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else None
