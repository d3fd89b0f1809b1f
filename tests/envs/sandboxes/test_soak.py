"""Ten thousand executions cost as much at the end as at the start, and leave nothing."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from pathlib import Path
from typing import Any

import pytest

from palaestra.envs.sandboxes import BackendName, Python, open_pool

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.mark.soak
async def test_latency_descriptors_and_processes_do_not_grow_with_executions(
    backend: BackendName, base: Path, machine: Any, soak_factor: int
) -> None:
    count, at_once, steps = 1000 * soak_factor, 4, 25
    latencies_s: list[float] = []

    async with await open_pool(backend=backend, warm=2) as pool:

        async def episode(numbers: range) -> None:
            sandbox = await pool.acquire()
            for number in numbers:
                started = time.monotonic()
                result = await sandbox.run(Python(f"print({number})", "fork"), timeout_s=60)
                latencies_s.append(time.monotonic() - started)
                assert result.stdout == b"%d\n" % number
            await sandbox.close()

        async def worker(first: int) -> None:
            for start in range(first * steps, count, at_once * steps):
                await episode(range(start, start + steps))

        async def held() -> tuple[int, int]:
            await pool.warmed_up()
            async with asyncio.timeout(30):
                while len(machine.processes_with(base.name)) > before[1]:  # noqa: ASYNC110 - cells end by themselves
                    await asyncio.sleep(0.05)
            return len(os.listdir("/proc/self/fd")), len(machine.processes_with(base.name))

        await episode(range(steps))
        await pool.warmed_up()
        before = len(os.listdir("/proc/self/fd")), len(machine.processes_with(base.name))
        await asyncio.gather(*(worker(first) for first in range(at_once)))
        assert await held() <= before
        assert (pool.metrics().acquired, pool.metrics().hosts_started) == (count // steps + 1, 1)
    early, late = latencies_s[: count // 4], latencies_s[-count // 4 :]
    # Twice as long would be a leak's doing; other work on the machine moves medians, too, but not for good.
    assert statistics.median(late) < 2 * statistics.median(early) + 0.05
    assert machine.nothing_is_left_of(base)
