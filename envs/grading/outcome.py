"""What running cases showed, in full: for the agent where the case is visible. Verdicts keep only its shadow."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Literal

from palaestra.envs.grading.verdict import CaseStatus
from palaestra.envs.sandboxes.protocol import ExecResult

Interpreter = Literal["new", "fork"]
"""How a cell runs Python source; see ``palaestra.envs.sandboxes.protocol.Python``."""


@dataclass(frozen=True, slots=True)
class CaseOutcome:
    """One case as a person wants to see it. Only ever shown for visible cases."""

    name: str
    status: CaseStatus
    message: str = ""
    """One line: the last line of CPython's own message, or what stands for it; "" when it passed."""
    detail: str = ""
    """The traceback or the whole message where there is one."""
    given: str = ""
    """The call, or the stdin."""
    expected: str = ""
    got: str | None = None


@dataclass(frozen=True, slots=True)
class CasesRun:
    """A batch of cases of one submission."""

    outcomes: tuple[CaseOutcome, ...]
    executions: tuple[ExecResult, ...]
    started: bool = True
    """False when the driver never reported: then nothing can be said about the submission."""
    printed: str = ""
    """What the solution printed on its own while its function was called."""

    @property
    def passed(self) -> int:
        return sum(outcome.status == "passed" for outcome in self.outcomes)

    @property
    def all_passed(self) -> bool:
        return self.passed == len(self.outcomes)

    @property
    def first_failure(self) -> CaseOutcome | None:
        return next((outcome for outcome in self.outcomes if outcome.status != "passed"), None)


def ending(result: ExecResult, timeout_s: float) -> tuple[CaseStatus, str]:
    """Why a process ended before it had reported, as a status and one line in the manner of a Python message."""
    if result.timed_out or result.killed_by == "deadline":
        return "timeout", f"TimeoutError: {timeout_s:g}s"
    if result.killed_by == "memory":
        return "limit", "MemoryError"
    if result.killed_by == "output":
        return "limit", "OSError: output limit exceeded"
    if result.killed_by == "cell":
        return "limit", "OSError: the program broke its sandbox"
    if result.result_truncated:
        return "limit", "OSError: result too large"
    if result.signal == signal.SIGXCPU:
        return "limit", "TimeoutError: CPU time limit exceeded"
    if result.signal is not None:
        return "error", f"RuntimeError: killed by {_signal_name(result.signal)}"
    return "error", f"SystemExit: {result.exit_code}"


def last_line(message: str) -> str:
    """The last line of a message that is not empty."""
    lines = [line for line in message.splitlines() if line.strip()]
    return lines[-1].strip() if lines else ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
