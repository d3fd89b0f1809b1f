"""Pass rates count what was graded, by turn and by kind; failures are counted apart."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from palaestra.envs.errors import InfrastructureError
from palaestra.recipes.evaluation import Evaluation, evaluate
from palaestra.rollout.episode import EpisodeResult, EpisodeSpec, TurnRecord
from palaestra.rollout.trajectory import Trajectory


def result(kind: str, pass_turn: int | None, *, failed: bool = False) -> EpisodeResult:
    turns = tuple(TurnRecord("a", "o", "stop", 1) for _ in range(pass_turn or 3))
    reward = None if failed else float(pass_turn is not None)
    spec = EpisodeSpec("e", "t", kind, 0)
    passed = pass_turn is not None
    return EpisodeResult(
        spec, "failed" if failed else "graded", Trajectory(), reward, passed, "", turns, "x" if failed else None
    )


def test_rates_by_turn_and_by_kind_leave_failures_out() -> None:
    evaluation = Evaluation(
        (result("op", 1), result("op", 2), result("name", 3), result("name", None), result("op", None, failed=True))
    )
    assert evaluation.summary() == {
        "tasks": 5,
        "failures": 1,
        "pass_rate": 0.75,
        "pass_rate_by_turn": [0.25, 0.5, 0.75],
        "pass_rate_by_kind": {"op": 1.0, "name": 0.5},
    }


async def test_an_evaluation_without_anything_graded_is_an_error_and_no_rate_of_zero(
    open_loop: Callable[..., Any],
) -> None:
    async with open_loop(fails=lambda letter: True) as loop:
        tasks = [loop._tasks.entry(task_id) for task_id in loop._tasks.ids]
        with pytest.raises(InfrastructureError, match=r"no episode of the evaluation was graded.*Died"):
            await evaluate(loop.scheduler, tasks, temperature=1.0, seed=0)
    assert math.isnan(Evaluation((result("op", None, failed=True),)).pass_rate)


async def test_evaluating_twice_with_one_seed_gives_the_same_episodes_in_the_order_of_the_tasks(
    open_loop: Callable[..., Any],
) -> None:
    async with open_loop() as loop:
        tasks = [loop._tasks.entry(task_id) for task_id in loop._tasks.ids] * 3
        first, again, other, greedy = [
            await evaluate(loop.scheduler, tasks, temperature=temperature, seed=seed)
            for temperature, seed in ((1.0, 0), (1.0, 0), (1.0, 1), (0.0, 0))
        ]
    ids = [[tuple(r.trajectory.ids) for r in e.results] for e in (first, again, other, greedy)]
    assert [r.spec.task_id for r in first.results] == [task.id for task in tasks]
    assert ids[0] == ids[1] != ids[2]
    assert len(set(ids[3])) == 4  # greedy: one answer a task, three times
    assert first.pass_rate == pytest.approx(sum(r.passed for r in first.results) / 12)
