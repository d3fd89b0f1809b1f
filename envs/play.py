"""Play many tasks with a few environments: what evaluations and demonstrations of scripted agents share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from palaestra.envs.async_env import AsyncAgentEnv
from palaestra.envs.errors import UsageError

T = TypeVar("T")


async def play_all(
    task_ids: Sequence[str],
    make_env: Callable[[], AsyncAgentEnv],
    play: Callable[[AsyncAgentEnv, int, str], Awaitable[T]],
    *,
    concurrency: int,
) -> list[T]:
    """``play(env, index, task_id)`` for every task, ``concurrency`` at a time; results in the order of the tasks.

    An environment serves one task after the other and is closed at the end, however that comes. The first exception of
    a ``play`` ends the others and is raised as it is.
    """
    if concurrency < 1:
        raise UsageError(f"concurrency must be at least 1, got {concurrency}")
    queue = iter(enumerate(task_ids))
    results: dict[int, T] = {}

    async def worker() -> None:
        env = make_env()
        try:
            for index, task_id in queue:
                results[index] = await play(env, index, task_id)
        finally:
            await env.close()

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(task_ids))):
                group.create_task(worker())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [results[index] for index in range(len(task_ids))]
