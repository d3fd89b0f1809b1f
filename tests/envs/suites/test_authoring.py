"""How drafts become tasks: sources out of real functions, bugs into them, inputs for them."""

from __future__ import annotations

import ast
import json
import random
from typing import Any

import pytest

from palaestra.envs.suites.code.authoring import (
    Bug,
    Cases,
    FunctionDraft,
    ProgramDraft,
    draw_calls,
    generator,
)
from palaestra.envs.suites.code.sources import baked, signature_text


def shout(text: str, times: int = 1, *, mark: str, table: dict[str, int]) -> dict[str, Any]:
    """A docstring that mentions mark."""
    get = str.format("{mark}", mark=mark)
    return {"text": text + mark * times, "get": get, "size": table.get(text, len(table))}


def half(value: int) -> int:
    return value // 2


def double_half(value: int) -> int:
    return half(value) * 2 if value else double_half(1)


def echo(text: str, *, mark: str) -> str:
    return f"{mark}{text}"


def test_rules_become_constants_above_the_function_and_leave_its_signature() -> None:
    source = baked(shout, name="cry", rules={"mark": "!", "table": {"a": 3}})

    constants = {
        target.id: ast.literal_eval(node.value)
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and isinstance(target := node.targets[0], ast.Name)
    }
    assert constants == {"MARK": "!", "TABLE": {"a": 3}}
    assert "def cry(text: str, times: int = 1) -> dict[str, object]:" in source


def test_a_rule_is_not_renamed_where_its_name_is_an_attribute_or_a_keyword() -> None:
    source = baked(shout, name="cry", rules={"mark": "!", "table": {}})

    assert "mark=MARK)" in source
    assert "TABLE.get(text, len(TABLE))" in source


def test_the_docstring_stays_at_home() -> None:
    assert "docstring" not in baked(shout, name="cry", rules={"mark": "!", "table": {}})


def test_modules_and_helpers_come_along_and_recursion_follows_the_new_name() -> None:
    source = baked(double_half, name="floor_even", uses=(json, half))

    assert "import json" in source
    assert source.index("def half(value: int)") < source.index("def floor_even(value: int) -> int:")
    assert "else floor_even(1)" in source


def test_a_rule_that_the_draft_forgot_is_named() -> None:
    with pytest.raises(ValueError, match=r"shout has the rules \['table'\]"):
        baked(shout, name="cry", rules={"mark": "!"})


def test_a_signature_shows_defaults_and_hides_rules() -> None:
    assert signature_text(shout) == "(text: str, times: int = 1) -> dict[str, object]"


def test_expected_values_come_from_the_solving_function_and_a_bug_only_changes_the_files() -> None:
    bug = Bug("value // 2", "value // 2 + 1", exposed_by=((8,), (9,)))
    draft = FunctionDraft(half, "Half.", Cases([(2,)], [(3,), (0,)]), name="halved", bug=bug)
    task = draft.task("repair/half", "repair")

    assert task.grader.kind == "function"
    assert [(case.args, case.expected) for case in task.grader.visible] == [("(8,)", "4"), ("(2,)", "1")]
    assert [(case.args, case.expected) for case in task.grader.hidden] == [("(9,)", "4"), ("(3,)", "1"), ("(0,)", "0")]
    assert "return value // 2 + 1\n" in task.files["solution.py"]
    assert "return value // 2\n" in task.reference["solution.py"]


def test_what_exposes_a_bug_is_not_asked_twice() -> None:
    bug = Bug("value // 2", "value // 2 + 1", exposed_by=((8,), (9,)))
    task = FunctionDraft(half, "Half.", Cases([(9,), (2,)], [(8,), (9,), (3,)]), bug=bug).task("repair/half", "repair")

    assert task.grader.kind == "function"
    assert [case.args for case in task.grader.visible] == ["(8,)", "(2,)"]
    assert [case.args for case in task.grader.hidden] == ["(9,)", "(3,)"]


def test_a_bug_is_written_with_the_names_of_rules_as_they_stand_in_the_function() -> None:
    bug = Bug("{mark}{text}", "{text}{mark}", exposed_by=(("a",), ("b",)))
    task = FunctionDraft(echo, "Echo.", Cases([], []), rules={"mark": "~"}, bug=bug).task("repair/echo", "repair")

    assert 'f"{text}{MARK}"' in task.files["solution.py"]


def test_a_bug_that_does_not_occur_once_is_refused() -> None:
    bug = Bug("nowhere", "", exposed_by=((8,), (9,)))

    with pytest.raises(ValueError, match="must occur once in the reference, not 0 times"):
        FunctionDraft(half, "Half.", Cases([], []), bug=bug).task("repair/half", "repair")


def test_a_program_reads_standard_input_through_the_same_function_that_gave_the_expected_output() -> None:
    draft = ProgramDraft(echo, "Echo.", Cases(["a\n"], ["b\n"]), rules={"mark": ">"})
    task = draft.task("program/echo", "program")

    assert task.grader.kind == "stdio"
    assert [case.stdout for case in (*task.grader.visible, *task.grader.hidden)] == [">a\n", ">b\n"]
    assert "sys.stdout.write(solve(sys.stdin.read()))" in task.reference["solution.py"]
    assert "for the input\n\n    a\n\nit prints\n\n    >a" in task.instruction


def test_drawn_inputs_are_distinct_and_never_repeat_an_edge() -> None:
    drawn = draw_calls(random.Random(0), lambda r: (r.randint(0, 12),), edges=[(3,), (4,)], visible=3, hidden=9)

    assert len(drawn.visible) == 3
    assert len(drawn.hidden) == 9
    assert list(drawn.hidden[:2]) == [(3,), (4,)]
    assert len({*drawn.visible, *drawn.hidden}) == 12


def test_inputs_that_vary_too_little_are_an_error_and_not_an_endless_loop() -> None:
    with pytest.raises(ValueError, match="vary too little"):
        draw_calls(random.Random(0), lambda r: (r.randint(0, 3),), visible=3, hidden=9)


def test_a_generator_makes_each_task_from_a_stream_of_its_own() -> None:
    def draft(rng: random.Random) -> FunctionDraft:
        return FunctionDraft(half, "Half.", draw_calls(rng, lambda r: (r.randint(0, 10**9),)))

    first, second = generator("write", "half", draft).entries(2)

    assert (first.id, second.id) == ("write/half-000", "write/half-001")
    assert second.make() == second.make()
    assert first.make().grader != second.make().grader
