"""Run the solution as a program on each case's stdin; compare what it printed on the host."""

from __future__ import annotations

from collections.abc import Sequence

from palaestra.envs.grading import drivers
from palaestra.envs.grading.function_cases import HASH_SEED
from palaestra.envs.grading.outcome import CaseOutcome, CasesRun, Interpreter, ending, last_line
from palaestra.envs.sandboxes.protocol import ExecResult, Python, Sandbox
from palaestra.envs.tasks.task import StdioCase


async def run_stdio_cases(
    sandbox: Sandbox,
    *,
    path: str,
    cases: Sequence[StdioCase],
    names: Sequence[str],
    interpreter: Interpreter,
    timeout_s: float,
) -> CasesRun:
    """One run a case, each with a deadline of ``timeout_s``. After a case that hit a limit the rest is not run."""
    program = Python(drivers.source("stdio_program"), interpreter=interpreter)
    environment = {**HASH_SEED, "PALAESTRA_PROGRAM": path}
    outcomes: list[CaseOutcome] = []
    executions: list[ExecResult] = []
    started = True
    for name, case in zip(names, cases, strict=True):
        if outcomes and outcomes[-1].status in ("timeout", "limit", "missing"):
            outcomes.append(
                CaseOutcome(name, "missing", outcomes[-1].message, given=case.stdin, expected=expected_text(case))
            )
            continue
        result = await sandbox.run(
            program, timeout_s=timeout_s, stdin=case.stdin.encode(), env=environment, result_kib=1
        )
        started = started and result.result[:1] == b"r"
        executions.append(result)
        outcomes.append(_judge(name, case, result, timeout_s))
    return CasesRun(tuple(outcomes), tuple(executions), started=started)


def normal(text: str) -> str:
    """Trailing white space of each line, and trailing empty lines, don't count."""
    return "\n".join(line.rstrip() for line in text.split("\n")).rstrip("\n")


def expected_text(case: StdioCase) -> str:
    return normal(case.stdout)


def _judge(name: str, case: StdioCase, result: ExecResult, timeout_s: float) -> CaseOutcome:
    got, wanted = normal(result.stdout.decode("utf-8", "replace")), expected_text(case)
    if not result.ok:
        status, message = ending(result, timeout_s)
        stderr = result.stderr_text
        if status == "error" and result.signal is None and stderr.strip():
            message = last_line(stderr)
        return CaseOutcome(name, status, message, stderr[-4000:], case.stdin, wanted, got)
    if result.stdout_dropped_bytes:
        return CaseOutcome(name, "limit", "OSError: too much output", "", case.stdin, wanted, got)
    if got == wanted:
        return CaseOutcome(name, "passed", "", "", case.stdin, wanted, got)
    return CaseOutcome(name, "wrong", f"AssertionError: {got[:500]!r} != {wanted[:500]!r}", "", case.stdin, wanted, got)
