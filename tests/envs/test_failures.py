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


def lose_cell(env: AsyncAgentEnv) -> None:
    """As when the kernel ends a cell to free memory, while no command runs in it."""
    cell: Any = env._cell
    cell.sandbox._connection.close()


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


async def test_one_death_of_a_host_is_one_however_many_episodes_it_takes_along(
    own_pool: Any, make_function_task: MakeTask
) -> None:
    task = make_function_task(id="a group on one host")
    envs = [AsyncAgentEnv(TaskSet.of([task]), sandboxes=own_pool) for _ in range(4)]
    for env in envs:
        await env.reset()
    assert len(own_pool.hosts) == 1

    steps = [asyncio.create_task(env.step("```bash\nsleep 20 # the same\n```")) for env in envs]
    await asyncio.sleep(0.3)
    end_hosts(own_pool)
    outcomes = await asyncio.gather(*steps)

    assert all(math.isnan(outcome[1]) for outcome in outcomes)
    assert [outcome[4]["failure"] for outcome in outcomes] == ["SandboxDied"] * 4
    assert [outcome[4]["verdict"] for outcome in outcomes] == [None] * 4
    for env in envs:
        await env.close()


async def test_only_the_same_task_and_the_same_actions_count_as_the_same() -> None:
    attempts = FatalAttempts()

    def doing_again(task_id: str, actions: list[str]) -> bool:
        return attempts.is_agents_doing(task_id, actions, since=attempts.now())

    assert not doing_again("t", ["a", "b"])
    assert not doing_again("t", ["ab"])
    assert not doing_again("u", ["a", "b"])
    assert not doing_again("t", ["a"])
    assert doing_again("t", ["a", "b"])


async def test_only_a_death_before_the_episode_began_makes_the_next_one_the_agents_doing() -> None:
    attempts = FatalAttempts()
    group = attempts.now()

    assert not any(attempts.is_agents_doing("t", ["a"], since=group) for _ in range(3))
    later = attempts.now()
    assert attempts.is_agents_doing("t", ["a"], since=later)


@pytest.mark.parametrize("action_format", ["blocks", "program"])
async def test_a_cell_that_is_lost_between_turns_costs_a_right_solution_nothing(
    own_pool: Any, make_function_task: MakeTask, action_format: str
) -> None:
    env = AsyncAgentEnv(TaskSet.of([make_function_task()]), sandboxes=own_pool, action_format=action_format)
    await env.reset()
    lose_cell(env)

    right = "def add(a, b): return a + b"
    action = right if action_format == "program" else f"```python path=solution.py\n{right}\n```\n<submit/>"
    assert (await env.step(action))[1] == 1.0
    await env.close()


@pytest.mark.parametrize("ending", ["<submit/>", None])
async def test_what_was_written_before_a_cell_was_lost_is_what_is_graded(
    own_pool: Any, make_function_task: MakeTask, ending: str | None
) -> None:
    env = AsyncAgentEnv(TaskSet.of([make_function_task()]), sandboxes=own_pool)
    await env.reset()
    await env.step(SUBMIT_RIGHT.removesuffix("<submit/>"))
    lose_cell(env)

    assert (await (env.conclude() if ending is None else env.step(ending)))[1] == 1.0
    await env.close()


async def test_a_file_whose_writing_finds_the_cell_lost_is_written_into_the_next(
    own_pool: Any, make_function_task: MakeTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = AsyncAgentEnv(TaskSet.of([make_function_task()]), sandboxes=own_pool)
    await env.reset()
    cell: Any = env._cell
    write, losses = cell.write, iter([lose_cell])

    async def write_after_a_loss(path: str, data: bytes) -> None:
        for lose in losses:
            lose(env)
        await write(path, data)

    monkeypatch.setattr(cell, "write", write_after_a_loss)

    assert (await env.step(SUBMIT_RIGHT))[1] == 1.0
    await env.close()


async def test_a_turn_after_a_lost_cell_says_so_and_finds_the_files(
    own_pool: Any, make_function_task: MakeTask
) -> None:
    env = AsyncAgentEnv(TaskSet.of([make_function_task()]), sandboxes=own_pool)
    await env.reset()
    await env.step("```text path=note\nkept\n```\n```bash\ncd /tmp; X=1\n```")
    lose_cell(env)

    observation, *_ = await env.step("```bash\ncat note; echo $X\n```")

    assert observation == "[the sandbox was replaced; what programs had written is gone]\n\n$ cat note; echo $X\nkept"
    await env.close()


async def test_a_file_in_place_of_a_folder_or_the_reverse_survives_a_new_cell(
    own_pool: Any, make_function_task: MakeTask
) -> None:
    env = AsyncAgentEnv(TaskSet.of([make_function_task()]), sandboxes=own_pool, max_turns=9)
    await env.reset()
    await env.step("```text path=a\nfile\n```\n```text path=d/e\nfile\n```")
    await env.step("```bash\nrm -r a d\n```\n```text path=a/b\ninner\n```\n```text path=d\nouter\n```")
    lose_cell(env)

    observation, *_ = await env.step("```bash\ncat a/b d\n```")

    assert "inner\nouter" in observation
    assert "no room" not in observation
    await env.close()


async def test_files_that_a_new_cell_has_no_room_for_are_named_and_the_newest_kept(
    own_pool: Any, make_function_task: MakeTask
) -> None:
    env = AsyncAgentEnv(TaskSet.of([make_function_task()]), sandboxes=own_pool, max_action_chars=60_000_000)
    await env.reset()
    for name in ("old", "new"):
        await env.step(f"```bash\nrm -f old\n```\n```text path={name}\n{'x' * 40_000_000}\n```")
    lose_cell(env)

    observation, *_ = await env.step("```bash\nls\n```")

    assert "[no room for these files any more: old]" in observation
    assert "$ ls\nnew\nsolution.py" in observation
    assert (await env.step(SUBMIT_RIGHT))[1] == 1.0
    await env.close()


async def test_a_pool_that_cannot_give_cells_raises_at_reset(make_function_task: MakeTask) -> None:
    pool = await open_pool(backend="bubblewrap")
    env = AsyncAgentEnv(TaskSet.of([make_function_task()]), sandboxes=pool)
    await pool.close()

    with pytest.raises(SandboxUnavailable):
        await env.reset()
    await env.close()
