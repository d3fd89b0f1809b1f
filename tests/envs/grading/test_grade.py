"""Grading right and wrong submissions of each kind, in real cells."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from palaestra.envs.errors import GraderFault
from palaestra.envs.grading.grade import grade, run_visible
from palaestra.envs.grading.outcome import CasesRun, Interpreter
from palaestra.envs.grading.verdict import Verdict
from palaestra.envs.sandboxes.protocol import Sandbox
from palaestra.envs.tasks.task import FunctionCase, FunctionGrader, Task

MakeTask = Callable[..., Task]

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def graded(cell: Sandbox, task: Task, solution: str | None, **options: object) -> Verdict:
    await cell.renew()
    if solution is not None:
        await cell.write({task.solution_path: solution.encode()})
    return await grade(task, cell, **options)  # type: ignore[arg-type]


def statuses(result: Verdict | CasesRun) -> list[str]:
    return [case.status for case in (result.cases if isinstance(result, Verdict) else result.outcomes)]


@pytest.mark.parametrize("kind", ["function", "stdio", "script"])
@pytest.mark.parametrize("interpreter", ["new", "fork"])
async def test_the_reference_passes_and_nothing_does_not(
    cell: Sandbox,
    make_function_task: MakeTask,
    make_stdio_task: MakeTask,
    make_script_task: MakeTask,
    kind: str,
    interpreter: Interpreter,
) -> None:
    task = {"function": make_function_task, "stdio": make_stdio_task, "script": make_script_task}[kind]()

    right = await graded(cell, task, task.reference["solution.py"], interpreter=interpreter)
    nothing = await graded(cell, task, None, interpreter=interpreter)

    assert (right.passed, right.reward) == (True, 1.0)
    assert (nothing.passed, nothing.reward) == (False, 0.0)


async def test_each_case_of_a_function_is_judged_by_itself(cell: Sandbox, make_function_task: MakeTask) -> None:
    solution = """
def add(a, b):
    if a == 1: return 3.0
    if a == 'a': raise SystemExit(0)
    if a == 40: return object()
    return a + b
