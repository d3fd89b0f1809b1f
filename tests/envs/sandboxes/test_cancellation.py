"""Whatever moment something is given up at, nothing of it is left."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from palaestra.envs.sandboxes import BackendName, Python, open_pool
from palaestra.envs.sandboxes.pool import Pool

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def give_up(work: Coroutine[Any, Any, Any], after_s: float) -> Any:
    """What the work gives, or None when it was cancelled first."""
    task = asyncio.create_task(work)
    await asyncio.wait([task], timeout=after_s)
    task.cancel()
    await asyncio.wait([task])
    return None if task.cancelled() else task.result()


async def duration_s(work: Callable[[], Coroutine[Any, Any, Any]]) -> float:
    started = time.monotonic()
    await work()
    return time.monotonic() - started


@pytest.mark.soak
async def test_opening_a_pool_that_is_cancelled_at_any_moment_leaves_nothing(
    backend: BackendName, base: Path, machine: Any, soak_factor: int
) -> None:
    async def open_and_close() -> None:
        await (await open_pool(backend=backend, warm=1)).close()

    whole_s = await duration_s(open_and_close)
    moments = random.Random(7)
    for _ in range(10 * soak_factor):
        pool = await give_up(open_pool(backend=backend, warm=1), moments.uniform(0, whole_s))
        if pool is not None:
            await pool.close()
    assert await asyncio.to_thread(machine.nothing_is_left_of, base)


@pytest.mark.soak
async def test_an_acquire_that_is_cancelled_at_any_moment_leaves_nothing(
    backend: BackendName, base: Path, machine: Any, soak_factor: int
) -> None:
    async with await open_pool(backend=backend, cells_per_host=1, idle_s=0.05) as pool:
        held = await pool.acquire()

        async def another() -> None:
            await (await pool.acquire()).close()

        whole_s = await duration_s(another)
        moments = random.Random(11)
        for _ in range(10 * soak_factor):
            sandbox = await give_up(pool.acquire(), moments.uniform(0, whole_s))
            if sandbox is not None:
                await sandbox.close()
        assert await settled(pool) == 1, "only the cell that is held"
        assert (await held.run(Python("print(1)", "fork"), timeout_s=10)).ok
        await held.close()
    assert await asyncio.to_thread(machine.nothing_is_left_of, base)


async def settled(pool: Pool) -> int:
    """Live cells when no host is being started or closed any more."""
    async with asyncio.timeout(60):
        while pool.metrics().hosts_starting or pool.metrics().hosts > 1:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    return pool.live_cells


@pytest.mark.soak
async def test_no_reply_is_lost_or_taken_for_another_when_steps_are_cancelled_at_random(
    own_pool: Pool, soak_factor: int
) -> None:
    async def steps(seed: int) -> int:
        moments, answered = random.Random(seed), 0
        sandbox = await own_pool.acquire()
        for number in range(50 * soak_factor):
            code = Python(f"print({number})", "fork")
            patience_s = moments.choice([0.0005, 0.002, 0.01, 60.0, 60.0])
            result = await give_up(sandbox.run(code, timeout_s=30), patience_s)
            if result is not None:
                assert result.stdout == b"%d\n" % number
                answered += 1
            if sandbox.broken:
                await sandbox.renew()
        await sandbox.close()
        return answered

    answered = await asyncio.gather(*(steps(seed) for seed in range(4)))
    assert all(count >= 50 * soak_factor * 0.2 for count in answered)
    assert own_pool.live_cells == 0
