"""One run of the benchmark: on which backend, how much of everything, and what could not be measured."""

from __future__ import annotations

import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn

from palaestra.envs.sandboxes import BackendName, Python, Sandbox
from palaestra.envs.sandboxes.interpreter import find_interpreter

Figures = dict[str, object]
CORES = os.cpu_count() or 1
LINE = "print(6 * 7)"


@dataclass(slots=True)
class Run:
    """What every measurement is given."""

    backend: BackendName
    share: float
    """Of the full counts and times: 1, or a tenth with --quick."""
    notes: dict[str, str] = field(default_factory=dict)
    """Why a figure is null."""
    progress: Progress = field(
        default_factory=lambda: Progress(
            *Progress.get_default_columns(), TimeElapsedColumn(), console=Console(file=sys.stderr)
        )
    )

    def count(self, full: int, least: int = 1) -> int:
        return max(least, round(full * self.share))

    def seconds(self, full: float) -> float:
        return max(0.3, full * self.share)

    def missing(self, reason: str, *names: str) -> Figures:
        """Figures that cannot be had here."""
        self.notes.update(dict.fromkeys(names, reason))
        return dict.fromkeys(names)


def ratio(numerator: object, denominator: object) -> float | None:
    """Of two figures, where both could be measured."""
    if isinstance(numerator, (int, float)) and isinstance(denominator, (int, float)) and denominator:
        return numerator / denominator
    return None


def percentile(seconds: Iterable[float], share: float) -> float:
    """In milliseconds; the nearest rank."""
    ordered = sorted(seconds)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)] * 1e3


async def timed(call: Callable[[], Awaitable[object]], count: int) -> list[float]:
    """Seconds of each of ``count`` calls, one after the other."""
    spent = []
    for _ in range(count):
        started = time.perf_counter()
        await call()
        spent.append(time.perf_counter() - started)
    return spent


async def run_line(sandbox: Sandbox, interpreter: str = "new") -> None:
    """The step that is measured everywhere."""
    result = await sandbox.run(Python(LINE, interpreter), timeout_s=60)  # type: ignore[arg-type]
    if result.stdout != b"42\n":
        raise RuntimeError(f"the step printed {result.stdout!r}, {result.stderr!r}")


class Bare:
    """The interpreter of cells with the flags of their steps, by fork and exec, without any sandbox."""

    def __init__(self) -> None:
        interpreter = find_interpreter(as_other_user=os.getuid() == 0).executable
        self._command = [str(interpreter), "-s", "-B", "-c", LINE]
        self._environment = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}

    def once(self) -> float:
        """Seconds of one."""
        started = time.perf_counter()
        done = subprocess.run(self._command, capture_output=True, check=True, env=self._environment, input=b"")
        if done.stdout != b"42\n":
            raise RuntimeError(f"the bare program printed {done.stdout!r}")
        return time.perf_counter() - started

    def per_s(self, seconds: float, at_once: int) -> float:
        started = time.perf_counter()

        def again_and_again() -> int:
            done = 0
            while time.perf_counter() - started < seconds:
                self.once()
                done += 1
            return done

        with ThreadPoolExecutor(at_once) as threads:
            done = sum(future.result() for future in [threads.submit(again_and_again) for _ in range(at_once)])
        return done / (time.perf_counter() - started)


def median(values: Iterable[float]) -> float:
    return statistics.median(values)
