"""HumanEval (Chen et al., 2021, "Evaluating Large Language Models Trained on Code"): its JSONL as a task set.

The check programs are kept as they are, with one addition: where a check calls a function by its name (``HumanEval/32``
calls ``poly`` of the prompt, ``HumanEval/33`` the reference itself), that function of the reference goes into the check
program, so that a solution cannot redefine the yardstick it is measured with.
"""

from __future__ import annotations

import ast
from pathlib import Path

from pydantic import BaseModel, Field

from palaestra.envs.errors import TaskFormatError, UsageError
from palaestra.envs.tasks.jsonl import rows, validated
from palaestra.envs.tasks.task import MAX_ID_CHARS, Task
from palaestra.envs.tasks.task_set import TaskSet


class _Row(BaseModel):
    task_id: str = Field(min_length=1, max_length=MAX_ID_CHARS)
    prompt: str = Field(min_length=1)
    entry_point: str = Field(min_length=1)
    canonical_solution: str
    test: str = Field(min_length=1)


def load_humaneval(path: str | Path) -> TaskSet:
    """The tasks of a ``HumanEval.jsonl`` or ``.jsonl.gz``, in order. Raises ``TaskFormatError`` with line and field."""
    file = Path(path)
    tasks = [_task(validated(_Row, row, file=str(file), line=line), str(file), line) for line, row in rows(file)]
    if not tasks:
        raise UsageError(f"the HumanEval file {str(file)!r} holds no task")
    return TaskSet.of(tasks, name="humaneval")


def _task(row: _Row, file: str, line: int) -> Task:
    fence = f"```python\n{row.prompt.rstrip()}\n```"
    task = {
        "id": row.task_id,
        "kind": "write",
        "instruction": f"Complete the function `{row.entry_point}` in solution.py.\n\n{fence}",
        "files": {"solution.py": row.prompt},
        "grader": {"kind": "script", "entry_point": row.entry_point, "check": _check(row, file, line)},
        "reference": {"solution.py": row.prompt + row.canonical_solution},
        "tags": ("humaneval",),
        "source": "https://github.com/openai/human-eval",
        "licence": "MIT",
    }
    return validated(Task, task, file=file, line=line)


def _check(row: _Row, file: str, line: int) -> str:
    """The check program, behind those functions of the reference that it names."""
    reference = _parsed(row.prompt + row.canonical_solution, file, line, field="canonical_solution")
    test = _parsed(row.test, file, line, field="test")
    if not any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in test.body):
        raise TaskFormatError("defines no function check(candidate)", file=file, line=line, field="test")
    named = {node.id for node in ast.walk(test) if isinstance(node, ast.Name)}
    yardsticks = [node for node in reference.body if isinstance(node, ast.FunctionDef) and node.name in named]
    if not yardsticks:
        return row.test
    imports = [node for node in reference.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    return "\n\n".join(ast.unparse(node) for node in (*imports, *yardsticks)) + "\n\n" + row.test


def _parsed(source: str, file: str, line: int, *, field: str) -> ast.Module:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError) as error:
        raise TaskFormatError(f"not Python: {error}", file=file, line=line, field=field) from None
