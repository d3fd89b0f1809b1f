"""Show which sandboxes work on this machine, which promises hold in them, and what to do where one doesn't."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from palaestra.envs.sandboxes.doctor import Check, Report, Status, diagnose

_MARKS: dict[Status, str] = {
    "ok": "[green]ok[/]",
    "note": "[blue]note[/]",
    "warning": "[yellow]warning[/]",
    "broken": "[bold red]BROKEN[/]",
}


def run_doctor(console: Console, *, as_json: bool = False) -> int:
    """Measure and print. Returns the exit code: 1 if no backend works or a promise is broken in the chosen one."""
    report = asyncio.run(diagnose())
    if as_json:
        console.print_json(data=report.as_json())
    else:
        show_report(report, console)
    return 0 if report.healthy else 1


def show_report(report: Report, console: Console) -> None:
    """A table a backend and one of the machine, then what to do about what is not as it should be, then the choice."""
    for backend in report.backends:
        if backend.works:
            console.print(_table(f"{backend.name}: works", backend.checks))
        else:
            console.print(f"{backend.name} does not work here:\n{backend.problem}", highlight=False, markup=False)
            if backend.checks:
                console.print(_table(f"{backend.name}: what may explain it", backend.checks))
        console.print()
    console.print(_table("this machine", report.machine))
    console.print()
    for status, cure, wheres in _cures(report):
        console.print(f"{_MARKS[status]}  {escape(', '.join(wheres))}: {escape(cure)}", highlight=False)
    console.print(f"chosen: {report.chosen or 'nothing'}, because {report.reason}", highlight=False, markup=False)
    if broken := ", ".join(f"{check.name} ({where})" for where, check in report.broken()):
        console.print(f"promises that do not hold here: {broken}", style="bold red", highlight=False, markup=False)


def _cures(report: Report) -> list[tuple[Status, str, list[str]]]:
    """What is to be done, each thing once, with what it is for."""
    found: dict[tuple[Status, str], list[str]] = {}
    places = [*((backend.name, backend.checks) for backend in report.backends), ("machine", report.machine)]
    for where, checks in places:
        for check in checks:
            if check.status != "ok" and check.advice:
                found.setdefault((check.status, check.advice), []).append(f"{check.name} ({where})")
    return [(status, advice, wheres) for (status, advice), wheres in found.items()]


def _table(title: str, checks: Sequence[Check]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("check", "", "tried", "seen"):
        table.add_column(heading, overflow="fold")
    for check in checks:
        table.add_row(escape(check.name), _MARKS[check.status], escape(check.tried), escape(check.seen))
    return table
