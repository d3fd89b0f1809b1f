"""What a person sees while a run goes on: phase, step, figures, time left.

On a terminal a live panel; elsewhere (a log file, CI) plain lines, one every few seconds.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.table import Table

_PLAIN_INTERVAL_S = 5.0


class RunProgress:
    """A display for a run whose phases and their rough shares of the time are known beforehand.

    The time left is ``elapsed x (1 - done) / done``, where ``done`` adds up the shares of finished phases and the
    finished part of the current one.
    """

    def __init__(self, phases: Mapping[str, float], *, console: Console | None = None) -> None:
        self._shares = {name: share / sum(phases.values()) for name, share in phases.items()}
        self._console = console or Console(stderr=True)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._started_s = time.monotonic()
        self._printed_s = 0.0
        self._finished_share = 0.0
        self._phase, self._done, self._total = "", 0, 1
        self._figures: dict[str, str] = {}

    def __enter__(self) -> Self:
        self._started_s = time.monotonic()
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._live.stop()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started_s

    def phase(self, name: str, total: int) -> None:
        """Begin a phase of ``total`` units; the one before it counts as finished. Each phase comes once."""
        if name not in self._shares:
            raise ValueError(f"phase {name!r} was not announced; the phases are {sorted(self._shares)}")
        self._finished_share += self._shares[self._phase] if self._phase else 0.0
        self._phase, self._done, self._total = name, 0, max(total, 1)
        self._figures.clear()
        self._printed_s = 0.0
        self._show()

    def advance(self, units: int = 1, **figures: float | str) -> None:
        """Some units are done; show these figures for the rest of the phase."""
        self._done = min(self._done + units, self._total)
        self._figures.update({name: v if isinstance(v, str) else f"{v:.3g}" for name, v in figures.items()})
        self._show()

    def log(self, text: str) -> None:
        """Print a line that stays."""
        self._console.print(text, highlight=False, markup=False)

    def _eta_s(self) -> float | None:
        done = min(1.0, self._finished_share + self._shares[self._phase] * self._done / self._total)
        return None if done < 0.01 else self.elapsed_s * (1 - done) / done

    def _show(self) -> None:
        eta = self._eta_s()
        left = "..." if eta is None else f"{eta // 60:.0f}:{eta % 60:02.0f}"
        clock = f"{self.elapsed_s // 60:.0f}:{self.elapsed_s % 60:02.0f}"
        if self._console.is_terminal:
            table = Table.grid(padding=(0, 2))
            bar = int(30 * self._done / self._total)
            table.add_row(f"[bold]{self._phase}", f"{'█' * bar}{'░' * (30 - bar)} {self._done}/{self._total}")
            table.add_row("elapsed / left", f"{clock} / {left}")
            for name, value in self._figures.items():
                table.add_row(name.replace("_", " "), value)
            self._live.update(table, refresh=True)
        elif time.monotonic() - self._printed_s >= _PLAIN_INTERVAL_S or self._done == self._total:
            self._printed_s = time.monotonic()
            figures = "  ".join(f"{name}={value}" for name, value in self._figures.items())
            self.log(f"[{clock}, {left} left] {self._phase} {self._done}/{self._total}  {figures}")
