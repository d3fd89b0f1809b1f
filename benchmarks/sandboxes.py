"""What sandboxes cost and leave behind, each figure beside what it is compared with, in one run.

    python benchmarks/sandboxes.py [--backend podman|bubblewrap] [--quick] [--json] [--only NAME ...]

The full run takes a quarter of an hour on two cores, --quick a tenth of the counts. Progress goes to stderr; with
--json the last line of stdout is one JSON object. The exit code is 1 if anything leaked.

``mib_per_cell`` is what the machine's available memory (/proc/meminfo) fell by, a cell: with what the kernel holds for
its namespaces, mounts and page tables, which no process is charged for. ``pss_mib_per_cell`` is the processes' own
part, where it may be read. A figure that cannot be had on a machine is null, and ``notes`` says why.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
from collections.abc import Awaitable, Callable

from _sandboxes import containers, rates
from _sandboxes.episodes import EPISODES, episodes
from _sandboxes.live import live
from _sandboxes.run import CORES, Figures, Run
from rich.console import Console
from rich.table import Table

from palaestra.envs.sandboxes import open_pool

_TARGETS = {
    "roundtrip_ms_p50": "<= 0.15",
    "step_vs_bare": ">= 0.7",
    "acquire_ms_p50": "<= 1",
    "new_cell_ms_p50": "<= 20",
    "cells_per_s": ">= 70",
    "exec_vs_step": ">= 20",
    "live_cells": ">= 2000",
    "mib_per_cell": "<= 2",
    "reap_s": "<= 5",
    "leaked_processes": "= 0",
    "leaked_containers": "= 0",
    "leaked_files": "= 0",
}
_LEAKS = ("leaked_processes", "leaked_containers", "leaked_files")


async def measure(run: Run, only: list[str], full_episodes: int, seed: int) -> Figures:
    """Every figure that was asked for."""
    parts: dict[str, Callable[[], Awaitable[Figures]]] = {
        "roundtrip": lambda: rates.round_trip(run),
        "step": lambda: rates.step(run),
        "acquire": lambda: rates.acquire(run),
        "containers": lambda: containers.rates(run),
        "exec": lambda: containers.exec_beside_step(run),
        "live": lambda: live(run),
        "episodes": lambda: episodes(run, full_episodes, seed),
    }
    async with await open_pool(backend=run.backend) as pool:
        figures: Figures = {"backend": pool.backend.name}
    figures |= {"python": platform.python_version(), "kernel": platform.release(), "cores": CORES}
    figures |= {"share": run.share, "load_before": os.getloadavg()[0]}
    task = run.progress.add_task("sandboxes", total=len(only))
    for name in only:
        run.progress.update(task, description=name)
        figures |= await parts[name]()
        run.progress.advance(task)
    return {**figures, "load_after": os.getloadavg()[0], "notes": run.notes}


def show(figures: Figures) -> None:
    table = Table(title_justify="left")
    for heading in ("figure", "value", "target"):
        table.add_column(heading, justify="left" if heading == "figure" else "right")
    for name, value in figures.items():
        if not isinstance(value, (list, dict)):
            text = f"{value:.4g}" if isinstance(value, float) else "-" if value is None else str(value)
            table.add_row(name, text, _TARGETS.get(name, ""))
    Console().print(table)


def main() -> int:
    names = ["roundtrip", "step", "acquire", "containers", "exec", "live", "episodes"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="auto", choices=["auto", "podman", "bubblewrap"])
    parser.add_argument("--quick", action="store_true", help="a tenth of all counts and times")
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object, the last line")
    parser.add_argument("--only", action="append", choices=names, help="this part; may be given more than once")
    parser.add_argument("--episodes", type=int, default=EPISODES, help=f"of the full run; default {EPISODES:,}")
    parser.add_argument("--seed", type=int, default=0, help="of what the episodes do")
    arguments = parser.parse_args()
    run = Run(arguments.backend, 0.1 if arguments.quick else 1.0)
    with run.progress:
        figures = asyncio.run(measure(run, arguments.only or names, arguments.episodes, arguments.seed))
    show(figures)
    if arguments.json:
        print(json.dumps(figures))
    return int(any(figures.get(name) for name in _LEAKS))


if __name__ == "__main__":
    sys.exit(main())
