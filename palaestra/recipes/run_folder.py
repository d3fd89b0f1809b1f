"""A run leaves a folder: settings, one JSON line a step, episodes to read, a learning curve, the model.

Nothing is ever half-written: whole files are written beside their place and renamed into it, and lines are appended
with one ``write`` each.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palaestra.envs.errors import UsageError


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One evaluation: pass rates on held-out tasks after ``step`` policy updates."""

    step: int
    sampled: float
    """One sample at temperature 1."""
    greedy: float


class RunFolder:
    """The folder of one run. An existing non-empty folder is refused, so that no run overwrites another."""

    def __init__(self, path: Path) -> None:
        if path.exists() and any(path.iterdir()):
            raise UsageError(f"the run folder {path} exists and is not empty; name another or remove it")
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"cannot make the run folder {path}: {error}; name another") from error
        self.path = path

    @classmethod
    def fresh(cls, parent: Path, name: str) -> RunFolder:
        """``parent/name``, or ``parent/name-2`` and so on where that exists."""
        candidates = (parent / (name if n == 1 else f"{name}-{n}") for n in range(1, 10_000))
        return cls(next(path for path in candidates if not path.exists()))

    def write_json(self, name: str, data: Any) -> Path:
        """Write one JSON file, whole or not at all."""
        target = self.path / name
        partial = self.path / f".{name}.partial"
        partial.write_text(json.dumps(data, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        os.replace(partial, target)
        return target

    def append(self, name: str, record: Mapping[str, Any]) -> None:
        """Append one JSON line."""
        with (self.path / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def plot_curve(self, points: Sequence[CurvePoint], rewards: Sequence[float], *, title: str) -> Path:
        """Draw ``curve.png``: held-out pass rates at each evaluation, and the mean reward of every training step."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(7.2, 4.2), dpi=130)
        axes.plot(range(1, len(rewards) + 1), rewards, color="0.7", linewidth=1, label="training reward")
        steps = [point.step for point in points]
        axes.plot(steps, [point.sampled for point in points], "o-", label="held-out, one sample at T = 1")
        axes.plot(steps, [point.greedy for point in points], "s--", label="held-out, greedy")
        axes.set(xlabel="policy updates", ylabel="pass rate", ylim=(0, 1), title=title)
        axes.grid(alpha=0.3)
        axes.legend(loc="lower right")
        target = self.path / "curve.png"
        partial = self.path / ".curve.partial.png"
        figure.savefig(partial, bbox_inches="tight")
        pyplot.close(figure)
        os.replace(partial, target)
        return target
