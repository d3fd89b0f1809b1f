"""The repair lines as data: splits that never meet, ids that decide everything, suggestions that can only be one."""

from __future__ import annotations

import builtins
import hashlib
import keyword
import re
from typing import get_args

import pytest

from palaestra.envs.errors import UsageError
from palaestra.envs.suites.code.repair_lines import (
    LONG_KINDS,
    STANDARD_KINDS,
    Kind,
    RepairLine,
    repair_line,
    repair_lines,
)
from palaestra.envs.suites.code.repair_lines_names import (
    NOUNS,
    VERBS,
    Split,
    is_suggested,
    names,
    neighbours,
    split_of,
)
from palaestra.envs.tasks.task import FunctionGrader, Task

KINDS: tuple[Kind, ...] = get_args(Kind)
SPLITS: tuple[Split, ...] = get_args(Split)
NAME = re.compile(rf"\b(?:{'|'.join(VERBS)})_(?:{'|'.join(NOUNS)})\b")

GOLDEN = {
    "repair_lines/train/op-000000": "853de2b6179c5871",
    "repair_lines/train/order-000001": "a6ab7e3e28afdec7",
    "repair_lines/train/guard-000002": "c6b983e5d7cc7709",
    "repair_lines/train/conv-000003": "044e8803c4c6be9d",
    "repair_lines/train/name-000123": "67a1e6c69d4b6884",
    "repair_lines/held_out/attr-000004": "7abebb9c46144379",
    "repair_lines/held_out/arg-000005": "3ffd6099e7f677e3",
    "repair_lines/held_out/chain-999999": "8e99b0421da278b3",
}


def lines(split: Split, kind: Kind, count: int = 40) -> list[RepairLine]:
    return [repair_line(f"repair_lines/{split}/{kind}-{seed:06d}") for seed in range(count)]


def grader_of(task: Task) -> FunctionGrader:
    assert isinstance(task.grader, FunctionGrader)
    return task.grader


def test_the_splits_share_no_name_and_about_a_fifth_is_held_out() -> None:
    assert len(names("held_out")) == 65
    assert len(names("train")) == 191
    assert not set(names("train")) & set(names("held_out"))


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_name_in_a_task_belongs_to_its_split(split: Split, kind: Kind) -> None:
    for task in repair_lines(split, kinds=[kind], seeds=range(40)):
        found = NAME.findall(task.model_dump_json())
        assert found
        assert {split_of(name) for name in found} == {split}


@pytest.mark.parametrize("task_id", GOLDEN)
def test_a_task_is_the_same_in_every_process_and_on_every_version(task_id: str) -> None:
    text = repair_line(task_id).task().model_dump_json(exclude_defaults=True)  # new options of tasks change none
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == GOLDEN[task_id]


def test_a_set_holds_every_kind_for_every_seed_and_knows_kinds_without_making_tasks() -> None:
    tasks = repair_lines("train", seeds=range(100, 5100))

    assert len(tasks) == 5000 * len(STANDARD_KINDS)
    assert tasks.ids[0] == "repair_lines/train/op-000100"
    assert {kind: len(ids) for kind, ids in tasks.kinds.items()} == dict.fromkeys(STANDARD_KINDS, 5000)


def test_the_longer_profile_adds_two_kinds() -> None:
    tasks = repair_lines("held_out", kinds=(*STANDARD_KINDS, *LONG_KINDS), seeds=range(2))

    assert set(tasks.kinds) == set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_task_shows_only_its_prompt_and_visible_cases(kind: Kind) -> None:
    for line in lines("train", kind):
        task = line.task()
        assert task.instruction == line.prompt == f"def {line.function}{line.signature} # {line.doc}"
        assert "\n" not in task.instruction
        assert not task.files
        if line.kind in ("name", "attr", "chain"):
            assert line.real not in task.instruction
        if line.keyword:
            assert line.keyword not in task.instruction


@pytest.mark.parametrize("kind", KINDS)
def test_there_are_one_or_two_visible_cases_and_two_to_four_hidden_ones_and_none_is_both(kind: Kind) -> None:
    for line in lines("train", kind):
        grader = grader_of(line.task())
        assert 1 <= len(grader.visible) <= 2
        assert 2 <= len(grader.hidden) <= 4
        arguments = [case.args for case in (*grader.visible, *grader.hidden)]
        assert len(set(arguments)) == len(arguments)


