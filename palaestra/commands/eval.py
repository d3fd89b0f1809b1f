"""Run an agent over a task set, in sandboxes, many tasks at once."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from palaestra.commands.progress import progress_over
from palaestra.envs.actions import render_blocks
from palaestra.envs.async_env import AsyncAgentEnv
from palaestra.envs.errors import InfrastructureError, UsageError
from palaestra.envs.play import play_all
from palaestra.envs.shared_pools import PoolLease
from palaestra.envs.tasks.task import Task
from palaestra.envs.tasks.task_set import TaskSet

Agent = Callable[[Task], str]
"""A scripted agent: its one message on a task."""

AGENTS: Mapping[str, Agent] = {
    "reference": lambda task: render_blocks(task.reference),
    "empty": lambda task: render_blocks({}),
}


@dataclass(frozen=True, slots=True)
class Attempt:
    """What came of one task. ``reward`` is None, and ``failure`` set, where the infrastructure failed."""

    task_id: str
    kind: str
    reward: float | None
    outcome: str
    """``"passed"``, the status of the first case that didn't pass, or the class of the infrastructure's failure."""
    failure: str | None = None


def named_agent(name: str) -> Agent:
    """A scripted agent by name; an unknown one is a ``UsageError``."""
    if name not in AGENTS:
        raise UsageError(f"unknown agent {name!r}; the agents are {', '.join(sorted(AGENTS))}")
    return AGENTS[name]


async def evaluate(
    tasks: TaskSet,
    agent: Agent,
    *,
    backend: str = "auto",
    concurrency: int = 8,
    on_attempt: Callable[[Attempt], None] = lambda attempt: None,
    **options: Any,
) -> list[Attempt]:
    """One attempt a task, in the order of the set. However it ends, no sandbox of it is left."""
    lease = PoolLease(backend)

    async def play(env: AsyncAgentEnv, index: int, task_id: str) -> Attempt:
        attempt = await attempt_task(env, task_id, agent)
        on_attempt(attempt)
        return attempt

    try:
        return await play_all(
            tasks.ids, lambda: AsyncAgentEnv(tasks, sandboxes=lease, **options), play, concurrency=concurrency
        )
    finally:
        await lease.release()


async def attempt_task(env: AsyncAgentEnv, task_id: str, agent: Agent) -> Attempt:
    """One episode in which the agent says its message once."""
    task = env.tasks.get(task_id)
    try:
        await env.reset(options={"task_id": task_id})
    except InfrastructureError as error:
        if not env.ever_entered:
            raise  # Nothing works here at all: say so once instead of once a task.
        return Attempt(task.id, task.kind, None, type(error).__name__, str(error))
    _, _, _, _, info = await env.step(agent(task))
    if info["failure"] is not None:
        return Attempt(task.id, task.kind, None, info["failure"], info["failure_message"])
    verdict = info["verdict"]
    outcome = "passed" if verdict.passed else next(case.status for case in verdict.cases if case.status != "passed")
    return Attempt(task.id, task.kind, info["reward"], outcome)


def run_eval(
    tasks: TaskSet, agent_name: str, *, backend: str, concurrency: int, console: Console, **options: Any
) -> int:
    """The ``eval`` command: progress, then a summary. Returns the exit code, 1 if infrastructure failed."""
    agent = named_agent(agent_name)
    started = time.perf_counter()
    with progress_over(len(tasks), f"{tasks.name}, agent {agent_name}", console) as advance:

        def on_attempt(attempt: Attempt) -> None:
            advance(attempt.outcome == "passed")

        attempts = asyncio.run(
            evaluate(tasks, agent, backend=backend, concurrency=concurrency, on_attempt=on_attempt, **options)
        )
    seconds = time.perf_counter() - started
    for line in summary(attempts, seconds):
        console.print(line, highlight=False, markup=False)
    return 1 if any(attempt.failure for attempt in attempts) else 0


def summary(attempts: list[Attempt], seconds: float) -> Iterator[str]:
    """Passes, tasks per second, then whatever went wrong by class; the infrastructure's failures apart."""
    judged = [attempt for attempt in attempts if attempt.failure is None]
    passed = sum(attempt.outcome == "passed" for attempt in judged)
    rate = len(attempts) / seconds if seconds else 0.0
    yield f"{passed}/{len(attempts)} passed in {seconds:.1f} s, {rate:.1f} tasks/s"
    counts = Counter(attempt.outcome for attempt in judged if attempt.outcome != "passed")
    if counts:
        yield "not passed: " + ", ".join(f"{outcome} {count}" for outcome, count in counts.most_common())
    lost = [attempt for attempt in attempts if attempt.failure is not None]
    if lost:
        yield f"infrastructure failures, not judged: {len(lost)}"
        yield from (f"  {attempt.task_id}: {attempt.outcome}: {attempt.failure}" for attempt in lost[:10])
