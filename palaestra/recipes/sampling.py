"""Which task comes next: kinds that the policy already solves are drawn less often."""

from __future__ import annotations

from typing import Any

import numpy as np

from palaestra.envs.errors import UsageError
from palaestra.envs.tasks.task_set import TaskSet


class KindSampler:
    """Draws a kind with weight ``1 - hardness x (moving pass rate of the kind)``, then a task of it uniformly.

    With ``hardness=0`` every kind is equally likely, however many tasks it has. Deterministic given the seed and the
    sequence of calls.
    """

    def __init__(self, tasks: TaskSet, *, seed: int, hardness: float = 0.0, memory: float = 0.9) -> None:
        if not 0.0 <= hardness < 1.0:
            raise UsageError(f"hardness must be in [0, 1), got {hardness}")
        if not 0.0 <= memory < 1.0:
            raise UsageError(f"memory must be in [0, 1), got {memory}")
        self._tasks = tasks
        self._rng = np.random.default_rng(seed)
        self._hardness, self._memory = hardness, memory
        self._kinds = tuple(tasks.kinds)
        self.pass_rates = dict.fromkeys(self._kinds, 0.5)

    def draw(self) -> str:
        """The id of the next task."""
        weights = np.array([1.0 - self._hardness * self.pass_rates[kind] for kind in self._kinds])
        kind = self._kinds[int(self._rng.choice(len(self._kinds), p=weights / weights.sum()))]
        ids = self._tasks.kinds[kind]
        return ids[int(self._rng.integers(len(ids)))]

    def observe(self, kind: str, pass_rate: float) -> None:
        """Take in how often a finished group of that kind passed."""
        self.pass_rates[kind] = self._memory * self.pass_rates[kind] + (1.0 - self._memory) * pass_rate

    def position(self) -> dict[str, Any]:
        """Where it stands, as JSON, for a checkpoint."""
        return {"rng": self._rng.bit_generator.state, "pass_rates": dict(self.pass_rates)}

    def resume(self, position: dict[str, Any]) -> None:
        """Go on from a ``position``; one of other kinds is a ``UsageError``."""
        if set(position["pass_rates"]) != set(self._kinds):
            raise UsageError(
                f"the checkpoint was made with the kinds {sorted(position['pass_rates'])}, this run has "
                f"{sorted(self._kinds)}; resume with the same tasks"
            )
        self._rng.bit_generator.state = position["rng"]
        self.pass_rates = dict(position["pass_rates"])
