"""What the agent reads. Only ever what is new; only ever of visible cases."""

from __future__ import annotations

from collections.abc import Sequence

from palaestra.envs.actions import BLOCKS_HELP, PROGRAM_HELP
from palaestra.envs.grading.outcome import CaseOutcome, CasesRun, ending
from palaestra.envs.grading.verdict import Verdict
from palaestra.envs.sandboxes.protocol import ExecResult
from palaestra.envs.tasks.task import Task

MAX_SHOWN_FAILURES = 5
MAX_STREAM_CHARS = 6000
"""Shown of one stream of one command, so that a talkative one doesn't push out what follows."""


def first(task: Task, *, action_format: str, feedback: str) -> str:
    """The task's instruction; with ``feedback="terminal"`` also what lies in the cell and how to answer."""
    if feedback == "last_line":
        return task.instruction
    help_text = BLOCKS_HELP if action_format == "blocks" else PROGRAM_HELP
    files = "".join(f"\n- {path} ({text.count(chr(10))} lines)" for path, text in task.files.items())
    found = f"\n\nFiles in /workspace:{files}" if files else ""
    return f"{task.instruction.rstrip()}\n\nThe solution is the file {task.solution_path}.{found}\n\n{help_text}"


def execution(label: str, result: ExecResult, timeout_s: float) -> str:
    """One program or command, as a terminal would have shown it."""
    parts = [f"$ {label}"]
    if result.stdout:
        parts.append(_stream(result.stdout, result.stdout_dropped_bytes))
    if result.stderr:
        parts.append(_stream(result.stderr, result.stderr_dropped_bytes))
    if not result.ok:
        how = f"exit code {result.exit_code}" if _left_by_itself(result) else ending(result, timeout_s)[1]
        parts.append(f"[{how}]")
    elif not result.stdout and not result.stderr:
        parts.append("[no output]")
    if result.oom_kills and result.killed_by != "memory":
        parts.append(f"[{result.oom_kills} processes were killed: all of the sandbox's memory was used]")
    if result.orphans_killed:
        parts.append(f"[{result.orphans_killed} processes it left behind were ended]")
    return "\n".join(parts)


def visible_cases(run: CasesRun) -> str:
    """How the visible tests went: a count, what the program printed, then the failures as a person wants them."""
    if not run.outcomes:
        return ""
    if not run.started:
        return "Visible tests: the interpreter did not start in this sandbox; files it loads on start may be broken."
    parts = [f"Visible tests: {run.passed} of {len(run.outcomes)} passed."]
    failures = [outcome for outcome in run.outcomes if outcome.status not in ("passed", "missing")]
    if failures and all(outcome.detail and outcome.detail == failures[0].detail for outcome in failures):
        parts.append(failures[0].detail.rstrip("\n"))
    else:
        parts += [_failure(outcome) for outcome in failures[:MAX_SHOWN_FAILURES]]
        if len(failures) > MAX_SHOWN_FAILURES:
            parts.append(f"[{len(failures) - MAX_SHOWN_FAILURES} more failures not shown]")
    missing = sum(outcome.status == "missing" for outcome in run.outcomes)
    if missing:
        parts.append(f"[{missing} tests were not reached]")
    if run.printed.strip():
        parts.append("The program printed:\n" + shorten(run.printed.rstrip("\n"), MAX_STREAM_CHARS))
    return "\n".join(parts)


def last_line(run: CasesRun) -> str:
    """The one line of CPython's own message for the first visible failure; "" when there is none."""
    if not run.started:
        return "OSError: the interpreter did not start"
    failure = run.first_failure
    return "" if failure is None else failure.message


def not_restored(paths: Sequence[str]) -> list[str]:
    """What an agent must know of a cell that took the place of a broken one; nothing where all is as it was."""
    return [f"[no room for these files any more: {', '.join(paths)}]"] if paths else []


def graded(verdict: Verdict) -> str:
    """The closing word. Numbers, and never a hidden value."""
    passed = sum(case.status == "passed" for case in verdict.cases)
    return f"Graded: {'passed' if verdict.passed else 'failed'} ({passed} of {len(verdict.cases)} tests passed)."


def shorten(text: str, max_chars: int, *, missing: int = 0) -> str:
    """At most ``max_chars`` characters, head and tail kept, and never a lone surrogate.

    ``missing`` characters were already cut out of the middle, and are counted in.
    """
    if not text.isascii():
        text = text.encode("utf-8", "backslashreplace").decode()
    if len(text) <= max_chars and not missing:
        return text
    note, room = "", 0
    for _ in range(3):  # the note takes room itself, and its number grows with what it displaces
        room = max(0, min(max_chars - len(note), len(text)))
        note = f"\n[... {len(text) - room + missing} characters not shown ...]\n"
    return (text[: room // 2] + note + text[len(text) - (room - room // 2) :])[:max_chars]


def join(parts: Sequence[str]) -> str:
    return "\n\n".join(part for part in parts if part)


def _stream(data: bytes, dropped_bytes: int) -> str:
    return shorten(data.decode("utf-8", "replace").rstrip("\n"), MAX_STREAM_CHARS, missing=dropped_bytes)


def _left_by_itself(result: ExecResult) -> bool:
    return result.signal is None and result.killed_by is None and not result.timed_out


def _failure(outcome: CaseOutcome) -> str:
    lines = [
        f"{outcome.name} failed",
        f"  input:    {_indent(outcome.given)}",
        f"  expected: {_indent(outcome.expected)}",
    ]
    if outcome.status == "wrong":
        lines.append(f"  got:      {_indent(outcome.got or '')}")
    elif outcome.detail:
        lines.append(_indent("  " + outcome.detail.rstrip("\n"), by=2))
    else:
        lines.append(f"  {outcome.message}")
    return "\n".join(lines)


def _indent(text: str, *, by: int = 12) -> str:
    return text.rstrip("\n").replace("\n", "\n" + " " * by)