@pytest.mark.parametrize("kind", KINDS)
def test_cases_built_without_checks_would_pass_the_checks(kind: Kind) -> None:
    for line in lines("held_out", kind, count=5):
        task = line.task()
        assert Task.model_validate_json(task.model_dump_json()) == task


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_is_the_prelude_and_one_line(kind: Kind) -> None:
    for line in lines("train", kind, count=5):
        task = line.task()
        assert (
            task.reference["solution.py"]
            == f"{task.prelude}def {line.function}{line.signature}:return {line.solution}\n"
        )


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("kind", ["name", "attr", "chain"])
def test_the_real_name_is_the_only_one_in_scope_that_can_be_suggested(split: Split, kind: Kind) -> None:
    for line in lines(split, kind):
        in_scope = {*NAME.findall(line.prelude), line.function, "a", "n", "kit", *dir(builtins)}
        assert {name for name in in_scope if is_suggested(line.stale, name)} == {line.real}
        assert line.stale not in in_scope


def test_the_stale_name_never_is_the_function_itself() -> None:
    assert all(line.stale != line.function for kind in ("name", "attr") for line in lines("held_out", kind))


@pytest.mark.parametrize(
    ("wrong", "candidate", "suggested"),
    [
        ("read_row", "read_row", True),
        ("read_row", "read_tag", True),  # three substitutions: cost 6 of at most 6
        ("read_row", "send_row", True),
        ("read_row", "send_tag", False),
        ("read_row", "read_rows", True),
        ("abc", "xyz", False),
    ],
)
def test_what_can_be_suggested_follows_cpythons_distance(wrong: str, candidate: str, suggested: bool) -> None:
    assert is_suggested(wrong, candidate) is suggested
    assert is_suggested(candidate, wrong) is suggested


@pytest.mark.parametrize("split", SPLITS)
def test_neighbours_are_exactly_the_other_names_that_can_be_suggested(split: Split) -> None:
    pool = names(split)[::13]
    for name in pool:
        assert neighbours(split)[name] == {
            other for other in names(split) if other != name and is_suggested(name, other)
        }


def test_no_name_is_a_keyword_or_a_builtin() -> None:
    for name in (*names("train"), *names("held_out")):
        assert not keyword.iskeyword(name)
        assert not hasattr(builtins, name)


@pytest.mark.parametrize("kind", ["op", "order", "guard"])
def test_expected_values_are_those_of_the_documented_operation(kind: Kind) -> None:
    meaning = {
        "sum": lambda a, b: a + b,
        "product": lambda a, b: a * b,
        "minus": lambda a, b: a - b,
        "modulo": lambda a, b: a % b,
        "larger": lambda a, b: a if a > b else b,
        "smaller": lambda a, b: a if a < b else b,
        "difference": lambda a, b: a - b,
        "ratio": lambda a, b: a // b,
        "power": lambda a, b: a**b,
        "safe quotient": lambda a, b: 0 if b == 0 else a // b,
        "safe remainder": lambda a, b: 0 if b == 0 else a % b,
    }
    for line in lines("train", kind):
        apply = meaning[line.doc]
        swapped = line.solution.startswith("b")
        for (a, b), expected in zip(line.arguments, line.expected, strict=True):
            assert (apply(b, a) if swapped else apply(a, b)) == expected


def test_the_visible_cases_tell_all_six_operations_apart() -> None:
    line = lines("train", "op")[0]
    results = [
        (f(7, 3), f(2, 5))
        for f in (int.__add__, int.__mul__, int.__sub__, int.__mod__, lambda a, b: max(a, b), lambda a, b: min(a, b))
    ]

    assert line.arguments[:2] == ((7, 3), (2, 5))
    assert len(set(results)) == 6


def test_both_operand_orders_occur_and_every_case_tells_them_apart() -> None:
    found = lines("train", "order")

    assert {line.solution[0] for line in found} == {"a", "b"}
    for line in found:
        assert all(a != b and {a, b} != {2, 4} for a, b in line.arguments)


@pytest.mark.parametrize(
    "bad",
    [
        "repair_lines/train/nothing-000001",
        "repair_lines/test/op-000001",
        "repair_lines/train/op-1",
        "write/roman",
    ],
)
def test_an_id_that_is_none_is_refused(bad: str) -> None:
    with pytest.raises(UsageError, match="is no id of repair_lines"):
        repair_line(bad)


def test_an_unknown_kind_split_or_seed_is_refused() -> None:
    with pytest.raises(UsageError, match="unknown kinds"):
        repair_lines("train", kinds=["operator"])  # type: ignore[list-item]
    with pytest.raises(UsageError, match="split must be one of"):
        repair_lines("test")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"0\.\.999999"):
        repair_lines("train", seeds=range(999_999, 1_000_001))
