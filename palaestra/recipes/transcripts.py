"""Episodes for people: as text to read, as a record to keep, and which one is worth showing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from palaestra.rollout.episode import EpisodeResult


def as_record(result: EpisodeResult) -> dict[str, Any]:
    """One JSON line."""
    return {
        "task_id": result.spec.task_id,
        "instruction": result.instruction,
        "turns": [asdict(turn) for turn in result.turns],
        "reward": result.reward,
        "passed": result.passed,
        "failure": result.failure,
    }


def as_text(result: EpisodeResult) -> str:
    """The episode turn by turn: what the agent wrote, and under it what it was told."""
    lines = [result.instruction]
    for number, turn in enumerate(result.turns, 1):
        answer = turn.observation if turn.executed else "(cut off: not executed)"
        if not answer:
            answer = "passed" if result.passed else "(nothing)"
        lines += [f"  turn {number}  {turn.action}", f"          {answer}"]
    return "\n".join([*lines, f"  reward {result.reward}"])


def telling_pair(
    before: Sequence[EpisodeResult], after: Sequence[EpisodeResult]
) -> tuple[EpisodeResult, EpisodeResult]:
    """One task's episodes before and after training: preferably failed before, and now repaired over several turns."""
    pairs = list(zip(before, after, strict=True))
    learned = [(b, a) for b, a in pairs if not b.passed and a.passed]
    repaired = [(b, a) for b, a in learned if len(a.turns) > 1]
    return (repaired or learned or pairs)[0]
