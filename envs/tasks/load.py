"""Task sets from where a user says they are."""

from __future__ import annotations

from pathlib import Path

from palaestra.envs.errors import TaskFormatError, UsageError
from palaestra.envs.tasks.importers.humaneval import load_humaneval
from palaestra.envs.tasks.jsonl import rows, validated
from palaestra.envs.tasks.task import Task
from palaestra.envs.tasks.task_set import TaskSet


def load_jsonl(path: str | Path) -> TaskSet:
    """One ``Task`` a line, plain or gzipped. Raises ``TaskFormatError`` with file, line and field."""
    file = Path(path)
    lines: dict[str, int] = {}
    tasks: list[Task] = []
    for line, row in rows(file):
        task = validated(Task, row, file=str(file), line=line)
        if task.id in lines:
            problem = f"{task.id!r} is already the id of line {lines[task.id]}"
            raise TaskFormatError(problem, file=str(file), line=line, field="id")
        lines[task.id] = line
        tasks.append(task)
    if not tasks:
        raise UsageError(f"the task file {str(file)!r} holds no task")
    return TaskSet.of(tasks, name=file.name)


def resolve(tasks: TaskSet | str | Path | None) -> TaskSet:
    """A task set from what an option may hold: None or ``"builtin"``, ``"humaneval:PATH"``, a JSONL path, or a set."""
    if isinstance(tasks, TaskSet):
        return tasks
    if tasks is None or tasks == "builtin":
        # Imported here, because the built-in tasks are built with the modules of this package.
        from palaestra.envs.suites.code import builtin

        return builtin()
    if not isinstance(tasks, (str, Path)):
        raise UsageError(f"tasks must be a TaskSet or a str, got {type(tasks).__name__}")
    importer, colon, path = str(tasks).partition(":")
    if colon and importer == "humaneval":
        return load_humaneval(path)
    if str(tasks).endswith((".jsonl", ".jsonl.gz")) or Path(tasks).is_file():
        return load_jsonl(tasks)
    raise UsageError(f"tasks={str(tasks)!r} is not 'builtin', 'humaneval:PATH' or the path of a .jsonl file")
