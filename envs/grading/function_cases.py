"""Run a function of the solution on cases: one process for all of them, expected values and comparison on the host."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

from palaestra.envs.grading import drivers
from palaestra.envs.grading.codec import MalformedValue, decode
from palaestra.envs.grading.compare import equal, show
from palaestra.envs.grading.outcome import CaseOutcome, CasesRun, Interpreter, ending, last_line
from palaestra.envs.grading.verdict import CaseStatus
from palaestra.envs.sandboxes.protocol import ExecResult, Python, Sandbox
from palaestra.envs.tasks.task import FunctionCase

RESULT_KIB = 1024
HASH_SEED = {"PYTHONHASHSEED": "0"}
"""So that a fresh interpreter prints sets in the same order every time."""


async def run_function_cases(
    sandbox: Sandbox,
    *,
    path: str,
    entry_point: str,
    cases: Sequence[FunctionCase],
    names: Sequence[str],
    rel_tol: float,
    interpreter: Interpreter,
    timeout_s: float,
) -> CasesRun:
    """Call ``entry_point`` of the file at ``path`` on every case within one deadline of ``timeout_s``.

    A case that raises leaves the others alone; one that hangs or ends the process fails itself and those after it.
    """
    request = repr((path, entry_point, tuple((case.args, case.kwargs) for case in cases)))
    result = await sandbox.run(
        Python(drivers.source("encode", "function_cases"), interpreter=interpreter),
        timeout_s=timeout_s,
        stdin=request.encode("utf-8", "surrogatepass"),
        env=HASH_SEED,
        result_kib=RESULT_KIB,
    )
    reports = _reports(result.result)
    outcomes: list[CaseOutcome] = []
    lost: tuple[CaseStatus, str] | None = None
    unloaded = next((report for report in reports.values() if report[0] in ("load", "absent")), None)
    for index, (name, case) in enumerate(zip(names, cases, strict=True)):
        given = call_text(entry_point, case)
        if unloaded is not None:
            message = str(unloaded[1])
            detail = message if unloaded[0] == "load" else last_line(message)
            outcome = CaseOutcome(name, "error", last_line(message), detail, given, case.expected)
        elif index in reports:
            outcome = _judge(name, given, case, reports[index], rel_tol)
        elif lost is None:
            lost = ending(result, timeout_s)
            outcome = CaseOutcome(name, lost[0], lost[1], "", given, case.expected)
        else:
            outcome = CaseOutcome(name, "missing", lost[1], "", given, case.expected)
        outcomes.append(outcome)
    return CasesRun(tuple(outcomes), (result,), started=_started(result), printed=result.stdout_text)


def call_text(entry_point: str, case: FunctionCase) -> str:
    """The call as a person would write it."""
    values = [show(value, max_chars=400) for value in ast.literal_eval(case.args)]
    values += [f"{key}={show(value, max_chars=400)}" for key, value in ast.literal_eval(case.kwargs).items()]
    return f"{entry_point}({', '.join(values)})"


def _judge(name: str, given: str, case: FunctionCase, report: tuple[Any, ...], rel_tol: float) -> CaseOutcome:
    expected = ast.literal_eval(case.expected)
    wanted = show(expected)
    if report[1] == "raised":
        message = str(report[2])
        return CaseOutcome(name, "error", last_line(message), message, given, wanted)
    if report[1] == "unsupported":
        message = f"TypeError: the result cannot be compared: {report[2]}"
        return CaseOutcome(name, "error", message, message, given, wanted)
    try:
        got = decode(report[2])
    except MalformedValue as error:
        message = f"TypeError: the result cannot be read: {error}"
        return CaseOutcome(name, "error", message, message, given, wanted)
    if equal(got, expected, rel_tol=rel_tol):
        return CaseOutcome(name, "passed", "", "", given, wanted, show(got))
    return CaseOutcome(name, "wrong", f"AssertionError: {show(got)} != {wanted}", "", given, wanted, show(got))


def _started(result: ExecResult) -> bool:
    return result.result.startswith(b'["t","ready"]')


def _reports(data: bytes) -> dict[Any, tuple[Any, ...]]:
    """Case index (or the word of a report without one) to its first report; lines that are none are skipped."""
    reports: dict[Any, tuple[Any, ...]] = {}
    for line in data.splitlines():
        try:
            report = decode(line)
        except MalformedValue:
            continue
        if type(report) is tuple and _is_report(report):
            reports.setdefault(report[0], report)
    return reports


def _is_report(report: tuple[Any, ...]) -> bool:
    if any(type(part) not in (int, str) for part in report):
        return False
    if len(report) == 2:
        return report[0] in ("load", "absent")
    return len(report) == 3 and type(report[0]) is int and report[1] in ("value", "raised", "unsupported")
