"""Look at task sets, and check that their tasks judge what they should."""

from __future__ import annotations

import asyncio
from collections import Counter

from rich.console import Console
from rich.table import Table

from palaestra.commands.eval import AGENTS, Attempt, evaluate
from palaestra.commands.progress import progress_over
from palaestra.envs.tasks.task_set import TaskSet


def list_tasks(tasks: TaskSet, console: Console) -> None:
    """Print id, kind and first line of every task."""
    table = Table(title=f"{tasks.name}: {len(tasks)} tasks", title_justify="left")
    for heading in ("id", "kind", "grader", "instruction"):
        table.add_column(heading, overflow="ellipsis", no_wrap=True)
    for task in tasks:
        table.add_row(task.id, task.kind, task.grader.kind, task.instruction.strip().split("\n", 1)[0])
    console.print(table)
    counts = Counter({kind: len(ids) for kind, ids in tasks.kinds.items()})
    console.print(", ".join(f"{kind} {count}" for kind, count in counts.most_common()), highlight=False)


def validate_tasks(tasks: TaskSet, *, backend: str, concurrency: int, console: Console) -> int:
    """The reference must pass and the untouched state must fail. Returns the exit code."""
    with progress_over(2 * len(tasks), f"validating {tasks.name}", console) as advance:

        async def both() -> tuple[list[Attempt], list[Attempt]]:
            reference = await evaluate(
                tasks,
                AGENTS["reference"],
                backend=backend,
                concurrency=concurrency,
                on_attempt=lambda attempt: advance(attempt.outcome == "passed"),
            )
            untouched = await evaluate(
                tasks,
                AGENTS["empty"],
                backend=backend,
                concurrency=concurrency,
                on_attempt=lambda attempt: advance(attempt.failure is None and attempt.outcome != "passed"),
            )
            return reference, untouched

        reference, untouched = asyncio.run(both())
    problems = [
        f"{a.task_id}: the reference doesn't pass: {a.failure or a.outcome}" for a in reference if a.outcome != "passed"
    ]
    problems += [f"{a.task_id}: the untouched state passes" for a in untouched if a.outcome == "passed"]
    problems += [f"{a.task_id}: not judged: {a.failure}" for a in untouched if a.failure is not None]
    for problem in problems:
        console.print(problem, highlight=False, markup=False)
    console.print(f"{len(tasks)} tasks, {len(problems)} problems", highlight=False)
    return 1 if problems else 0
