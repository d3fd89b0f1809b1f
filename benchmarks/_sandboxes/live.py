"""Many cells alive at once: how fast they come, what each costs idle, and how fast they go."""

from __future__ import annotations

import asyncio
import time

from _sandboxes import census
from _sandboxes.run import CORES, Figures, Run, run_line
from palaestra.envs.sandboxes import Sandbox, open_pool

_SIZES = (100, 1_000, 2_000)


async def live(run: Run) -> Figures:
    """The figures of each size, and those of the largest under the names of the report."""
    rows = [await _of_size(run, size) for size in sorted({run.count(size, 10) for size in _SIZES})]
    largest = rows[-1]
    names = {"live_cells": "cells", "mib_per_cell": "mib_per_cell", "pss_mib_per_cell": "pss_mib_per_cell"}
    names |= {"live_processes_per_cell": "processes_per_cell", "reap_s": "reap_s"}
    return {"live": rows, **{name: largest[column] for name, column in names.items()}}


async def _of_size(run: Run, size: int) -> Figures:
    task = run.progress.add_task(f"{size} live cells", total=2 * size)
    async with await open_pool(backend=run.backend) as pool:
        before_mib, before = await asyncio.to_thread(census.available_mib), census.processes_of(pool.hosts)
        before_pss = census.proportional_mib(before)
        started = time.perf_counter()
        cells: list[Sandbox] = []

        async def acquire() -> None:
            cells.append(await pool.acquire())
            run.progress.advance(task)

        await asyncio.gather(*(acquire() for _ in range(size)))
        made_s = time.perf_counter() - started
        used_mib = before_mib - await asyncio.to_thread(census.available_mib)
        processes = census.processes_of(pool.hosts)
        pss = census.proportional_mib(processes)
        hosts = len(pool.hosts)
        turns = asyncio.Semaphore(CORES)

        async def answer(cell: Sandbox) -> None:
            async with turns:
                await run_line(cell, "fork")
            run.progress.advance(task)

        await asyncio.gather(*map(answer, cells))  # every one of them is alive
        started = time.perf_counter()
    await census.settle(lambda: not census.still_alive(processes))
    reap_s = time.perf_counter() - started
    return {
        "cells": size,
        "hosts": hosts,
        "cells_per_s": size / made_s,
        "mib_per_cell": used_mib / size,
        "pss_mib_per_cell": None if pss is None or before_pss is None else (pss - before_pss) / size,
        "processes_per_cell": len(processes) / size,
        "reap_s": reap_s,
    }
