"""Policy-gradient training on groups of episodes: sample, compare within the group, update, push, again.

On-policy: a batch is finished before the update that it feeds, and the next one starts after the new weights have
been proven to be in the engine. Within a batch generation, execution and grading overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from palaestra.envs.errors import EngineError, InfrastructureError, UsageError
from palaestra.envs.tasks.task_set import TaskEntry, TaskSet
from palaestra.learners import advantages
from palaestra.learners.checkpoints import Checkpoints
from palaestra.learners.learner import Learner, Metrics
from palaestra.learners.rows import TokenRow
from palaestra.recipes.sampling import KindSampler
from palaestra.rollout.episode import derive_seed
from palaestra.rollout.scheduler import Group, Scheduler, SchedulerStats
from palaestra.rollout.weights import WeightProbe, push

ADVANTAGES = {"rloo": advantages.rloo, "grpo": advantages.grpo, "dr_grpo": advantages.dr_grpo}


@dataclass(frozen=True, slots=True)
class PolicyGradientConfig:
    """One update takes ``groups_per_update`` groups of ``group_size`` episodes."""

    groups_per_update: int = 24
    group_size: int = 8
    advantage: Literal["rloo", "grpo", "dr_grpo"] = "rloo"
    max_extra_groups: int = 0
    """Groups without variance teach nothing and are dropped; up to so many others are drawn in their place."""
    max_k3: float | None = 1e-6
    """Largest mean k3 between the engine's log-probs and the learner's at the same weights; above it the run stops,
    because what is trained is then not what was sampled. None for engines whose arithmetic differs."""

    def __post_init__(self) -> None:
        for name, least in (("groups_per_update", 1), ("group_size", 2), ("max_extra_groups", 0)):
            if getattr(self, name) < least:
                raise UsageError(f"PolicyGradientConfig.{name} is {getattr(self, name)}; give at least {least}")
        if self.advantage not in ADVANTAGES:
            raise UsageError(f"unknown advantage {self.advantage!r}; choose one of {', '.join(ADVANTAGES)}")


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """What one update saw."""

    update: int
    """From 1."""
    pass_rate: float
    mean_reward: float
    """Over every graded episode, dropped groups included."""
    mean_turns: float
    passed_first_turn: float
    stats: SchedulerStats
    sampled_tokens: int
    learner: Metrics

    def record(self) -> dict[str, float | int]:
        """One flat line of a log."""
        return {
            "update": self.update,
            "pass_rate": self.pass_rate,
            "reward": self.mean_reward,
            "turns": self.mean_turns,
            "passed_first_turn": self.passed_first_turn,
            "sampled_tokens": self.sampled_tokens,
            "groups_kept": self.stats.groups_kept,
            "groups_zero_variance": self.stats.groups_zero_variance,
            "groups_failed": self.stats.groups_failed,
            "episodes_failed": self.stats.episodes_failed,
            **{f"learner/{name}": value for name, value in self.learner.items()},
        }


class PolicyGradient:
    """The loop's parts; ``update`` turns it once. ``sampler`` decides what is played next and hears how it went."""

    def __init__(
        self,
        learner: Learner,
        scheduler: Scheduler,
        tasks: TaskSet,
        sampler: KindSampler,
        probe: WeightProbe,
        config: PolicyGradientConfig,
        *,
        seed: int,
    ) -> None:
        sampled, trained = scheduler.options.temperature, learner.config.temperature
        if sampled != trained or sampled <= 0:
            raise UsageError(
                f"episodes are sampled at temperature {sampled} and the learner computes log-probs at {trained}; give "
                "both the same temperature above 0"
            )
        self.learner, self.scheduler, self.config = learner, scheduler, config
        self._tasks, self._sampler, self._probe, self._seed = tasks, sampler, probe, seed
        self.updates_done = 0

    async def update(self, on_group: Callable[[Group], None] = lambda group: None) -> UpdateReport:
        """Sample one batch, take one learner update, push the weights.

        Raises:
            InfrastructureError: every episode of the batch failed; there is nothing to learn from.
            EngineError: the engine sampled with other weights than the learner holds, or a push did not arrive.
        """
        groups, stats = await self._sample(on_group)
        if not any(group.graded for group in groups):
            failure = next((result.failure for group in groups for result in group.results), "no group came back")
            raise InfrastructureError(f"no episode of update {self.updates_done + 1} was graded; the first: {failure}")
        rows = [row for group in groups if not group.zero_variance for row in group_rows(group, self.config.advantage)]
        sampled_by = {int(v) for row in rows for v in np.unique(row.versions[row.mask > 0])}
        if rows and sampled_by != {self.learner.version}:
            raise EngineError(
                f"the batch was sampled by weights of versions {sorted(sampled_by)}, the learner is at "
                f"{self.learner.version}; this loop is on-policy"
            )
        metrics = self.learner.update(rows)
        if self.config.max_k3 is not None and not metrics["k3"] <= self.config.max_k3:
            raise EngineError(
                f"engine and learner disagree on the sampled tokens: mean k3 is {metrics['k3']:.3g}, at most "
                f"{self.config.max_k3:g} is allowed; check that both run the same weights, dtype and temperature"
            )
        await push(self.learner.params(), self.learner.version, self.scheduler.engine, self._probe)
        self.updates_done += 1
        return self._report(groups, stats, metrics)

    def save(self, checkpoints: Checkpoints) -> None:
        """Write a checkpoint: weights, optimizer, and where the loop stands in its sequence of tasks and seeds."""
        position = {"updates_done": self.updates_done, "seed": self._seed, "sampler": self._sampler.position()}
        checkpoints.save(self.updates_done, self.learner.state(), position)

    async def resume(self, checkpoints: Checkpoints) -> bool:
        """Go on from the newest whole checkpoint, weights pushed to the engine; False where there is none.

        The updates that follow draw the tasks and seeds that an uninterrupted run would have drawn.
        """
        found = checkpoints.restore(self.learner.state())
        if found is None:
            return False
        state, position = found
        if position["seed"] != self._seed:
            raise UsageError(f"the checkpoint was made with seed {position['seed']}, this run has seed {self._seed}")
        self._sampler.resume(position["sampler"])
        self.learner.load_state(state)
        self.updates_done = position["updates_done"]
        await push(self.learner.params(), self.learner.version, self.scheduler.engine, self._probe)
        return True

    async def _sample(self, on_group: Callable[[Group], None]) -> tuple[list[Group], SchedulerStats]:
        config, groups = self.config, list[Group]()
        async with self.scheduler.run_groups(
            self._draws(),
            group_size=config.group_size,
            groups=config.groups_per_update,
            seed=derive_seed(self._seed, "update", self.updates_done),
            refill=config.max_extra_groups > 0,
            max_extra_groups=config.max_extra_groups,
        ) as stream:
            async for group in stream:
                groups.append(group)
                on_group(group)
        # In the order of dispatch, so that nothing after this depends on which sandbox answered first.
        groups.sort(key=lambda group: group.index)
        for group in groups:
            if group.graded:
                self._sampler.observe(group.kind, float(np.mean([result.passed for result in group.graded])))
        return groups, stream.stats

    def _draws(self) -> Iterator[TaskEntry]:
        while True:
            yield self._tasks.entry(self._sampler.draw())

    def _report(self, groups: list[Group], stats: SchedulerStats, metrics: Metrics) -> UpdateReport:
        graded = [result for group in groups for result in group.graded]
        return UpdateReport(
            update=self.updates_done,
            pass_rate=float(np.mean([result.passed for result in graded])),
            mean_reward=float(np.mean([result.reward for result in graded if result.reward is not None])),
            mean_turns=float(np.mean([len(result.turns) for result in graded])),
            passed_first_turn=float(np.mean([result.pass_turn == 1 for result in graded])),
            stats=stats,
            sampled_tokens=sum(result.trajectory.sampled_tokens for group in groups for result in group.results),
            learner=metrics,
        )


def group_rows(group: Group, advantage: Literal["rloo", "grpo", "dr_grpo"]) -> list[TokenRow]:
    """The token rows of one group. An episode without a reward is in no baseline and gets weight 0."""
    rewards = [[0.0 if result.reward is None else result.reward for result in group.results]]
    valid = [[result.reward is not None for result in group.results]]
    values = ADVANTAGES[advantage](rewards, valid)[0]
    return [
        result.trajectory.row(advantage=float(value), row_weight=float(ok))
        for result, value, ok in zip(group.results, values, valid[0], strict=True)
    ]
