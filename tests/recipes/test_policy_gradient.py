"""The on-policy loop: it learns, it refuses to learn from the wrong thing, and it resumes where it stood."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from palaestra.envs.errors import EngineError, InfrastructureError, UsageError
from palaestra.learners.checkpoints import Checkpoints
from palaestra.recipes.policy_gradient import PolicyGradient, PolicyGradientConfig, group_rows
from palaestra.rollout.episode import EpisodeResult, EpisodeSpec
from palaestra.rollout.scheduler import Group
from palaestra.rollout.trajectory import Trajectory

OpenLoop = Callable[..., Any]


def result_with(reward: float | None) -> EpisodeResult:
    trajectory = Trajectory(ids=[1, 2, 3], mask=[0, 1, 1], logprobs=[0.0, -1.0, -2.0], versions=[-1, 0, 0])
    spec = EpisodeSpec("e", "t", "k", 0)
    ending = "failed" if reward is None else "graded"
    return EpisodeResult(spec, ending, trajectory, reward, reward == 1.0, "", (), None if reward is not None else "x")


def test_an_episode_that_failed_is_in_no_baseline_and_weighs_nothing() -> None:
    group = Group(0, "t", "k", tuple(result_with(reward) for reward in (1.0, 0.0, 0.5, None)))
    rows = group_rows(group, "rloo")
    assert [row.advantage for row in rows] == pytest.approx([0.75, -0.75, 0.0, 0.0])
    assert [row.row_weight for row in rows] == [1.0, 1.0, 1.0, 0.0]


async def test_the_policy_learns_what_is_rewarded(open_loop: OpenLoop) -> None:
    async with open_loop() as loop:
        rates = [(await loop.update()).pass_rate for _ in range(40)]
    assert np.mean(rates[:5]) < 0.5
    assert np.mean(rates[-5:]) > 0.9


async def test_every_update_pushes_its_version_and_sampler_and_learner_agree(open_loop: OpenLoop) -> None:
    async with open_loop() as loop:
        for update in range(1, 4):
            report = await loop.update()
            assert report.learner["k3"] < 1e-9
            assert loop.learner.version == (await loop.scheduler.engine.status()).version
            assert report.update == update


async def test_the_advantage_that_is_configured_is_the_one_that_is_used(open_loop: OpenLoop) -> None:
    prints = set()
    for advantage in ("rloo", "grpo", "dr_grpo"):
        async with open_loop(advantage=advantage) as loop:
            await loop.update()
            prints.add(loop.learner.fingerprint())
    assert len(prints) == 3


async def test_a_batch_without_any_graded_episode_is_an_error_and_changes_nothing(open_loop: OpenLoop) -> None:
    async with open_loop(fails=lambda letter: True) as loop:
        before = loop.learner.fingerprint()
        with pytest.raises(InfrastructureError, match="Died: asked to"):
            await loop.update()
        assert loop.learner.fingerprint() == before


async def test_failed_episodes_are_counted_and_the_rest_is_trained_on(open_loop: OpenLoop) -> None:
    async with open_loop(fails=lambda letter: letter == "a", groups_per_update=8) as loop:
        report = await loop.update()
    assert report.stats.episodes_failed % 8 == 0
    assert report.stats.episodes_failed > 0
    assert report.learner["tokens"] > 0


async def test_a_batch_sampled_by_other_weights_than_the_learners_is_refused(open_loop: OpenLoop) -> None:
    async with open_loop() as loop:
        await loop.scheduler.engine.update_weights(loop.learner.params(), loop.learner.version + 1)
        with pytest.raises(EngineError, match="on-policy"):
            await loop.update()


async def test_an_engine_whose_log_probs_differ_from_the_learners_stops_the_run(open_loop: OpenLoop) -> None:
    async with open_loop() as loop, open_loop(seed=1) as other:
        await loop.scheduler.engine.update_weights(other.learner.params(), loop.learner.version)
        with pytest.raises(EngineError, match="mean k3"):
            await loop.update()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"group_size": 1}, "group_size is 1; give at least 2"),
        ({"groups_per_update": 0}, "groups_per_update is 0"),
        ({"max_extra_groups": -1}, "max_extra_groups is -1"),
        ({"advantage": "rlo"}, "unknown advantage 'rlo'; choose one of rloo"),
    ],
)
def test_a_loop_that_could_never_learn_is_refused(wrong: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        PolicyGradientConfig(**wrong)


@pytest.mark.parametrize("temperature", [0.0, 0.5])
async def test_sampling_at_another_temperature_than_the_learners_is_refused(
    open_loop: OpenLoop, temperature: float
) -> None:
    async with open_loop() as loop:
        options = replace(loop.scheduler.options, temperature=temperature)
        with pytest.raises(UsageError, match="temperature"):
            PolicyGradient(
                loop.learner,
                replace(loop.scheduler, options=options),
                loop._tasks,
                loop._sampler,
                loop._probe,
                loop.config,
                seed=0,
            )


async def test_groups_without_variance_are_dropped_and_others_drawn_in_their_place(open_loop: OpenLoop) -> None:
    async with open_loop(group_size=2, groups_per_update=6, max_extra_groups=40) as loop:
        report = await loop.update()
    assert report.stats.groups_zero_variance > 0
    assert report.stats.groups_kept == 6
    assert report.learner["rows"] == 12


async def _weights_after(loop: PolicyGradient, updates: int) -> str:
    for _ in range(updates):
        await loop.update()
    return loop.learner.fingerprint()


async def test_a_resumed_run_draws_the_same_tasks_and_ends_with_the_same_weights(
    open_loop: OpenLoop, tmp_path: Path
) -> None:
    async with open_loop() as loop:
        uninterrupted = await _weights_after(loop, 4)
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        async with open_loop() as loop:
            await _weights_after(loop, 2)
            loop.save(checkpoints)
        async with open_loop() as loop:
            assert await loop.resume(checkpoints)
            assert loop.updates_done == 2
            assert await _weights_after(loop, 2) == uninterrupted


async def test_resuming_says_whether_there_was_anything_and_refuses_another_seed(
    open_loop: OpenLoop, tmp_path: Path
) -> None:
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        async with open_loop() as loop:
            assert not await loop.resume(checkpoints)
            await loop.update()
            loop.save(checkpoints)
        async with open_loop(seed=1) as loop:
            with pytest.raises(UsageError, match="seed 0"):
                await loop.resume(checkpoints)
