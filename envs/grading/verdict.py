"""What a grader says of one submission."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

CaseStatus = Literal["passed", "wrong", "error", "timeout", "limit", "missing"]


@dataclass(frozen=True, slots=True)
class CaseResult:
    """One case. ``reason`` is for people and for the agent where the case is visible; it never holds a hidden value."""

    name: str
    status: CaseStatus
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A finished judgement. A fault of the grader raises ``GraderFault`` instead: it is never a verdict of 0."""

    passed: bool
    """Every hidden case passed, and nothing was tampered with."""
    reward: float
    """Finite, in [0, 1]."""
    cases: tuple[CaseResult, ...]
    tampered: str | None = None
    """What gave the manipulation away; the reward is then the minimum of the range."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.reward <= 1.0:
            raise ValueError(f"reward {self.reward} is not in [0, 1]")
