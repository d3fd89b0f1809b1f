"""What a diagnosis says, for people and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

Status = Literal["ok", "note", "warning", "broken"]
"""``ok``: as it should be. ``note``: a fact worth knowing. ``warning``: sandboxes work, and something is weaker, slower
or scarcer than it could be. ``broken``: a promise that every cell is given does not hold."""
SCHEMA = 1
"""Of the JSON object. Keys may be added to it without a new number."""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at."""

    name: str
    """Stable, for programs that read the JSON."""
    tried: str
    """What was done to find out."""
    seen: str
    """What happened."""
    status: Status
    advice: str = ""
    """What to do; empty where there is nothing to do."""


@dataclass(frozen=True, slots=True)
class BackendReport:
    """One backend. ``problem`` is None when it works, else it says why not and what to do.

    ``checks`` are those of its cells when it works; what explains a failure may be there when it does not.
    """

    name: str
    problem: str | None
    checks: tuple[Check, ...]

    @property
    def works(self) -> bool:
        return self.problem is None


@dataclass(frozen=True, slots=True)
class Report:
    """``chosen`` is what ``open_pool()`` takes here, None where nothing works; ``reason`` says why."""

    chosen: str | None
    reason: str
    machine: tuple[Check, ...]
    backends: tuple[BackendReport, ...]

    @property
    def healthy(self) -> bool:
        """A backend works, and no promise is broken in the one that is chosen."""
        return self.chosen is not None and not any(self.broken())

    def broken(self) -> Iterator[tuple[str, Check]]:
        """Where and which promises do not hold, of the machine and of the chosen backend."""
        chosen = [(backend.name, check) for backend in self.backends for check in backend.checks]
        for where, check in [*(("machine", check) for check in self.machine), *chosen]:
            if check.status == "broken" and where in ("machine", self.chosen):
                yield where, check

    def as_json(self) -> dict[str, Any]:
        """What ``palaestra doctor --json`` prints; ``docs/sandbox-setup.md`` describes it."""
        backends = [
            {"name": b.name, "works": b.works, "problem": b.problem, "checks": [asdict(check) for check in b.checks]}
            for b in self.backends
        ]
        return {
            "schema": SCHEMA,
            "healthy": self.healthy,
            "chosen": self.chosen,
            "reason": self.reason,
            "machine": [asdict(check) for check in self.machine],
            "backends": backends,
        }
