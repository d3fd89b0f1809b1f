"""Every built-in task through the real environment: what it promises of its reference and of its untouched state."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from palaestra.envs.async_env import AsyncAgentEnv
from palaestra.envs.sandboxes import SandboxPool, open_pool
from palaestra.envs.suites.code import builtin
from palaestra.envs.tasks.task import StdioGrader, Task
from palaestra.envs.tasks.task_set import TaskSet

TASKS = builtin(seeds=2)
AT_ONCE = 4


def write_files(files: dict[str, str]) -> str:
    return "\n".join(f"```python path={path}\n{text}\n```" for path, text in files.items())


async def play(pool: SandboxPool, task: Task, *actions: str) -> dict[str, Any]:
    """The info of the last step of one episode with these actions."""
    env = AsyncAgentEnv(TaskSet.of([task]), sandboxes=pool, interpreter="fork")
    try:
        await env.reset(seed=0)
        for action in actions:
            *_, info = await env.step(action)
    finally:
        await env.close()
    assert info["failure"] is None, f"{task.id}: {info['failure_message']}"
    return info


async def play_all(tasks: list[Task], *, actions: Any) -> dict[str, dict[str, Any]]:
    """Task id to the info of its episode; ``actions`` maps a task to what is done."""
    async with await open_pool() as pool:
        places = asyncio.Semaphore(AT_ONCE)

        async def one(task: Task) -> dict[str, Any]:
            async with places:
                return await play(pool, task, *actions(task))

        infos = await asyncio.gather(*map(one, tasks))
    return dict(zip((task.id for task in tasks), infos, strict=True))


def tasks_of(kind: str) -> list[Task]:
    return list(TASKS.select(kinds=[kind]))


@pytest.mark.parametrize("kind", TASKS.kinds)
async def test_the_reference_passes_every_case(kind: str) -> None:
    infos = await play_all(tasks_of(kind), actions=lambda task: [write_files(dict(task.reference)) + "\n<submit/>"])

    failed = {task_id: info["verdict"].cases for task_id, info in infos.items() if not info["verdict"].passed}
    assert not failed
    assert all(info["reward"] == 1.0 for info in infos.values())


@pytest.mark.parametrize("kind", TASKS.kinds)
async def test_the_untouched_state_fails(kind: str) -> None:
    infos = await play_all(tasks_of(kind), actions=lambda task: ["<submit/>"])

    assert not [task_id for task_id, info in infos.items() if info["reward"] != 0.0]


def knows_only_the_examples(task: Task) -> str:
    """A solution that looks up the visible cases and knows nothing else."""
    if isinstance(task.grader, StdioGrader):
        table = {case.stdin: case.stdout for case in task.grader.visible}
        return f"import sys\nprint({table!r}.get(sys.stdin.read(), ''))\n"
    table = {case.args: case.expected for case in task.grader.visible}
    return f"def {task.grader.entry_point}(*args):\n    return eval({table!r}.get(repr(args), 'None'))\n"


@pytest.mark.parametrize("kind", TASKS.kinds)
async def test_a_solution_that_only_knows_the_examples_fails(kind: str) -> None:
    infos = await play_all(
        tasks_of(kind),
        actions=lambda task: [write_files({"solution.py": knows_only_the_examples(task)}), "<submit/>"],
    )

    assert not [task_id for task_id, info in infos.items() if info["reward"] != 0.0]


@pytest.mark.parametrize("kind", TASKS.kinds)
async def test_the_examples_that_are_shown_are_the_ones_that_are_run(kind: str) -> None:
    infos = await play_all(
        tasks_of(kind), actions=lambda task: [write_files({"solution.py": knows_only_the_examples(task)})]
    )

    assert not [task_id for task_id, info in infos.items() if info["visible_passed"] < info["visible_total"]]


async def test_each_bug_shows_in_a_visible_case() -> None:
    infos = await play_all(tasks_of("repair"), actions=lambda task: [write_files(dict(task.files))])

    assert not [task_id for task_id, info in infos.items() if info["visible_passed"] == info["visible_total"]]


async def test_each_bug_shows_in_a_hidden_case_too() -> None:
    blind = [
        task.model_copy(update={"grader": task.grader.model_copy(update={"visible": ()})})
        for task in tasks_of("repair")
    ]
    infos = await play_all(blind, actions=lambda task: ["<submit/>"])

    assert not [task_id for task_id, info in infos.items() if info["reward"] != 0.0]


async def test_a_bug_breaks_only_some_of_the_cases() -> None:
    """The broken file is plausible: it runs, and most families have a bug that spares some case."""
    infos = await play_all(tasks_of("repair"), actions=lambda task: [write_files(dict(task.files))])

    spared = [task_id for task_id, info in infos.items() if info["visible_passed"] > 0]
    assert len(spared) >= len(infos) // 2
