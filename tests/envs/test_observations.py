"""What the agent reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from palaestra.envs import observations
from palaestra.envs.grading.outcome import CaseOutcome, CasesRun, ending
from palaestra.envs.sandboxes.protocol import ExecResult
from palaestra.envs.tasks.task import Task

OK = ExecResult(0, None, b"", b"", 0, 0, b"", False, 0.1, 0.1, 1.0, False, None, 0)
WRONG = CaseOutcome("visible 1", "wrong", "AssertionError: 2 != 3", "", "add(1, 2)", "3", "2")


def test_the_first_observation_says_what_is_there_and_how_to_answer(make_function_task: Callable[..., Task]) -> None:
    text = observations.first(make_function_task(), action_format="blocks", feedback="terminal")

    assert text.startswith("Repair add(a, b) in solution.py.")
    assert "- solution.py (2 lines)" in text
    assert "<submit/>" in text


def test_for_last_line_feedback_it_is_the_instruction_alone(make_function_task: Callable[..., Task]) -> None:
    task = make_function_task()

    assert observations.first(task, action_format="program", feedback="last_line") == task.instruction


def test_a_command_is_shown_as_a_terminal_shows_it() -> None:
    result = dataclasses.replace(OK, exit_code=3, stdout=b"out\n", stderr=b"err\n", orphans_killed=2)

    assert observations.execution("make", result, 5.0).splitlines() == [
        "$ make",
        "out",
        "err",
        "[exit code 3]",
        "[2 processes it left behind were ended]",
    ]
    assert observations.execution("true", OK, 5.0) == "$ true\n[no output]"


def test_a_limit_that_was_hit_is_named() -> None:
    late = dataclasses.replace(OK, exit_code=None, signal=9, timed_out=True, killed_by="deadline")

    assert observations.execution("x", late, 2.5).endswith("[TimeoutError: 2.5s]")
    assert ending(dataclasses.replace(OK, killed_by="memory"), 1.0) == ("limit", "MemoryError")
    assert ending(dataclasses.replace(OK, killed_by="output"), 1.0)[0] == "limit"
    assert ending(dataclasses.replace(OK, exit_code=None, signal=11), 1.0) == (
        "error",
        "RuntimeError: killed by SIGSEGV",
    )
    assert ending(dataclasses.replace(OK, exit_code=4), 1.0) == ("error", "SystemExit: 4")


def test_processes_that_memory_cost_are_named_where_the_command_went_on() -> None:
    survived = dataclasses.replace(OK, stdout=b"137\n", oom_kills=2)

    assert observations.execution("make -j", survived, 5.0).splitlines() == [
        "$ make -j",
        "137",
        "[2 processes were killed: all of the sandbox's memory was used]",
    ]
    killed = dataclasses.replace(OK, exit_code=None, signal=9, killed_by="memory", oom_kills=1)
    assert observations.execution("x", killed, 5.0) == "$ x\n[MemoryError]"


def test_a_failed_case_shows_input_expectation_and_result() -> None:
    run = CasesRun((WRONG, CaseOutcome("visible 2", "passed")), (OK,), printed="debug\n")

    assert observations.visible_cases(run).splitlines() == [
        "Visible tests: 1 of 2 passed.",
        "visible 1 failed",
        "  input:    add(1, 2)",
        "  expected: 3",
        "  got:      2",
        "The program printed:",
        "debug",
    ]


def test_one_message_for_all_cases_is_shown_once() -> None:
    broken = [CaseOutcome(f"visible {n}", "error", "SyntaxError: x", "line\nSyntaxError: x\n") for n in (1, 2, 3)]

    text = observations.visible_cases(CasesRun(tuple(broken), (OK,)))

    assert text.count("SyntaxError") == 1


def test_many_failures_are_counted_and_not_all_shown() -> None:
    text = observations.visible_cases(CasesRun((WRONG,) * 20, (OK,)))

    assert "[15 more failures not shown]" in text


@given(st.text(), st.integers(100, 300))
def test_a_shortened_text_fits_and_can_be_written_as_utf8(text: str, max_chars: int) -> None:
    short = observations.shorten(text * 20, max_chars)

    assert len(short) <= max_chars
    short.encode()


def test_what_is_cut_is_counted() -> None:
    text = observations.shorten("+" * 500 + "*" * 500, 200, missing=70)

    shown = text.count("+") + text.count("*")
    assert len(text) == 200
    assert text.startswith("+++")
    assert text.endswith("***")
    assert f"[... {1070 - shown} characters not shown ...]" in text


def test_what_the_sandbox_already_cut_is_counted_too() -> None:
    result = dataclasses.replace(OK, stdout=b"head tail", stdout_dropped_bytes=1000)

    assert "[... 1000 characters not shown ...]" in observations.execution("x", result, 1.0)
