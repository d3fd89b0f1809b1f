"""Show which sandboxes work on this machine and which limits hold in them."""

from __future__ import annotations

import asyncio

from rich.console import Console
from rich.table import Table

from palaestra.envs.sandboxes.doctor import BackendReport, Report, diagnose


def run_doctor(console: Console) -> int:
    """Measure and print. Returns the exit code: 1 if no backend works or a limit doesn't hold in the chosen one."""
    report = asyncio.run(diagnose())
    show_report(report, console)
    return 0 if report.healthy else 1


def show_report(report: Report, console: Console) -> None:
    """A table a backend, what to do about what is missing, and the choice."""
    for backend in report.backends:
        if backend.works:
            console.print(_table(backend))
        else:
            console.print(f"{backend.name} does not work here:\n{backend.problem}", highlight=False, markup=False)
        for limit in backend.limits:
            if not limit.enforced and limit.advice:
                console.print(f"  {limit.name}: {limit.advice}", highlight=False, markup=False)
        console.print()
    chosen = report.chosen or "nothing"
    console.print(f"chosen: {chosen}, because {report.reason}", highlight=False, markup=False)


def _table(backend: BackendReport) -> Table:
    table = Table(title=f"{backend.name}: works", title_justify="left")
    for heading in ("limit", "enforced", "seen"):
        table.add_column(heading)
    for limit in backend.limits:
        mark = "[green]yes[/]" if limit.enforced else "[bold red]NO[/]"
        table.add_row(limit.name, mark, limit.seen)
    return table
