"""A task that names an image is played, and graded, in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from palaestra.envs.async_env import AsyncAgentEnv
from palaestra.envs.sandboxes import BackendName
from palaestra.envs.shared_pools import PoolLease
from palaestra.envs.tasks.task import Task
from palaestra.envs.tasks.task_set import TaskSet

MakeTask = Callable[..., Task]
RIGHT = "```python path=solution.py\ndef add(a, b):\n    return a + b\n```\n<submit/>"


async def test_a_tasks_image_is_where_its_episodes_run_and_are_graded(
    podman: BackendName, registry: Any, busybox_files: Any, make_function_task: MakeTask
) -> None:
    registry.push("task:1", {**busybox_files, "of-the-image": b"found"})
    tasks = [
        make_function_task(id="elsewhere", image=f"{registry.host}/task:1"),
        make_function_task(id="here"),
    ]
    lease = PoolLease(podman)
    env = AsyncAgentEnv(TaskSet.of(tasks), sandboxes=lease)
    try:
        seen = {}
        for task in tasks:
            await env.reset(options={"task_id": task.id})
            observation, *_ = await env.step("```bash\ncat /of-the-image; command -v python3\n```")
            *_, info = await env.step(RIGHT)
            seen[task.id] = ("found" in observation, "/.palaestra/" in observation, info["verdict"].passed)
        assert seen == {"elsewhere": (True, True, True), "here": (False, False, True)}
    finally:
        await env.close()
        await lease.release()


def test_a_tasks_image_is_named_whole(make_function_task: MakeTask) -> None:
    with pytest.raises(ValueError, match=r"docker\.io/library/python:3"):
        make_function_task(image="python:3")
