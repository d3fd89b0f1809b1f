"""How good is a policy: one episode on each of a fixed list of tasks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from palaestra.envs.errors import InfrastructureError
from palaestra.envs.tasks.task_set import TaskEntry
from palaestra.rollout.episode import EpisodeResult
from palaestra.rollout.scheduler import Group, Scheduler


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The episodes of one evaluation, in the order of the tasks. Failed ones count in no rate and are counted apart."""

    results: tuple[EpisodeResult, ...]

    @property
    def graded(self) -> tuple[EpisodeResult, ...]:
        return tuple(result for result in self.results if result.reward is not None)

    @property
    def failures(self) -> int:
        """Episodes that infrastructure failures left without a verdict."""
        return len(self.results) - len(self.graded)

    @property
    def pass_rate(self) -> float:
        return self.passed_by_turn(None)

    def passed_by_turn(self, turn: int | None) -> float:
        """Share of graded episodes that passed no later than ``turn`` (None: at all); NaN where none was graded."""
        graded = self.graded
        if not graded:
            return math.nan
        turns = [result.pass_turn for result in graded]
        return sum(t is not None and (turn is None or t <= turn) for t in turns) / len(graded)

    @property
    def pass_rate_by_kind(self) -> dict[str, float]:
        kinds: dict[str, list[bool]] = {}
        for result in self.graded:
            kinds.setdefault(result.spec.kind, []).append(result.passed)
        return {kind: sum(passed) / len(passed) for kind, passed in kinds.items()}

    def summary(self) -> dict[str, object]:
        """For a log or a JSON file."""
        most = max((len(result.turns) for result in self.results), default=0)
        return {
            "tasks": len(self.results),
            "failures": self.failures,
            "pass_rate": self.pass_rate,
            "pass_rate_by_turn": [self.passed_by_turn(turn) for turn in range(1, most + 1)],
            "pass_rate_by_kind": self.pass_rate_by_kind,
        }


async def evaluate(
    scheduler: Scheduler,
    tasks: Sequence[TaskEntry],
    *,
    temperature: float,
    seed: int,
    on_group: Callable[[Group], None] = lambda group: None,
) -> Evaluation:
    """One episode on each task. Temperature 0 is greedy; the same seed and weights give the same episodes.

    Raises ``InfrastructureError`` where no episode was graded: that is no pass rate of 0.
    """
    fixed = replace(scheduler, options=replace(scheduler.options, temperature=temperature))
    results: dict[int, EpisodeResult] = {}
    async with fixed.run_groups(tasks, group_size=1, groups=len(tasks), seed=seed) as groups:
        async for group in groups:
            results[group.index] = group.results[0]
            on_group(group)
    evaluation = Evaluation(tuple(results[index] for index in sorted(results)))
    if evaluation.results and not evaluation.graded:
        raise InfrastructureError(
            f"no episode of the evaluation was graded; the first: {evaluation.results[0].failure}"
        )
    return evaluation
