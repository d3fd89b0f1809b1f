"""The environment: what comes of a turn, and how an episode ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from gymnasium.error import ClosedEnvironmentError, ResetNeeded

from palaestra.envs.actions import render_blocks
from palaestra.envs.async_env import AsyncAgentEnv
from palaestra.envs.errors import UsageError
from palaestra.envs.sandboxes.protocol import SandboxPool
from palaestra.envs.tasks.task import Limits, Task
from palaestra.envs.tasks.task_set import TaskSet

pytestmark = pytest.mark.asyncio(loop_scope="module")

MakeTask = Callable[..., Task]
RIGHT = "def add(a, b):\n    return a + b\n"
WRITE_RIGHT = f"```python path=solution.py\n{RIGHT}```\n"
SCHEMA = {
    "task_id", "kind", "turn", "exit_code", "signal", "killed_by", "timed_out", "stdout", "stderr",
    "stdout_dropped_bytes", "stderr_dropped_bytes", "wall_s", "executions", "visible_passed", "visible_total",
    "reward", "verdict", "failure", "failure_message", "parse_error",
}  # fmt: skip


def one(task: Task, pool: SandboxPool, **options: Any) -> AsyncAgentEnv:
    return AsyncAgentEnv(TaskSet.of([task]), sandboxes=pool, **options)


async def test_an_episode_from_a_wrong_answer_to_a_right_one(pool: SandboxPool, make_function_task: MakeTask) -> None:
    env = one(make_function_task(), pool)
    observation, info = await env.reset(seed=0)
    assert observation.startswith("Repair add(a, b)")
    assert (info["reward"], info["verdict"], info["turn"], info["visible_total"]) == (None, None, 0, 2)

    observation, reward, terminated, truncated, info = await env.step("```bash\ncat solution.py\nexit 3\n```")
    assert "return a - b" in observation
    assert "Visible tests" not in observation
    assert (reward, terminated, truncated, info["reward"], info["exit_code"]) == (0.0, False, False, None, 3)

    observation, reward, terminated, truncated, info = await env.step(WRITE_RIGHT)
    assert "Visible tests: 2 of 2 passed." in observation
    assert (reward, info["visible_passed"], info["verdict"]) == (0.0, 2, None)

    observation, reward, terminated, truncated, info = await env.step("<submit/>")
    assert observation == "Graded: passed (4 of 4 tests passed)."
    assert (reward, terminated, truncated, info["reward"], info["verdict"].passed) == (1.0, True, False, 1.0, True)
    await env.close()


async def test_the_info_has_the_same_keys_and_types_from_reset_on(
    pool: SandboxPool, make_function_task: MakeTask
) -> None:
    env = one(make_function_task(), pool)
    infos = [(await env.reset())[1]]
    for action in ("nonsense", "```bash\necho hi\n```", "<submit/>"):
        infos.append((await env.step(action))[4])
    await env.close()

    assert all(set(info) == SCHEMA for info in infos)
    for key in ("turn", "timed_out", "stdout", "stderr", "wall_s", "executions", "visible_passed", "visible_total"):
        assert len({type(info[key]) for info in infos}) == 1, key


async def test_the_visible_tests_run_when_the_solution_may_have_changed(
    pool: SandboxPool, make_function_task: MakeTask
) -> None:
    env = one(make_function_task(), pool, max_turns=9)
    await env.reset()
    for action, runs, passed in (
        ("```bash\nls\n```", False, 0),
        ("```bash\nsed -i 's/-/+/' solution.py\n```", True, 2),
        ("```python\nprint(1)\n```", False, 2),
        ("```python path=helper.py\n```", True, 2),
        ("```python\nimport os\nos.remove('solution.py')\n```", True, 0),
        ("```bash\nls\n```", False, 0),
    ):
        observation, _, _, _, info = await env.step(action)
        assert ("Visible tests" in observation) is runs, action
        assert info["visible_passed"] == passed, action
    await env.close()


async def test_submitting_in_the_turn_that_writes(pool: SandboxPool, make_function_task: MakeTask) -> None:
    env = one(make_function_task(), pool)
    await env.reset()

    _, reward, terminated, truncated, _ = await env.step(WRITE_RIGHT + "<submit/>")

    assert (reward, terminated, truncated) == (1.0, True, False)
    await env.close()


@pytest.mark.parametrize(("last", "expected"), [(WRITE_RIGHT, 1.0), ("nonsense", 0.0)])
async def test_the_turn_limit_truncates_and_grades_as_it_stands(
    pool: SandboxPool, make_function_task: MakeTask, last: str, expected: float
) -> None:
    env = one(make_function_task(), pool, max_turns=2)
    await env.reset()
    await env.step("nonsense")

    _, reward, terminated, truncated, info = await env.step(last)

    assert (reward, terminated, truncated, info["reward"]) == (expected, False, True, expected)
    await env.close()


@pytest.mark.parametrize(("option", "expected"), [(None, 5.0), (90.0, 90.0)])
async def test_the_pool_is_asked_for_by_the_deadline_that_applies(
    pool: SandboxPool, make_function_task: MakeTask, option: float | None, expected: float
) -> None:
    asked: list[Limits] = []

    async def source(limits: Limits, image: str | None) -> SandboxPool:
        asked.append(limits)
        return pool

    env = AsyncAgentEnv(TaskSet.of([make_function_task()]), sandboxes=source, step_s=option)
    await env.reset()

    assert asked == [Limits(step_s=expected)]
    await env.close()


async def test_a_tasks_own_turn_limit_goes_first(pool: SandboxPool, make_function_task: MakeTask) -> None:
    env = one(make_function_task(limits=Limits(turns=1)), pool, max_turns=9)
    await env.reset()

    assert (await env.step("nonsense"))[3] is True
    await env.close()


async def test_later_turns_are_worth_less_with_a_turn_penalty(pool: SandboxPool, make_function_task: MakeTask) -> None:
    env = one(make_function_task(), pool, turn_penalty=0.1)
    await env.reset()
    await env.step("nonsense")
    await env.step("nonsense")

    _, reward, _, _, info = await env.step(WRITE_RIGHT + "<submit/>")

    assert reward == info["reward"] == pytest.approx(0.8)
    assert info["verdict"].reward == 1.0
    await env.close()


async def test_an_unparseable_action_is_an_observation_and_runs_nothing(
    pool: SandboxPool, make_function_task: MakeTask
) -> None:
    env = one(make_function_task(), pool)
    await env.reset()

    observation, reward, _, _, info = await env.step("```bash\ntouch x\n```\n```python path=../x\n```")

    assert "not one inside /workspace" in observation
    assert (reward, info["executions"]) == (0.0, 0)
    assert info["parse_error"] == observation
    await env.close()


async def test_what_the_agent_does_to_its_cell_is_an_observation(
    pool: SandboxPool, make_function_task: MakeTask
) -> None:
    env = one(make_function_task(), pool, step_s=1.0, max_turns=20)
    await env.reset()
    for action, says in {
        "```python\nwhile True: pass\n```": "[TimeoutError: 1s]",
        "```python\nx = [0] * 10 ** 12\n```": "MemoryError",
        "```python\nprint('x' * 10 ** 6)\n```": " characters not shown ...]",
        f"```text path=big\n{'x' * 150_000}\n```" * 1: "Visible tests",
        "```python\nopen('huge', 'wb').write(bytes(10 ** 9))\n```": "Error",
        "```python\nimport socket\nsocket.create_connection(('1.1.1.1', 80), 1)\n```": "Error",
        "```bash\nkill -9 -1\n```": "$ kill -9 -1",
        "```bash\nsleep 30 &\n```": "$ sleep 30 &",
    }.items():
        observation, reward, terminated, truncated, info = await env.step(action)
        assert says in observation, action
        assert (reward, terminated, truncated, info["failure"]) == (0.0, False, False, None), action

    assert (await env.step(WRITE_RIGHT + "<submit/>"))[1] == 1.0
    await env.close()


async def test_a_file_that_does_not_fit_is_an_observation(pool: SandboxPool, make_function_task: MakeTask) -> None:
    env = one(make_function_task(), pool, max_action_chars=100_000_000)
    await env.reset()

    observation, _, _, _, info = await env.step(f"```text path=big\n{'x' * 80_000_000}\n```")

    assert "[not written:" in observation
    assert info["failure"] is None
    await env.close()


async def test_every_episode_has_a_fresh_cell(pool: SandboxPool, make_function_task: MakeTask) -> None:
    env = one(make_function_task(), pool)
    await env.reset()
    await env.step("```bash\necho changed > solution.py; echo left > left\n```")

    await env.reset()
    observation, *_ = await env.step("```bash\nls; cat solution.py\n```")

    assert "left" not in observation
    assert "return a - b" in observation
    await env.close()


async def test_a_program_is_run_at_once_and_feedback_is_one_line(
    pool: SandboxPool, make_function_task: MakeTask
) -> None:
    task = make_function_task(files={}, prelude="def helper(x): return x")
    env = one(task, pool, action_format="program", feedback="last_line", max_turns=4)
    observation, _ = await env.reset()
    assert observation == task.instruction

    observation, reward, terminated, truncated, _ = await env.step("def add(a, b): return help(a) + b")
    assert (reward, terminated, truncated) == (0.0, False, False)
    assert "\n" not in observation
    observation, *_ = await env.step("def add(a, b): return helpe(a) + b")
    assert observation == "NameError: name 'helpe' is not defined. Did you mean: 'helper'?"
    observation, *_ = await env.step("def add(a, b): return helper(a)")
    assert observation == "AssertionError: 1 != 3"
    observation, reward, terminated, truncated, info = await env.step("def add(a, b): return helper(a) + b")

    assert (observation, reward, terminated, truncated) == ("", 1.0, True, False)
    assert info["verdict"].passed
    await env.close()


async def test_a_program_that_passes_only_what_it_sees_is_handed_in_and_fails(
    pool: SandboxPool, make_function_task: MakeTask
) -> None:
    env = one(make_function_task(), pool, action_format="program")
    await env.reset()

    _, reward, terminated, _, info = await env.step("def add(a, b): return 3 if a == 1 else 'ab'")

    assert (reward, terminated, info["visible_passed"]) == (0.0, True, 2)
    await env.close()


async def test_the_last_program_is_graded_though_it_fails(pool: SandboxPool, make_function_task: MakeTask) -> None:
    env = one(make_function_task(), pool, action_format="program", feedback="last_line", max_turns=1)
    await env.reset()

    observation, reward, terminated, truncated, info = await env.step("")

    assert observation == "NameError: name 'add' is not defined"
    assert (reward, terminated, truncated, info["reward"]) == (0.0, False, True, 0.0)
    await env.close()


async def test_a_seed_decides_task_files_and_observation(pool: SandboxPool, three_tasks: TaskSet) -> None:
    env, twin = (AsyncAgentEnv(three_tasks.shuffled(1), sandboxes=pool) for _ in range(2))
    firsts = [await env.reset(seed=seed) for seed in range(6)]

    assert firsts == [await twin.reset(seed=seed) for seed in range(6)]
    assert len({info["task_id"] for _, info in firsts}) > 1
    await env.close()
    await twin.close()


async def test_resets_after_a_seed_follow_from_it(pool: SandboxPool, three_tasks: TaskSet) -> None:
    env, twin = (AsyncAgentEnv(three_tasks, sandboxes=pool) for _ in range(2))
    sequences = []
    for each in (env, twin):
        await each.reset(seed=5)
        sequences.append([(await each.reset())[1]["task_id"] for _ in range(8)])
        await each.close()

    assert sequences[0] == sequences[1]
    assert len(set(sequences[0])) > 1


async def test_a_task_can_be_asked_for(pool: SandboxPool, three_tasks: TaskSet) -> None:
    env = AsyncAgentEnv(three_tasks, sandboxes=pool)

    assert (await env.reset(options={"task_id": "double"}))[1]["task_id"] == "double"
    with pytest.raises(UsageError, match="did you mean 'double'"):
        await env.reset(options={"task_id": "duoble"})
    with pytest.raises(UsageError, match="takes 'task_id'"):
        await env.reset(options={"task": "double"})
    await env.close()


async def test_the_references_of_all_kinds_pass_and_untouched_states_fail(
    pool: SandboxPool, three_tasks: TaskSet
) -> None:
    env = AsyncAgentEnv(three_tasks, sandboxes=pool)
    for task in three_tasks:
        for action, expected in ((render_blocks(task.reference), 1.0), (render_blocks({}), 0.0)):
            await env.reset(options={"task_id": task.id})
            assert (await env.step(action))[1] == expected, (task.id, action)
    await env.close()


async def test_task_files_that_do_not_fit_are_a_usage_error_and_leak_no_cell(
    pool: Any, make_function_task: MakeTask
) -> None:
    env = one(make_function_task(files={"big": "x" * 80_000_000}), pool)
    before = pool.live_cells

    with pytest.raises(UsageError, match="files of task 'add' do not fit"):
        await env.reset()
    assert pool.live_cells == before
    await env.close()


async def test_many_environments_share_a_pool(pool: SandboxPool, make_function_task: MakeTask) -> None:
    async def episode() -> float:
        env = one(make_function_task(), pool, action_format="program", interpreter="fork")
        await env.reset()
        _, reward, *_ = await env.step(RIGHT)
        await env.close()
        return reward

    assert await asyncio.gather(*(episode() for _ in range(24))) == [1.0] * 24


async def test_misuse_raises_what_gymnasium_raises(pool: SandboxPool, make_function_task: MakeTask) -> None:
    env = one(make_function_task(), pool)
    with pytest.raises(ResetNeeded):
        await env.step("<submit/>")
    await env.reset()
    with pytest.raises(TypeError, match="an action is a str"):
        await env.step(3)  # type: ignore[arg-type]
    await env.step("<submit/>")
    with pytest.raises(ResetNeeded):
        await env.step("<submit/>")
    await env.close()
    await env.close()
    with pytest.raises(ClosedEnvironmentError):
        await env.reset()
    with pytest.raises(ClosedEnvironmentError):
        await env.step("<submit/>")


async def test_a_cancelled_step_ends_its_episode_and_gives_the_cell_back(
    pool: SandboxPool, make_function_task: MakeTask
) -> None:
    env = one(make_function_task(), pool)
    await env.reset()
    step = asyncio.create_task(env.step("```bash\nsleep 30\n```"))
    await asyncio.sleep(0.1)
    step.cancel()

    with pytest.raises(asyncio.CancelledError):
        await step
    with pytest.raises(ResetNeeded):
        await env.step("<submit/>")
    await env.reset()
    assert (await env.step(WRITE_RIGHT + "<submit/>"))[1] == 1.0
    await env.close()


async def test_rendering_shows_the_episode_so_far(pool: SandboxPool, make_function_task: MakeTask) -> None:
    env = one(make_function_task(), pool)
    await env.reset()
    await env.step(WRITE_RIGHT)

    text = env.render()

    assert text.index("Repair add") < text.index("path=solution.py\ndef add") < text.index("2 of 2 passed")
    await env.close()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_turn": 3}, "did you mean 'max_turns'"),
        ({"feedback": "lastline"}, "did you mean 'last_line'"),
        ({"action_format": "json"}, "not one of 'blocks', 'program'"),
        ({"interpreter": "spawn"}, "not one of 'new', 'fork'"),
        ({"max_turns": 0}, "at least 1"),
        ({"max_turns": True}, "at least 1"),
        ({"turn_penalty": 2.0}, r"in \[0, 1\]"),
        ({"step_s": 0.0}, "more than 0 seconds"),
        ({"step_s": float("nan")}, "more than 0 seconds"),
        ({"step_s": float("inf")}, "at most 86400"),
        ({"step_s": 86_401}, "at most 86400"),
    ],
)
async def test_an_option_that_cannot_be_is_a_usage_error(
    pool: SandboxPool, make_function_task: MakeTask, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        one(make_function_task(), pool, **options)