"""
    verdict = await graded(cell, make_function_task(), solution)

    assert statuses(verdict) == ["wrong", "error", "error", "passed"]


async def test_a_hang_leaves_the_results_before_it_standing(cell: Sandbox, make_function_task: MakeTask) -> None:
    solution = "def add(a, b):\n    while a == 'a': pass\n    return a + b\n"

    verdict = await graded(cell, make_function_task(), solution, step_s=0.5)

    assert statuses(verdict) == ["passed", "timeout", "missing", "missing"]


async def test_ending_the_process_leaves_the_results_before_it_standing(
    cell: Sandbox, make_function_task: MakeTask
) -> None:
    solution = "import os\ndef add(a, b):\n    if a == 'a': os._exit(0)\n    return a + b\n"

    verdict = await graded(cell, make_function_task(), solution)

    assert statuses(verdict) == ["passed", "error", "missing", "missing"]


async def test_arguments_a_function_changes_are_fresh_in_every_case(
    cell: Sandbox, make_function_task: MakeTask
) -> None:
    case = FunctionCase.of([1], expected=1)
    task = make_function_task(grader=FunctionGrader(entry_point="take", hidden=(case, case)))

    verdict = await graded(cell, task, "def take(items):\n    return items.pop()\n")

    assert verdict.passed


@pytest.mark.parametrize(
    ("solution", "message"),
    [
        ("def ad(a, b): return a", "NameError: name 'add' is not defined. Did you mean: 'ad'?"),
        ("def add(a, b): return value", "NameError: name 'value' is not defined"),
        ("def add(a, b): return b", "AssertionError: 2 != 3"),
        ("def add(a, b): return str(a)", "AssertionError: '1' != 3"),
        ("def add(a, b) return a", "SyntaxError: expected ':'"),
        ("import jso", "ModuleNotFoundError: No module named 'jso'"),
        ("def add(a): return a", "TypeError: add() takes 1 positional argument but 2 were given"),
        ("import json\ndef add(a, b): return json.dump_s(a)", "module 'json' has no attribute 'dump_s'"),
        ("def add(a, b): return [0] * 10 ** 12", "MemoryError"),
        ("def add(a, b): return add(a, b)", "RecursionError: maximum recursion depth exceeded"),
        ("def add(a, b):\n    while True: pass", "TimeoutError: 0.5s"),
        ("import os\nos._exit(7)", "SystemExit: 7"),
        ("import os\nos.kill(os.getpid(), 9)", "RuntimeError: killed by SIGKILL"),
        ("def add(a, b): return lambda: 0", "TypeError: the result cannot be compared: unsupported type 'function'"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    ],
)
@pytest.mark.parametrize("interpreter", ["new", "fork"])
async def test_the_message_of_a_visible_failure_is_cpythons_own(
    cell: Sandbox, make_function_task: MakeTask, solution: str, message: str, interpreter: Interpreter
) -> None:
    task = make_function_task()
    await cell.write({"solution.py": solution.encode()})

    run = await run_visible(task, cell, interpreter=interpreter, step_s=0.5)

    assert run.first_failure is not None
    assert message in run.first_failure.message


async def test_a_traceback_begins_in_the_solution_and_shows_its_lines(
    cell: Sandbox, make_function_task: MakeTask
) -> None:
    await cell.write({"solution.py": b"def add(a, b):\n    return a.missing\n"})

    run = await run_visible(make_function_task(), cell)

    assert run.first_failure is not None
    detail = run.first_failure.detail.splitlines()
    assert detail[:3] == [
        "Traceback (most recent call last):",
        '  File "solution.py", line 2, in add',
        "    return a.missing",
    ]


async def test_visible_failures_settle_the_verdict_without_a_hidden_run(
    cell: Sandbox, make_function_task: MakeTask
) -> None:
    task = make_function_task()
    await cell.write({"solution.py": b"def add(a, b): return open('/workspace/ran', 'a').write('x')"})
    visible = await run_visible(task, cell)

    verdict = await grade(task, cell, visible=visible)

    assert statuses(verdict) == ["wrong", "wrong"]
    assert await cell.read("ran") == b"xx"


async def test_programs_are_compared_line_by_line_without_trailing_white_space(
    cell: Sandbox, make_stdio_task: MakeTask
) -> None:
    task = make_stdio_task()
    loose = "import sys\nfor line in sys.stdin: print(2 * int(line), end=' \\n')\nprint('\\n')"
    wrong = "import sys\nfor line in sys.stdin: print(2 * int(line), end=' ')"

    assert (await graded(cell, task, loose)).passed
    assert not (await graded(cell, task, wrong)).passed


async def test_a_program_that_prints_the_right_thing_and_fails_has_failed(
    cell: Sandbox, make_stdio_task: MakeTask
) -> None:
    verdict = await graded(
        cell, make_stdio_task(), make_stdio_task().reference["solution.py"] + "\nraise SystemExit(1)"
    )

    assert statuses(verdict) == ["error", "error"]


async def test_a_program_runs_as_main_with_its_own_traceback(cell: Sandbox, make_stdio_task: MakeTask) -> None:
    await cell.write({"solution.py": b"import sys\nassert __name__ == '__main__'\nprint(sys.argv)\n1 / 0\n"})

    run = await run_visible(make_stdio_task(), cell)

    assert run.first_failure is not None
    assert run.first_failure.got == "['solution.py']"
    assert run.first_failure.message == "ZeroDivisionError: division by zero"
    assert run.first_failure.detail.splitlines()[1] == '  File "solution.py", line 4, in <module>'


async def test_after_a_program_hit_a_limit_the_rest_is_not_run(cell: Sandbox, make_stdio_task: MakeTask) -> None:
    verdict = await graded(cell, make_stdio_task(), "while True: pass", step_s=0.3)

    assert statuses(verdict) == ["timeout", "missing"]


async def test_the_check_runs_where_only_declared_files_are(cell: Sandbox, make_script_task: MakeTask) -> None:
    task = make_script_task()
    await cell.write(
        {"solution.py": b"import helper\nadd = helper.add\n", "helper.py": b"def add(a, b): return a + b\n"}
    )

    undeclared = await grade(task, cell)
    declared = make_script_task(reference={**task.reference, "helper.py": ""})
    await cell.write(
        {"solution.py": b"import helper\nadd = helper.add\n", "helper.py": b"def add(a, b): return a + b\n"}
    )

    assert not undeclared.passed
    assert (await grade(declared, cell)).passed


async def test_a_check_may_expect_exceptions_and_call_other_functions(
    cell: Sandbox, make_script_task: MakeTask
) -> None:
    check = """
def check(candidate):
    try:
        candidate(None, 1)
    except TypeError:
        pass
    else:
        raise AssertionError
    assert twice(4) == 8
    assert candidate(a=1, b=2) == 3
"""
    task = make_script_task(check=check)
    solution = "def add(a, b): return a + b\ndef twice(x): return add(x, x)\n"

    assert (await graded(cell, task, solution)).passed
    assert not (await graded(cell, task, "def add(a, b): return a + b\n")).passed


@pytest.mark.parametrize(
    "check",
    [
        "def check(candidate): return ]",
        "def verify(candidate): pass",
        "1 / 0\ndef check(candidate): pass",
        "def check(candidate): candidate(lambda: 0, 1)",
    ],
)
async def test_a_check_that_cannot_judge_is_a_fault_of_the_grader_and_never_a_zero(
    cell: Sandbox, make_script_task: MakeTask, check: str
) -> None:
    with pytest.raises(GraderFault, match="checked"):
        await graded(cell, make_script_task(check=check), "def add(a, b): return a + b")


async def test_verdicts_say_nothing_of_hidden_cases_but_whether_they_passed(
    cell: Sandbox, make_function_task: MakeTask
) -> None:
    solution = "def add(a, b):\n    if a in (1, 'a'): return a + b\n    raise ValueError(f'hidden {a} {b}')\n"

    verdict = await graded(cell, make_function_task(), solution)

    assert statuses(verdict) == ["passed", "passed", "error", "error"]
    assert "40" not in str(verdict)
    assert "hidden 40" not in str(verdict)
