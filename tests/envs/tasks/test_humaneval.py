"""The HumanEval importer."""

from __future__ import annotations

import ast
import json
import os
from pathlib import Path
from typing import Any

import pytest

from palaestra.envs.errors import TaskFormatError
from palaestra.envs.grading.script_check import free_names
from palaestra.envs.tasks.importers.humaneval import load_humaneval
from palaestra.envs.tasks.load import resolve
from palaestra.envs.tasks.task import ScriptGrader

ROOT = Path(__file__).parents[3]
FILE = Path(os.environ.get("PALAESTRA_DATA", ROOT / "../shared/data")) / "humaneval" / "HumanEval.jsonl.gz"
ROW: dict[str, Any] = {
    "task_id": "HumanEval/x",
    "prompt": "import math\n\ndef poly(x):\n    return x * x\n\ndef root(x):\n    '''The root.'''\n",
    "entry_point": "root",
    "canonical_solution": "    return math.sqrt(x)\n",
    "test": "def check(candidate):\n    assert poly(candidate(4)) == 4\n",
}


def write(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "HumanEval.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_row_becomes_a_task(tmp_path: Path) -> None:
    (task,) = load_humaneval(write(tmp_path, ROW))

    assert task.id == "HumanEval/x"
    assert ROW["prompt"].strip() in task.instruction
    assert task.files == {"solution.py": ROW["prompt"]}
    assert task.reference == {"solution.py": ROW["prompt"] + ROW["canonical_solution"]}
    assert (task.grader.kind, task.tags, task.licence) == ("script", ("humaneval",), "MIT")
    assert "human-eval" in task.source


def test_a_function_that_the_check_measures_with_comes_from_the_reference(tmp_path: Path) -> None:
    (task,) = load_humaneval(write(tmp_path, ROW))

    assert isinstance(task.grader, ScriptGrader)
    defined = [node.name for node in ast.parse(task.grader.check).body if isinstance(node, ast.FunctionDef)]
    assert defined == ["poly", "check"]
    assert free_names(task.id, task.grader) == ()


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": "def f(:"}, "canonical_solution"),
        ({"canonical_solution": "    return )"}, "canonical_solution"),
        ({"test": "def check(candidate):"}, "test"),
        ({"test": "def test(candidate): pass"}, "test"),
        ({"entry_point": 3}, "entry_point"),
        ({"task_id": "x" * 201}, "task_id"),
    ],
)
def test_a_malformed_row_is_named_by_line_and_field(tmp_path: Path, change: dict[str, Any], field: str) -> None:
    path = write(tmp_path, ROW, {**ROW, "task_id": "HumanEval/y", **change})

    with pytest.raises(TaskFormatError) as raised:
        load_humaneval(path)
    assert (raised.value.line, raised.value.field) == (2, field)


@pytest.mark.skipif(not FILE.exists(), reason="HumanEval.jsonl.gz is not here; set PALAESTRA_DATA")
def test_the_real_file_has_164_tasks_whose_checks_need_nothing_of_the_solution_but_the_candidate() -> None:
    tasks = resolve(f"humaneval:{FILE}")

    assert len(tasks) == 164
    for task in tasks:
        assert isinstance(task.grader, ScriptGrader)
        assert free_names(task.id, task.grader) == (), task.id
