"""The built-in tasks as data: how many, how stable, how varied, and what each of them promises its reader."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import pytest

from palaestra.envs.errors import UsageError
from palaestra.envs.suites.code import FAMILIES, builtin
from palaestra.envs.tasks.task import FunctionGrader, ScriptGrader, StdioGrader, Task

TASKS = tuple(builtin(seeds=4))
BY_ID = {task.id: task for task in TASKS}

GOLDEN = {
    "write/shipping-fee-000": "cac6e94870050026",
    "repair/binary-search-001": "569ec5d1faf7616a",
    "parse/duration-002": "656facb3892cc4d9",
    "compute/calendar-003": "8269d05cd6a9ace3",
    "transform/flatten-000": "134a75f904e653b3",
    "algorithm/cheapest-path-001": "fc42720fb9af8387",
    "program/ledger-002": "1d807e5201471f76",
    "check/assign-003": "0b2ff92f6e06e69b",
    "parse/csv-line": "95781464cbfc2a1c",
}


def fingerprint(task: Task) -> str:
    """New options of tasks change none that leaves them alone."""
    return hashlib.sha256(task.model_dump_json(exclude_defaults=True).encode()).hexdigest()[:16]


def hidden_inputs(task: Task) -> tuple[str, ...]:
    match task.grader:
        case FunctionGrader(hidden=cases):
            return tuple(case.args for case in cases)
        case StdioGrader(hidden=programs):
            return tuple(case.stdin for case in programs)
        case ScriptGrader(check=check):
            return (check,)


def test_there_are_at_least_sixty_tasks_of_at_least_six_kinds_for_all_three_graders() -> None:
    kinds = {task.kind for task in TASKS}

    assert len(TASKS) >= 60
    assert kinds >= {"write", "repair", "parse", "compute", "transform", "algorithm"}
    assert {task.grader.kind for task in TASKS} == {"function", "stdio", "script"}


def test_at_least_half_of_the_recipes_and_of_the_tasks_are_generated() -> None:
    assert sum(family.is_generator for family in FAMILIES) * 2 >= len(FAMILIES)
    assert sum("generated" in task.tags for task in TASKS) * 2 >= len(TASKS)


def test_ids_are_unique_and_more_seeds_only_add_tasks() -> None:
    few, many = builtin(seeds=1), builtin(seeds=3)

    assert len(set(many.ids)) == len(many)
    assert set(few.ids) < set(many.ids)
    assert all(few.get(task_id) == many.get(task_id) for task_id in few.ids)


@pytest.mark.parametrize("seeds", [0, 1001])
def test_a_number_of_seeds_that_has_no_ids_is_refused(seeds: int) -> None:
    with pytest.raises(UsageError, match=r"must lie in 1\.\.1000"):
        builtin(seeds=seeds)


@pytest.mark.parametrize("task_id", GOLDEN)
def test_a_task_is_the_same_in_every_process_and_on_every_version(task_id: str) -> None:
    assert fingerprint(BY_ID[task_id]) == GOLDEN[task_id]


def test_tasks_do_not_depend_on_the_hash_seed_of_the_process() -> None:
    program = (
        "import hashlib; from palaestra.envs.suites.code import builtin;"
        "print(hashlib.sha256(''.join(task.model_dump_json() for task in builtin(seeds=1)).encode()).hexdigest())"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "77")
    }

    assert len(digests) == 1


def test_no_two_tasks_ask_the_same_hidden_questions() -> None:
    seen: dict[tuple[str, ...], str] = {}
    for task in TASKS:
        other = seen.setdefault(hidden_inputs(task), task.id)
        assert other == task.id


def test_the_seeds_of_a_generator_ask_for_different_things() -> None:
    for family in FAMILIES:
        if family.is_generator:
            tasks = [entry.make() for entry in family.entries(4)]
            assert len({(task.instruction, *task.files.values()) for task in tasks}) == 4, family.name


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.id)
def test_hidden_cases_are_several_and_none_of_them_is_shown(task: Task) -> None:
    match task.grader:
        case FunctionGrader(visible=shown, hidden=kept):
            assert 2 <= len(shown) <= 4
            assert 6 <= len(kept) <= 15
            assert not {case.args for case in shown} & {case.args for case in kept}
        case StdioGrader(visible=texts, hidden=kept_texts):
            assert 2 <= len(texts) <= 4
            assert 6 <= len(kept_texts) <= 15
            assert not {case.stdin for case in texts} & {case.stdin for case in kept_texts}
        case ScriptGrader(visible=shown, check=check):
            assert 1 <= len(shown) <= 4
            assert check.count("assert ") >= 2


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.id)
def test_hidden_answers_are_not_all_the_same(task: Task) -> None:
    match task.grader:
        case FunctionGrader(hidden=kept):
            assert len({case.expected for case in kept}) >= 2
        case StdioGrader(hidden=kept_texts):
            assert len({case.stdout for case in kept_texts}) >= 2


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.id)
def test_an_instruction_names_the_file_the_function_and_an_example(task: Task) -> None:
    assert "`solution.py`" in task.instruction
    match task.grader:
        case FunctionGrader(entry_point=name) | ScriptGrader(entry_point=name):
            assert f"`{name}(" in task.instruction
            first = task.grader.visible[0]
            assert f"== {first.expected}" in task.instruction
        case StdioGrader(visible=texts):
            assert all(line in task.instruction for line in texts[0].stdout.splitlines())


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.id)
def test_a_task_survives_the_way_through_json(task: Task) -> None:
    assert Task.model_validate_json(task.model_dump_json()) == task


def test_only_repair_tasks_begin_with_a_file_and_it_differs_from_the_reference() -> None:
    for task in TASKS:
        assert (task.kind == "repair") == bool(task.files)
        assert task.files != task.reference
