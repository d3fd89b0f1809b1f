"""Many episodes with random timeouts, kills, cancellations and dying hosts: what they leave, and if they slow down.

What an episode does follows from the seed and its number alone, whichever worker plays it.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import statistics
import subprocess
import time
from collections.abc import Awaitable, Callable

from _sandboxes import census
from _sandboxes.run import CORES, Bare, Figures, Run, run_line
from palaestra.envs.errors import CellFull, InfrastructureError
from palaestra.envs.sandboxes import Argv, Python, Sandbox, Shell, open_pool
from palaestra.envs.sandboxes.bubblewrap import BubblewrapHost
from palaestra.envs.sandboxes.host import Host
from palaestra.envs.sandboxes.podman.backend import PodmanHost
from palaestra.envs.sandboxes.podman.service import environment
from palaestra.envs.sandboxes.pool import Pool

EPISODES = 10_000
_WORKERS = 4 * CORES
_WARM = 4
_HOST_DEATHS = 4
"""In the whole run, at even distances."""
_BLOCKS = 10
"""Of consecutive episodes, whose median latencies the slope is fitted to."""
_BARE_EVERY = 25

Act = Callable[[Sandbox, random.Random], Awaitable[None]]


async def _time_out(sandbox: Sandbox, rng: random.Random) -> None:
    command = rng.choice(["sleep 600", "while :; do :; done", "trap '' TERM INT HUP; sleep 600 & setsid sleep 600"])
    result = await sandbox.run(Shell(command), timeout_s=rng.uniform(0.02, 0.2))
    _expect(result.timed_out or result.killed_by == "cell", result)


async def _kill_itself(sandbox: Sandbox, rng: random.Random) -> None:
    result = await sandbox.run(Shell(rng.choice(["kill -9 $$", "sleep 600 & kill -9 -1; kill -9 $$"])), timeout_s=60)
    _expect(result.signal == signal.SIGKILL or result.killed_by == "cell", result)


async def _leave_processes(sandbox: Sandbox, rng: random.Random) -> None:
    count = rng.randint(1, 12)
    code = f"import os, time\nfor _ in range({count}):\n    if not os.fork(): os.setsid(); time.sleep(600)\n"
    result = await sandbox.run(Python(code, "fork"), timeout_s=60)
    _expect(result.ok or result.killed_by == "cell", result)


async def _flood(sandbox: Sandbox, rng: random.Random) -> None:
    result = await sandbox.run(Argv(("head", "-c", str(rng.randint(1, 3 << 20)), "/dev/zero")), timeout_s=60)
    _expect(result.ok or result.killed_by == "cell", result)


async def _use_files(sandbox: Sandbox, rng: random.Random) -> None:
    data = rng.randbytes(rng.randint(1, 200_000))
    try:
        await sandbox.write({"folder/file": data})
        await sandbox.renew(await sandbox.snapshot() if rng.random() < 0.5 else None)
        await sandbox.write({"other": data})
        _expect(await sandbox.read("other") == data, "a file that was read is not the one that was written")
    except CellFull:
        _expect(sandbox.broken, "files that fit did not fit")


async def _cancel(sandbox: Sandbox, rng: random.Random) -> None:
    running = asyncio.create_task(sandbox.run(Shell("sleep 600 & sleep 600"), timeout_s=60))
    await asyncio.sleep(rng.uniform(0, 0.05))
    running.cancel()
    await asyncio.wait([running])
    if rng.random() < 0.5:
        await sandbox.renew()


async def _close_meanwhile(sandbox: Sandbox, rng: random.Random) -> None:
    running = asyncio.create_task(sandbox.run(Shell("sleep 600 & sleep 600"), timeout_s=60))
    await asyncio.sleep(rng.uniform(0, 0.05))
    await sandbox.close()
    await asyncio.wait([running])
    if not running.cancelled() and (error := running.exception()) and not isinstance(error, InfrastructureError):
        raise error


async def _new_interpreter(sandbox: Sandbox, rng: random.Random) -> None:
    result = await sandbox.run(Python("print(6 * 7)"), timeout_s=60)
    _expect(result.stdout == b"42\n" or result.killed_by == "cell", result)


_ACTS: tuple[Act, ...] = (_time_out, _kill_itself, _leave_processes, _flood, _use_files, _cancel, _close_meanwhile)
_ACTS += (_new_interpreter,)


def _expect(holds: bool, what: object) -> None:
    if not holds:
        raise RuntimeError(f"an episode met what it should not: {what}")


class Soak:
    """The episodes of one run."""

    def __init__(self, run: Run, pool: Pool, episodes: int, seed: int) -> None:
        self._run, self._pool, self._episodes, self._seed = run, pool, episodes, seed
        self._numbers = iter(range(episodes))
        self._bare = Bare()
        self._task = run.progress.add_task(f"{episodes} episodes", total=episodes)
        self.step_s: dict[int, float] = {}
        self.bare_s: dict[int, float] = {}
        self.interrupted = 0
        """Episodes whose host died under them."""
        self.hosts_killed = 0

    async def play(self) -> None:
        async with asyncio.TaskGroup() as workers:
            for _ in range(min(_WORKERS, self._episodes)):
                workers.create_task(self._work())

    async def _work(self) -> None:
        for number in self._numbers:
            try:
                await self._episode(number, random.Random(f"{self._seed}:{number}"))
            except InfrastructureError:
                self.interrupted += 1
            if number % _BARE_EVERY == 0:
                self.bare_s[number] = await asyncio.to_thread(self._bare.once)
            if self._pool.hosts and number % (self._episodes // _HOST_DEATHS) == self._episodes // _HOST_DEATHS // 2:
                self.hosts_killed += 1
                await asyncio.to_thread(_kill, self._pool.hosts[0])
            self._run.progress.advance(self._task)

    async def _episode(self, number: int, rng: random.Random) -> None:
        sandbox = await self._pool.acquire()
        try:
            started = time.perf_counter()
            await run_line(sandbox, "fork")
            self.step_s[number] = time.perf_counter() - started
            for act in rng.choices(_ACTS, k=rng.randint(1, 3)):
                await act(sandbox, rng)
                if act is _close_meanwhile:
                    break
        finally:
            await sandbox.close()


def _kill(host: Host) -> None:
    if isinstance(host, BubblewrapHost):
        os.kill(host.pid, signal.SIGKILL)
    else:
        assert isinstance(host, PodmanHost)
        command = ["podman", "kill", host.name]
        subprocess.run(command, capture_output=True, check=True, env=environment(), timeout=60)


async def episodes(run: Run, full: int, seed: int) -> Figures:
    """Leaks after all episodes are over (processes with the pool still open; all else after it was closed)."""
    count = run.count(full, 100)
    before = await _holdings_of_a_used_process(run)
    async with await open_pool(backend=run.backend, warm=_WARM) as pool:
        await pool.warmed_up()
        idle_host = len(census.processes_of(pool.hosts)) - pool.live_cells
        soak = Soak(run, pool, count, seed)
        started = time.perf_counter()
        await soak.play()
        spent_s = time.perf_counter() - started
        await pool.warmed_up()

        def surplus() -> int:
            processes = census.still_alive(census.processes_of(pool.hosts))
            return len(processes) - pool.live_cells - idle_host * len(pool.hosts)

        await census.settle(lambda: surplus() <= 0)
        left_inside = max(0, surplus())
        processes = census.processes_of(pool.hosts)
    await census.settle(lambda: not census.still_alive(processes))
    left_outside = len(census.still_alive(processes))
    await census.settle(lambda: len(os.listdir("/proc/self/fd")) <= before.descriptors)
    after = await asyncio.to_thread(census.Holdings.now, pool.backend.name)
    folders, descriptors = after.folders - before.folders, max(0, after.descriptors - before.descriptors)
    return {
        "episodes": count,
        "episodes_per_s": count / spent_s,
        "episodes_interrupted": soak.interrupted,
        "hosts_killed": soak.hosts_killed,
        "leaked_processes": left_inside + left_outside,
        "leaked_containers": len(after.containers - before.containers),
        "leaked_files": len(folders) + descriptors,
        "leaked_folders": len(folders),
        "leaked_descriptors": descriptors,
        **_slopes(soak, count),
    }


async def _holdings_of_a_used_process(run: Run) -> census.Holdings:
    """What this process holds once everything that it makes a single time is made."""
    async with await open_pool(backend=run.backend, warm=_WARM) as pool:
        await run_line(await pool.acquire())
        await asyncio.to_thread(Bare().once)
    await asyncio.sleep(0.5)
    gc.collect()
    return await asyncio.to_thread(census.Holdings.now, pool.backend.name)


def _slopes(soak: Soak, count: int) -> Figures:
    """How the median latency of a block of episodes changes, fitted to a line: milliseconds a thousand episodes."""
    length = max(1, count // _BLOCKS)

    def medians(latencies: dict[int, float]) -> list[float]:
        blocks: dict[int, list[float]] = {}
        for number, seconds in latencies.items():
            blocks.setdefault(number // length, []).append(seconds * 1e3)
        return [statistics.median(blocks[index]) for index in sorted(blocks)]

    def slope(values: list[float]) -> float:
        places = [index * length / 1000 for index in range(len(values))]
        return statistics.linear_regression(places, values).slope

    steps, bares = medians(soak.step_s), medians(soak.bare_s)
    return {
        "latency_slope": slope(steps),
        "latency_slope_relative": slope(steps) / statistics.mean(steps),
        "bare_latency_slope_relative": slope(bares) / statistics.mean(bares),
        "episode_step_ms_p50": statistics.median(steps),
        "episode_step_ms_p50_by_block": steps,
    }
