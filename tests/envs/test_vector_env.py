"""The vector environment: Gymnasium's contract in three autoreset modes, and send/recv that lose nothing."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError, ResetNeeded
from gymnasium.vector import AutoresetMode

from palaestra.envs import loop, shared_pools
from palaestra.envs.errors import UsageError
from palaestra.envs.tasks.task import Task
from palaestra.envs.tasks.task_set import TaskSet
from palaestra.envs.vector_env import AgentVectorEnv

MakeTask = Callable[..., Task]
WRITE = "```python path=solution.py\ndef add(a, b):\n    return a + b\n```\n"
PASS, FAIL, LOOK = WRITE + "<submit/>", "<submit/>", "```bash\ncat solution.py\n```"


@pytest.fixture
def make(make_function_task: MakeTask) -> Iterator[Callable[..., AgentVectorEnv]]:
    made: list[AgentVectorEnv] = []

    def make(num_envs: int, **options: Any) -> AgentVectorEnv:
        tasks = TaskSet.of([make_function_task(id=f"add-{number}") for number in range(5)])
        made.append(AgentVectorEnv(num_envs, tasks, backend="bubblewrap", **options))
        return made[-1]

    yield make
    for env in made:
        env.close()


def test_make_vec_uses_our_own_class(three_tasks: TaskSet) -> None:
    env = gymnasium.make_vec("AgentCode-v0", num_envs=3, tasks=three_tasks)
    assert isinstance(env, AgentVectorEnv)
    observations, infos = env.reset(seed=[4, 4, 5], options={"task_id": "add"})

    assert observations in env.observation_space
    assert len(env.action_space.sample()) == 3
    assert infos["task_id"].tolist() == ["add"] * 3
    env.close()


def test_seeds_count_up_and_decide_the_tasks(make: Callable[..., AgentVectorEnv]) -> None:
    env = make(4)
    first, infos = env.reset(seed=7)

    assert env.reset(seed=[7, 8, 9, 10])[1]["task_id"].tolist() == infos["task_id"].tolist()
    assert env.reset(seed=7)[0] == first
    with pytest.raises(UsageError, match="4 of them"):
        env.reset(seed=[1, 2])


def test_a_step_returns_arrays_of_gymnasiums_shapes_and_types(make: Callable[..., AgentVectorEnv]) -> None:
    env = make(3)
    env.reset(seed=0)

    observations, rewards, terminated, truncated, infos = env.step((PASS, FAIL, LOOK))

    assert "return a - b" in observations[2]
    assert rewards.dtype == np.float64
    assert (terminated.dtype, truncated.dtype) == (np.bool_, np.bool_)
    assert (rewards.tolist(), terminated.tolist(), truncated.tolist()) == (
        [1.0, 0.0, 0.0],
        [True, True, False],
        [False] * 3,
    )
    assert infos["reward"].tolist() == [1.0, 0.0, None]
    assert infos["_reward"].all()
    assert infos["turn"].dtype == np.int64


def test_next_step_mode_resets_with_the_following_action(make: Callable[..., AgentVectorEnv]) -> None:
    env = make(2)
    assert env.metadata["autoreset_mode"] == AutoresetMode.NEXT_STEP
    env.reset(seed=0)
    env.step((PASS, LOOK))

    observations, rewards, terminated, truncated, infos = env.step((PASS, PASS))

    assert observations[0].startswith("Repair add")
    assert (rewards.tolist(), terminated.tolist(), truncated.tolist()) == ([0.0, 1.0], [False, True], [False, False])
    assert infos["turn"].tolist() == [0, 2]


def test_same_step_mode_keeps_the_final_observation_and_info(make: Callable[..., AgentVectorEnv]) -> None:
    env = make(2, autoreset_mode=AutoresetMode.SAME_STEP)
    env.reset(seed=0)

    observations, rewards, terminated, _, infos = env.step((PASS, LOOK))

    assert observations[0].startswith("Repair add")
    assert (rewards.tolist(), terminated.tolist()) == ([1.0, 0.0], [True, False])
    assert infos["final_obs"][0] == "Graded: passed (4 of 4 tests passed)."
    assert infos["_final_obs"].tolist() == infos["_final_info"].tolist() == [True, False]
    assert infos["final_info"]["reward"][0] == 1.0
    assert infos["final_info"]["_reward"].tolist() == [True, False]
    assert infos["turn"].tolist() == [0, 1]


def test_disabled_mode_leaves_resetting_to_the_caller(make: Callable[..., AgentVectorEnv]) -> None:
    env = make(2, autoreset_mode="Disabled")
    env.reset(seed=0)
    looked = env.step((PASS, LOOK))[0][1]
    with pytest.raises(ResetNeeded, match="environment 0"):
        env.step((PASS, PASS))

    observations, infos = env.reset(options={"reset_mask": np.array([True, False])})

    assert observations[0].startswith("Repair add")
    assert observations[1] == looked
    assert infos["_task_id"].tolist() == [True, False]
    assert env.step((PASS, PASS))[1].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("mask", [[True, False], np.array([1, 0]), np.zeros(2, bool), np.ones(3, bool)])
def test_a_reset_mask_that_is_none_is_a_usage_error(make: Callable[..., AgentVectorEnv], mask: Any) -> None:
    with pytest.raises(UsageError, match="reset_mask"):
        make(2).reset(options={"reset_mask": mask})


def test_a_failure_is_one_environments_own_and_it_is_replaced_in_place(make: Callable[..., AgentVectorEnv]) -> None:
    env = make(3)
    env.reset(seed=0)
    cell = env._slots[1].env._cell
    assert cell is not None
    loop.run(_lose(cell))

    _, rewards, _, truncated, infos = env.step((PASS, PASS, LOOK))
    assert math.isnan(rewards[1])
    assert (rewards[0], rewards[2]) == (1.0, 0.0)
    assert truncated.tolist() == [False, True, False]
    assert infos["failure"].tolist() == [None, "SandboxDied", None]

    _, rewards, _, _, infos = env.step((PASS, PASS, LOOK))
    assert rewards.tolist() == [0.0, 0.0, 0.0]
    assert infos["failure"].tolist() == [None, None, None]
    assert env.step((LOOK, PASS, LOOK))[1].tolist() == [0.0, 1.0, 0.0]


def test_a_reset_that_fails_is_reported_by_the_next_step(
    make: Callable[..., AgentVectorEnv], monkeypatch: pytest.MonkeyPatch
) -> None:
    env = make(2)
    env.reset(seed=0)
    enter = env._slots[0].env._enter_cell

    async def fail(task: Task) -> Any:
        raise shared_pools_error()

    monkeypatch.setattr(env._slots[0].env, "_enter_cell", fail)
    _, infos = env.reset(seed=0)
    assert infos["failure"].tolist() == ["SandboxUnavailable", None]

    _, rewards, _, truncated, infos = env.step((PASS, PASS))
    assert math.isnan(rewards[0])
    assert (rewards[1], truncated.tolist()) == (1.0, [True, False])
    monkeypatch.setattr(env._slots[0].env, "_enter_cell", enter)
    env.step((PASS, PASS))
    assert env.step((PASS, PASS))[1].tolist() == [1.0, 1.0]


def test_a_straggler_blocks_nobody(make: Callable[..., AgentVectorEnv]) -> None:
    env = make(3)
    env.reset(seed=0)
    env.send(["```bash\nsleep 3; echo late\n```", LOOK, LOOK], [0, 1, 2])

    early = env.recv(min_ready=2, timeout_s=30)
    assert sorted(reply.env_id for reply in early) == [1, 2]
    env.send([PASS], [1])
    (reply,) = env.recv(timeout_s=30)
    assert (reply.env_id, reply.reward, reply.terminated) == (1, 1.0, True)
    (late,) = env.recv(timeout_s=30)
    assert late.env_id == 0
    assert "late" in late.observation


def test_a_recv_that_times_out_loses_nothing(make: Callable[..., AgentVectorEnv]) -> None:
    env = make(1)
    env.reset(seed=0)
    env.send(["```bash\nsleep 0.5; echo here\n```"], [0])

    assert env.recv(timeout_s=0.01) == []
    (reply,) = env.recv(timeout_s=30)
    assert "here" in reply.observation


def test_every_action_is_answered_once_by_its_own_environment(make: Callable[..., AgentVectorEnv]) -> None:
    env = make(4, max_turns=100)
    env.reset(seed=0)
    rng = random.Random(0)
    awaited: dict[int, str] = {}
    sent = answered = 0
    for number in range(80):
        idle = [env_id for env_id in range(4) if env_id not in awaited]
        if idle:
            env_id = rng.choice(idle)
            awaited[env_id] = f"mark-{env_id}-{number}"
            env.send([f"```bash\necho {awaited[env_id]}\n```"], [env_id])
            sent += 1
        if awaited and rng.random() < 0.7:
            for reply in env.recv(timeout_s=rng.choice([0.0, 0.005, 30.0])):
                assert awaited.pop(reply.env_id) in reply.observation
                answered += 1
    while awaited:
        for reply in env.recv(timeout_s=30):
            assert awaited.pop(reply.env_id) in reply.observation
            answered += 1

    assert answered == sent > 4
    with pytest.raises(NoAsyncCallError):
        env.recv()


def test_what_is_no_ones_doing_is_raised_and_the_other_replies_stay(
    make: Callable[..., AgentVectorEnv], monkeypatch: pytest.MonkeyPatch
) -> None:
    env = make(2)
    env.reset(seed=0)

    async def bug(action: str) -> Any:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(env._slots[0].env, "_play", bug)
    env.send([LOOK, LOOK], [0, 1])

    with pytest.raises(ZeroDivisionError, match="a bug"):
        env.recv(min_ready=2, timeout_s=30)
    assert [reply.env_id for reply in env.recv(timeout_s=30)] == [1]


def test_misuse_is_named(make: Callable[..., AgentVectorEnv]) -> None:
    env = make(2)
    with pytest.raises(ResetNeeded, match="never reset"):
        env.step((LOOK, LOOK))
    env.reset(seed=0)
    with pytest.raises(NoAsyncCallError):
        env.recv()
    for actions, env_ids, says in (
        ([LOOK], [2], "no environment 2"),
        ([LOOK, LOOK], [0, 0], "twice"),
        ([LOOK], [0, 1], "one action an environment"),
        ("ab", [0, 1], "one action an environment"),
    ):
        with pytest.raises(UsageError, match=says):
            env.send(actions, env_ids)
    with pytest.raises(UsageError, match="takes 2 actions"):
        env.step((LOOK,))
    env.send([LOOK], [0])
    with pytest.raises(AlreadyPendingCallError):
        env.send([LOOK], [0])
    with pytest.raises(AlreadyPendingCallError):
        env.step((LOOK, LOOK))
    with pytest.raises(AlreadyPendingCallError):
        env.reset()
    with pytest.raises(UsageError, match="min_ready"):
        env.recv(min_ready=2)
    env.recv()
    with pytest.raises(UsageError, match="did you mean 'num_envs'"):
        AgentVectorEnv(2, num_env=3)
    with pytest.raises(UsageError, match="at least 1"):
        AgentVectorEnv(0)


def test_closing_with_steps_under_way_ends_them_and_leaves_no_cell(make: Callable[..., AgentVectorEnv]) -> None:
    env = make(3)
    env.reset(seed=0)
    pool = loop.run(_pool(env))
    env.send(["```bash\nsleep 60\n```"] * 2, [0, 1])

    env.close()
    env.close()

    assert pool.live_cells == 0
    assert pool.hosts == ()
    with pytest.raises(ClosedEnvironmentError):
        env.recv()


def test_rendering_shows_every_episode(make: Callable[..., AgentVectorEnv]) -> None:
    env = make(2, render_mode="ansi")
    env.reset(seed=0)

    texts = env.render()

    assert texts is not None
    assert all("Repair add" in text for text in texts)


def shared_pools_error() -> Exception:
    from palaestra.envs.errors import SandboxUnavailable

    return SandboxUnavailable("none today")


async def _pool(env: AgentVectorEnv) -> Any:
    (shared,) = shared_pools._shared.values()
    return await shared.opening


async def _lose(cell: Any) -> None:
    """Make this one cell's host unreachable, as if it had died, while its siblings live on."""
    cell.sandbox._connection.close()

    async def unhealthy() -> bool:
        return False

    class Dead:
        socket = Path("/nowhere/socket")
        groups = None
        healthy = staticmethod(unhealthy)

    cell.sandbox.host = Dead()
    await asyncio.sleep(0)
