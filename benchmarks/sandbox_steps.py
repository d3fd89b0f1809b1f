"""What a sandbox step costs, beside bare fork + exec of the same interpreter in the same run.

    python benchmarks/sandbox_steps.py [--backend bubblewrap|podman] [--seconds 2] [--envs 64]

Every line is measured between two measurements of the bare interpreter; the ratio to it is what travels.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from palaestra.envs.sandboxes import Argv, Python, Sandbox, open_pool
from palaestra.envs.sandboxes.interpreter import find_interpreter
from palaestra.envs.sandboxes.pool import Pool

PROGRAM = "print(6 * 7)"
BARE = "bare fork + exec"


@dataclass(frozen=True, slots=True)
class Rate:
    """Calls a second, their median latency, and the CPU time of this process (asyncio and framing) a call."""

    name: str
    per_s: float
    median_ms: float
    owner_cpu_ms: float
    bare_per_s: float = 0.0
    """fork + exec of the bare interpreter just before and just after, so that other load weighs on both."""


async def measure(name: str, call: Callable[[int], Awaitable[object]], workers: int, seconds: float) -> Rate:
    """``workers`` coroutines repeat ``call(worker)`` for ``seconds``."""
    latencies: list[float] = []
    started, cpu = time.perf_counter(), time.process_time()

    async def work(worker: int) -> None:
        while time.perf_counter() - started < seconds:
            before = time.perf_counter()
            await call(worker)
            latencies.append(time.perf_counter() - before)

    await asyncio.gather(*map(work, range(workers)))
    spent, cpu = time.perf_counter() - started, time.process_time() - cpu
    count = len(latencies)
    return Rate(name, count / spent, statistics.median(latencies) * 1e3, cpu / count * 1e3)


def bare(interpreter: str, seconds: float, workers: int) -> Rate:
    """fork + exec of the interpreter with the flags of a new interpreter in a cell, ``workers`` at a time."""
    arguments = [interpreter, "-s", "-B", "-c", PROGRAM]
    environment = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
    started, cpu, count, durations = time.perf_counter(), time.process_time(), 0, []
    running: list[tuple[float, subprocess.Popen[bytes]]] = []
    while time.perf_counter() - started < seconds or running:
        while len(running) < workers and time.perf_counter() - started < seconds:
            process = subprocess.Popen(
                arguments, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
            )
            running.append((time.perf_counter(), process))
        before, process = running.pop(0)
        process.communicate()
        durations.append(time.perf_counter() - before)
        count += 1
    spent, cpu = time.perf_counter() - started, time.process_time() - cpu
    return Rate(BARE, count / spent, statistics.median(durations) * 1e3, cpu / count * 1e3)


async def sandboxed(pool: Pool, envs: int, seconds: float, interpreter: str) -> list[Rate]:
    cores = os.cpu_count() or 1
    cells: list[Sandbox] = [await pool.acquire() for _ in range(envs)]
    rates = [bare(interpreter, seconds / 2, cores)]

    async def add(name: str, call: Callable[[int], Awaitable[object]], workers: int) -> None:
        before = next(rate for rate in reversed(rates) if rate.name == BARE)
        rate = await measure(f"{name}, {workers} at a time", call, workers, seconds)
        after = bare(interpreter, seconds / 2, cores)
        rates.extend((replace(rate, bare_per_s=(before.per_s + after.per_s) / 2), after))

    async def step(worker: int, command: Argv | Python) -> None:
        result = await cells[worker].run(command, timeout_s=30)
        assert result.ok, result

    async def round_trip(worker: int) -> None:
        try:
            await cells[worker].read("missing")
        except FileNotFoundError:
            pass

    async def new_cell(worker: int) -> None:
        await (await pool.acquire()).close()

    await add("round trip without a process", round_trip, 1)
    for workers in (cores, envs):
        await add("python, forked", lambda worker: step(worker, Python(PROGRAM, "fork")), workers)
        await add("python, new", lambda worker: step(worker, Python(PROGRAM, "new")), workers)
    await add("true", lambda worker: step(worker, Argv(("true",))), cores)
    await add("acquire + close", new_cell, cores)
    await add("renew", lambda worker: cells[worker].renew(), cores)
    for cell in cells:
        await cell.close()
    return rates


def show(rates: list[Rate]) -> None:
    """The bare measurements first, as their range; then each line with its ratio to those beside it."""
    references = [rate.per_s for rate in rates if rate.name == BARE]
    print(f"{BARE}: {min(references):.0f} to {max(references):.0f} per s")
    print(f"{'':42}{'per s':>9}{'of bare':>9}{'median ms':>11}{'owner CPU ms':>14}")
    for rate in (rate for rate in rates if rate.name != BARE):
        share = rate.per_s / rate.bare_per_s
        print(f"{rate.name:42}{rate.per_s:9.1f}{share:9.2f}{rate.median_ms:11.3f}{rate.owner_cpu_ms:14.3f}")


async def main(backend: str, seconds: float, envs: int) -> None:
    interpreter = find_interpreter(as_other_user=os.getuid() == 0).executable
    async with await open_pool(backend=backend) as pool:  # type: ignore[arg-type]
        load = os.getloadavg()[0]
        print(f"{pool.backend.name}, {interpreter.name}, {os.cpu_count()} cores, load {load:.1f} before we began")
        show(await sandboxed(pool, envs, seconds, str(interpreter)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--envs", type=int, default=64)
    options = parser.parse_args()
    asyncio.run(main(options.backend, options.seconds, options.envs))
