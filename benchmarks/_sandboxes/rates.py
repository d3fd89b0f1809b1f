"""How long a request, a step and a new cell take, beside the same work without a sandbox."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable

from _sandboxes.run import CORES, Bare, Figures, Run, median, percentile, run_line, timed
from palaestra.envs.sandboxes import Sandbox, open_pool

_ROUNDS = 5


async def round_trip(run: Run) -> Figures:
    """A request to the supervisor of a cell that starts no process: reading a file that is not there."""
    async with await open_pool(backend=run.backend) as pool:
        sandbox = await pool.acquire()

        async def ask() -> None:
            try:
                await sandbox.read("missing")
            except FileNotFoundError:
                return
            raise RuntimeError("there was a file")

        spent = await timed(ask, run.count(10_000))
    return {"roundtrip_ms_p50": percentile(spent, 0.5), "roundtrip_ms_p95": percentile(spent, 0.95)}


async def step(run: Run) -> Figures:
    """A step with a new interpreter, and with a forked one, beside bare fork + exec of the same interpreter.

    Each ratio is the median of several rounds, in each of which the sandboxed side runs between two bare ones.
    """
    bare, seconds, count = Bare(), run.seconds(3), run.count(200, 20)
    figures: Figures = {}
    async with await open_pool(backend=run.backend) as pool:
        cells: list[Sandbox] = [await pool.acquire() for _ in range(CORES)]
        for interpreter, prefix in (("new", "step"), ("fork", "fork_step")):
            rates, bares = [], [await asyncio.to_thread(bare.per_s, seconds, CORES)]
            for _ in range(_ROUNDS):
                rates.append(await _steps_per_s(cells, interpreter, seconds))
                bares.append(await asyncio.to_thread(bare.per_s, seconds, CORES))
            between = [(before + after) / 2 for before, after in itertools.pairwise(bares)]
            figures |= {
                f"{prefix}_vs_bare": median(rate / reference for rate, reference in zip(rates, between, strict=True)),
                f"{prefix}_per_s": median(rates),
                f"bare_beside_{prefix}_per_s": median(bares),
                f"{prefix}_ms_p50": percentile(await timed(_one_step(cells[0], interpreter), count), 0.5),
            }
        alone = [await asyncio.to_thread(bare.once) for _ in range(count)]
    return {**figures, "bare_ms_p50": percentile(alone, 0.5)}


async def acquire(run: Run) -> Figures:
    """A cell from a pool that has warm ones, and one that has to be made."""
    warm = 8
    spent: list[float] = []
    async with await open_pool(backend=run.backend, warm=warm) as pool:
        while len(spent) < run.count(800, 80):
            await pool.warmed_up()
            cells = []
            for _ in range(warm // 2):
                started = time.perf_counter()
                cells.append(await pool.acquire())
                spent.append(time.perf_counter() - started)
            for cell in cells:
                await cell.close()
    async with await open_pool(backend=run.backend) as pool:

        async def make() -> None:
            await (await pool.acquire()).close()

        fresh = await timed(make, run.count(500, 50))
    return {
        "acquire_ms_p50": percentile(spent, 0.5),
        "acquire_ms_p95": percentile(spent, 0.95),
        "new_cell_ms_p50": percentile(fresh, 0.5),
        "new_cell_ms_p95": percentile(fresh, 0.95),
    }


def _one_step(cell: Sandbox, interpreter: str) -> Callable[[], Awaitable[None]]:
    return lambda: run_line(cell, interpreter)


async def _steps_per_s(cells: list[Sandbox], interpreter: str, seconds: float) -> float:
    return await per_s(lambda worker: run_line(cells[worker], interpreter), seconds)


async def per_s(call: Callable[[int], Awaitable[object]], seconds: float, workers: int = CORES) -> float:
    """Calls a second of these workers, of which each goes on as soon as its call has ended."""
    started, done = time.perf_counter(), 0

    async def work(worker: int) -> None:
        nonlocal done
        while time.perf_counter() - started < seconds:
            await call(worker)
            done += 1

    await asyncio.gather(*map(work, range(workers)))
    return done / (time.perf_counter() - started)
