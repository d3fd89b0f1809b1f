"""Task files: what is wrong is named by file, line and field."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from palaestra.envs.errors import TaskFormatError, UsageError
from palaestra.envs.tasks.load import load_jsonl, resolve
from palaestra.envs.tasks.task import Task
from palaestra.envs.tasks.task_set import TaskSet

MakeTask = Callable[..., Task]


def test_what_is_dumped_can_be_loaded(
    tmp_path: Path, make_function_task: MakeTask, make_stdio_task: MakeTask, make_script_task: MakeTask
) -> None:
    tasks = [make_function_task(), make_stdio_task(), make_script_task()]
    text = "\n".join(task.model_dump_json() for task in tasks) + "\n\n"
    (tmp_path / "tasks.jsonl").write_text(text)
    (tmp_path / "tasks.jsonl.gz").write_bytes(gzip.compress(text.encode()))

    for name in ("tasks.jsonl", "tasks.jsonl.gz"):
        loaded = load_jsonl(tmp_path / name)
        assert list(loaded) == tasks
        assert loaded.name == name


@pytest.mark.parametrize(
    ("change", "field", "says"),
    [
        ({"id": ""}, "id", "at least 1 character"),
        ({"instruction": None}, "instruction", "valid string"),
        ({"typo": 1}, "typo", "not permitted"),
        ({"solution_path": "other.py"}, None, "reference has no 'other.py'"),
        ({"files": {"../x": ""}}, None, "must be relative to /workspace"),
        ({"files": {"./x": ""}}, None, "must be relative to /workspace"),
        ({"reference": {"./solution.py": ""}, "solution_path": "./solution.py"}, None, "without '..', '.'"),
        ({"limits": {"step_s": -1}}, "limits.step_s", "greater than 0"),
        ({"limits": {"step_s": math.inf}}, "limits.step_s", "finite|86400"),
        ({"limits": {"step_s": 86_401}}, "limits.step_s", "less than or equal to 86400"),
        ({"limits": {"egress": ["example.org"]}}, "limits.egress", "write 'host:port'"),
        ({"grader": {"kind": "magic"}}, "grader", "magic"),
        ({"grader": {"kind": "function", "entry_point": "f", "hidden": []}}, "grader.function.hidden", "at least 1"),
        (
            {"grader": {"kind": "function", "entry_point": "f", "hidden": [{"args": "(f(),)", "expected": "1"}]}},
            "grader.function.hidden.0.args",
            "not a Python literal",
        ),
        ({"schema_version": 2}, "schema_version", "1"),
    ],
)
def test_a_wrong_field_is_named_with_file_and_line(
    tmp_path: Path, make_function_task: MakeTask, change: dict[str, Any], field: str | None, says: str
) -> None:
    good = make_function_task().model_dump(mode="json")
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps(good) + "\n\n" + json.dumps({**good, "id": "second", **change}) + "\n")

    with pytest.raises(TaskFormatError, match=says) as raised:
        load_jsonl(path)

    assert (raised.value.file, raised.value.line, raised.value.field) == (str(path), 3, field)
    assert f"{path}:3" in str(raised.value)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"{", "not JSON"),
        (b"[1]", "a task is a JSON object, this is a list"),
        (b'{"id": "\xff"}', "not JSON"),
        (b"[" * 99_999, "not JSON"),
    ],
    ids=["half", "list", "no utf-8", "deep"],
)
def test_a_line_that_is_no_object_is_named(tmp_path: Path, line: bytes, says: str) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(b"\n" + line + b"\n")

    with pytest.raises(TaskFormatError, match=says) as raised:
        load_jsonl(path)
    assert raised.value.line == 2


def test_an_id_that_occurs_twice_is_named_with_both_lines(tmp_path: Path, make_function_task: MakeTask) -> None:
    line = make_function_task().model_dump_json()
    path = tmp_path / "tasks.jsonl"
    path.write_text(f"{line}\n{line}\n")

    with pytest.raises(TaskFormatError, match="already the id of line 1") as raised:
        load_jsonl(path)
    assert (raised.value.line, raised.value.field) == (2, "id")


def test_files_that_cannot_be_used_say_so(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "broken.jsonl.gz").write_bytes(b"not gzip")

    for name, says in (
        ("missing.jsonl", "no task file"),
        ("empty.jsonl", "holds no task"),
        ("broken.jsonl.gz", "cannot be read"),
    ):
        with pytest.raises(UsageError, match=says):
            load_jsonl(tmp_path / name)


def test_what_an_option_may_hold(tmp_path: Path, make_function_task: MakeTask) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(make_function_task().model_dump_json())
    mine = TaskSet.of([make_function_task()])

    assert resolve(mine) is mine
    assert resolve(str(path)).ids == resolve(path).ids == ("add",)
    assert len(resolve(None)) == len(resolve("builtin")) >= 60
    with pytest.raises(UsageError, match="is not 'builtin'"):
        resolve("bultin")
