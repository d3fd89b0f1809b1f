"""A progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


@contextmanager
def progress_over(total: int, title: str, console: Console) -> Iterator[Callable[[bool], None]]:
    """Gives a function to call after each item with whether it passed."""
    with (_bar if console.is_terminal else _lines)(total, title, console) as advance:
        yield advance


@contextmanager
def _bar(total: int, title: str, console: Console) -> Iterator[Callable[[bool], None]]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[passed]} passed"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task(title, total=total, passed=0)
        passed = 0

        def advance(success: bool) -> None:
            nonlocal passed
            passed += success
            progress.update(bar, advance=1, passed=passed)

        yield advance


@contextmanager
def _lines(total: int, title: str, console: Console) -> Iterator[Callable[[bool], None]]:
    """A line at every tenth of the way."""
    done = passed = shown = 0

    def advance(success: bool) -> None:
        nonlocal done, passed, shown
        done, passed = done + 1, passed + success
        tenth = 10 * done // total
        if tenth > shown:
            shown = tenth
            console.print(f"{title}: {done}/{total}, {passed} passed", highlight=False, markup=False)

    yield advance
