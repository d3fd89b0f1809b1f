"""One submission, judged: what the agent may see (``run_visible``) and what counts (``grade``).

Expected values never enter a cell. Hidden inputs enter one only in ``grade``, which ends the episode, so that no
program can print them into an observation the agent still acts on.
"""

from __future__ import annotations

from typing import Literal

from palaestra.envs.errors import CellFull
from palaestra.envs.grading.blame import blame_the_grader_if_a_noop_fails
from palaestra.envs.grading.function_cases import run_function_cases
from palaestra.envs.grading.outcome import CaseOutcome, CasesRun, Interpreter
from palaestra.envs.grading.script_check import run_script_check
from palaestra.envs.grading.stdio_cases import run_stdio_cases
from palaestra.envs.grading.verdict import CaseResult, Verdict
from palaestra.envs.sandboxes.protocol import Sandbox
from palaestra.envs.tasks.task import FunctionCase, FunctionGrader, ScriptGrader, StdioCase, StdioGrader, Task

MAX_ARTEFACT_BYTES = 1 << 20
Which = Literal["visible", "hidden", "all"]


async def run_visible(
    task: Task, sandbox: Sandbox, *, interpreter: Interpreter = "new", step_s: float | None = None
) -> CasesRun:
    """Run the visible cases against the solution as it lies in the episode's cell. Empty when the task has none."""
    return await _run_cases(task, sandbox, "visible", interpreter=interpreter, timeout_s=_deadline_s(task, step_s))


async def grade(
    task: Task,
    sandbox: Sandbox,
    *,
    interpreter: Interpreter = "new",
    step_s: float | None = None,
    visible: CasesRun | None = None,
) -> Verdict:
    """Judge the solution as it lies in the episode's cell; the cell is of no further use to the episode afterwards.

    ``visible`` may hold the run of the visible cases on this very solution: where one failed, the submission has
    failed, and the hidden cases are not run; where all passed, they are not run again. Passing means every visible
    and every hidden case (or the check).

    Raises ``GraderFault`` where no verdict can be reached and ``SandboxDied`` where the cell's host is lost. Both are
    infrastructure and never a reward of 0.
    """
    timeout_s = _deadline_s(task, step_s)
    known = [] if visible is None or not visible.started else [_case_result(outcome) for outcome in visible.outcomes]
    if any(case.status != "passed" for case in known):
        return _verdict(known)
    which: Which = "hidden" if known else "all"
    if isinstance(task.grader, ScriptGrader):
        return await _grade_script(task, task.grader, sandbox, known, interpreter, timeout_s)
    run = await _run_cases(task, sandbox, which, interpreter=interpreter, timeout_s=timeout_s)
    if not run.started:
        # Either the agent spoilt its cell or we are at fault. In a fresh cell only the second can be true.
        if not await _restart_from_artefacts(task, sandbox):
            return _missing(task)
        run = await _run_cases(task, sandbox, which, interpreter=interpreter, timeout_s=timeout_s)
        if not run.started:
            await blame_the_grader_if_a_noop_fails(task, sandbox, run.executions[-1], timeout_s)
    return _verdict(known + [_case_result(outcome) for outcome in run.outcomes])


async def _grade_script(
    task: Task,
    grader: ScriptGrader,
    sandbox: Sandbox,
    known: list[CaseResult],
    interpreter: Interpreter,
    timeout_s: float,
) -> Verdict:
    if grader.visible and not known:
        run = await _run_cases(task, sandbox, "visible", interpreter=interpreter, timeout_s=timeout_s)
        known = [_case_result(outcome) for outcome in run.outcomes]
    if not await _restart_from_artefacts(task, sandbox):
        return _missing(task)
    return _verdict([*known, await run_script_check(task, grader, sandbox, timeout_s=timeout_s)])


async def _run_cases(
    task: Task, sandbox: Sandbox, which: Which, *, interpreter: Interpreter, timeout_s: float
) -> CasesRun:
    grader = task.grader
    visible: tuple[FunctionCase | StdioCase, ...] = () if which == "hidden" else grader.visible
    hidden: tuple[FunctionCase | StdioCase, ...] = ()
    if which != "visible" and not isinstance(grader, ScriptGrader):
        hidden = grader.hidden
    names = [f"visible {number}" for number in range(1, len(visible) + 1)]
    names += [f"hidden {number}" for number in range(1, len(hidden) + 1)]
    if not names:
        return CasesRun((), ())
    if isinstance(grader, StdioGrader):
        return await run_stdio_cases(
            sandbox,
            path=task.solution_path,
            cases=[case for case in visible + hidden if isinstance(case, StdioCase)],
            names=names,
            interpreter=interpreter,
            timeout_s=timeout_s,
        )
    return await run_function_cases(
        sandbox,
        path=task.solution_path,
        entry_point=grader.entry_point,
        cases=[case for case in visible + hidden if isinstance(case, FunctionCase)],
        names=names,
        rel_tol=grader.rel_tol if isinstance(grader, FunctionGrader) else 0.0,
        interpreter=interpreter,
        timeout_s=timeout_s,
    )


async def _restart_from_artefacts(task: Task, sandbox: Sandbox) -> bool:
    """A fresh cell with the task's own files and what the agent made of the declared ones; False without a solution."""
    files = {path: text.encode() for path, text in task.files.items()}
    for path in {*task.reference, task.solution_path}:
        files.pop(path, None)
        try:
            files[path] = await sandbox.read(path, max_bytes=MAX_ARTEFACT_BYTES)
        except (FileNotFoundError, CellFull):  # the agent removed it, made it huge, or broke the cell it lay in
            continue
    await sandbox.renew()
    await sandbox.write(files)
    return task.solution_path in files


def _case_result(outcome: CaseOutcome) -> CaseResult:
    """What a verdict keeps. Of a hidden case only the status: any text of the program's may carry its inputs."""
    visible = outcome.name.startswith("visible")
    return CaseResult(outcome.name, outcome.status, outcome.message if visible else "")


def _verdict(cases: list[CaseResult]) -> Verdict:
    passed = all(case.status == "passed" for case in cases)
    return Verdict(passed=passed, reward=1.0 if passed else 0.0, cases=tuple(cases))


def _missing(task: Task) -> Verdict:
    reason = f"there is no readable {task.solution_path} of at most {MAX_ARTEFACT_BYTES >> 20} MiB"
    return _verdict([CaseResult("solution", "missing", reason)])


def _deadline_s(task: Task, step_s: float | None) -> float:
    return task.limits.step_s if step_s is None else step_s
