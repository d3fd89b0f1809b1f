"""The table of ``palaestra.envs.errors``, row by row, in real sandboxes: what happened, whose doing, which reward."""

from __future__ import annotations

import asyncio
import math
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import pytest_asyncio

from palaestra.envs.async_env import AsyncAgentEnv, StepResult
from palaestra.envs.attribution import FatalAttempts
from palaestra.envs.errors import SandboxUnavailable
from palaestra.envs.sandboxes import open_pool
from palaestra.envs.tasks.task import Task
from palaestra.envs.tasks.task_set import TaskSet

pytestmark = pytest.mark.asyncio(loop_scope="module")

MakeTask = Callable[..., Task]
SUBMIT_RIGHT = "```python path=solution.py\ndef add(a, b):\n    return a + b\n```\n<submit/>"


@pytest_asyncio.fixture(loop_scope="module")
async def own_pool() -> AsyncIterator[Any]:
    """A pool whose hosts this test may kill."""
    async with await open_pool(backend="bubblewrap") as pool:
        yield pool


def end_hosts(pool: Any) -> None:
    for host in pool.hosts:
        os.kill(host.pid, signal.SIGKILL)


async def host_dies_between_turns(env: AsyncAgentEnv, pool: Any) -> StepResult:
    end_hosts(pool)
    return await env.step("```bash\necho between\n```")


async def host_dies_during_a_turn(env: AsyncAgentEnv, pool: Any) -> StepResult:
    step = asyncio.create_task(env.step("```bash\nsleep 20 # during\n```"))
    await asyncio.sleep(0.2)
    end_hosts(pool)
    return await step


async def host_dies_before_grading(env: AsyncAgentEnv, pool: Any) -> StepResult:
    end_hosts(pool)
    return await env.step("<submit/>")


@pytest.mark.parametrize("what", [host_dies_between_turns, host_dies_during_a_turn, host_dies_before_grading])
async def test_infrastructure_is_truncated_with_a_reward_of_nan_and_not_graded(
    own_pool: Any, make_function_task: MakeTask, what: Callable[..., Awaitable[StepResult]]
) -> None:
    env = AsyncAgentEnv(TaskSet.of([make_function_task(id=what.__name__)]), sandboxes=own_pool)
    _, first_info = await env.reset()

    _, reward, terminated, truncated, info = await what(env, own_pool)

    assert math.isnan(reward)
    assert (terminated, truncated) == (False, True)
    assert (info["failure"], info["reward"], info["verdict"]) == ("SandboxDied", None, None)
    assert set(info) == set(first_info)

    await env.reset()
    assert (await env.step(SUBMIT_RIGHT))[1] == 1.0, "the next episode has a new host"
    await env.close()


async def test_a_grader_at_fault_is_infrastructure(own_pool: Any, make_script_task: MakeTask) -> None:
    env = AsyncAgentEnv(TaskSet.of([make_script_task(check="import nowhere\ndef check(c): pass")]), sandboxes=own_pool)
    await env.reset()

    _, reward, terminated, truncated, info = await env.step(SUBMIT_RIGHT)

    assert math.isnan(reward)
    assert (terminated, truncated, info["failure"], info["verdict"]) == (False, True, "GraderFault", None)
    await env.close()


@pytest.mark.parametrize(
    ("code", "sign"),
    [
        ("while True: pass", "TimeoutError: 1s"),
        ("x = [0] * 10 ** 12", "MemoryError"),
        ("import os\nwhile True: os.fork()", "Error"),
        ("with open('x', 'wb') as file:\n    while True: file.write(bytes(1 << 20))", "OSError"),
        ("while True: print('x' * 4096)", "Error"),
        ("import os, signal\nos.kill(-1, signal.SIGKILL)", "python"),
        ("import os\nos.kill(os.getpid(), 11)", "SIGSEGV"),
    ],
    ids=["deadline", "memory", "pids", "disk", "output", "everything killed", "crash"],
)
async def test_what_the_agent_did_is_observed_graded_as_it_stands_and_trained_on(
    own_pool: Any, make_function_task: MakeTask, code: str, sign: str
) -> None:
    env = AsyncAgentEnv(TaskSet.of([make_function_task()]), sandboxes=own_pool, step_s=1.0)
    await env.reset()

    observation, reward, terminated, truncated, info = await env.step(f"```python\n{code}\n```")
    assert sign in observation
    assert (reward, terminated, truncated, info["failure"]) == (0.0, False, False, None)

    _, reward, terminated, _, info = await env.step("<submit/>")
    assert (reward, terminated, info["failure"], info["reward"]) == (0.0, True, None, 0.0)
    await env.close()


async def test_a_solution_that_breaks_everything_while_it_is_graded_has_failed(
    own_pool: Any, make_function_task: MakeTask, make_script_task: MakeTask
) -> None:
    solution = "import os, signal\ndef add(a, b):\n    os.kill(-1, signal.SIGKILL)\n    os._exit(0)\n"
    env = AsyncAgentEnv(TaskSet.of([make_function_task(), make_script_task()]), sandboxes=own_pool, step_s=2.0)
    for task_id in env.tasks.ids:
        await env.reset(options={"task_id": task_id})

        _, reward, terminated, _, info = await env.step(f"```python path=solution.py\n{solution}```\n<submit/>")

        assert (reward, terminated, info["failure"]) == (0.0, True, None)
    await env.close()


async def test_the_same_actions_taking_a_host_down_again_are_the_agents_doing(
    own_pool: Any, make_function_task: MakeTask
) -> None:
    env = AsyncAgentEnv(TaskSet.of([make_function_task(id="deadly")]), sandboxes=own_pool)
    outcomes = []
    for _ in range(2):
        await env.reset()
        outcomes.append(await host_dies_during_a_turn(env, own_pool))

    assert math.isnan(outcomes[0][1])
    observation, reward, terminated, truncated, info = outcomes[1]
    assert "broke its sandbox" in observation
    assert (reward, terminated, truncated, info["failure"]) == (0.0, False, False, None)
    assert (await env.step(SUBMIT_RIGHT))[1] == 1.0, "the episode goes on in a new cell"
    await env.close()


async def test_only_the_same_task_and_the_same_actions_count_as_the_same() -> None:
    attempts = FatalAttempts()

    assert not attempts.is_agents_doing("t", ["a", "b"])
    assert not attempts.is_agents_doing("t", ["ab"])
    assert not attempts.is_agents_doing("u", ["a", "b"])
    assert not attempts.is_agents_doing("t", ["a"])
    assert attempts.is_agents_doing("t", ["a", "b"])


async def test_a_pool_that_cannot_give_cells_raises_at_reset(make_function_task: MakeTask) -> None:
    pool = await open_pool(backend="bubblewrap")
    env = AsyncAgentEnv(TaskSet.of([make_function_task()]), sandboxes=pool)
    await pool.close()

    with pytest.raises(SandboxUnavailable):
        await env.reset()
    await env.close()
