"""What a pool tells about itself, and how it holds to what was asked: never more cells, never a bad one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from palaestra.envs.errors import SandboxDied, UsageError
from palaestra.envs.sandboxes import BackendName, Python, Sandbox, open_pool
from palaestra.envs.sandboxes import pool as pool_module
from palaestra.envs.sandboxes.pool import Pool

pytestmark = pytest.mark.asyncio(loop_scope="session")
ALIVE = Python("print('alive')", "fork")


async def test_metrics_count_what_was_done(backend: BackendName) -> None:
    async with await open_pool(backend=backend, warm=2) as pool:
        assert pool.metrics().acquire_s_p50 is None
        await pool.warmed_up()
        cells = [await pool.acquire() for _ in range(2)]
        await cells[0].renew()
        await pool.warmed_up()
        seen = pool.metrics()
        assert (seen.backend, seen.hosts, seen.hosts_starting, seen.hosts_started) == (backend, 1, 0, 1)
        assert (seen.cells, seen.warm, seen.waiting) == (4, 2, 0)
        assert (seen.acquired, seen.from_warm, seen.renewed, seen.stale) == (2, 2, 1, 0)
        assert (seen.hosts_retired, seen.host_failures, seen.cell_failures) == ({}, 0, 0)
        assert seen.acquire_s_p50 is not None
        assert seen.acquire_s_p95 is not None
        assert 0 <= seen.acquire_s_p50 <= seen.acquire_s_p95
        for cell in cells:
            await cell.close()
        assert pool.metrics().cells == 2
    assert (pool.metrics().hosts, pool.metrics().cells, pool.metrics().warm) == (0, 0, 0)


async def test_sixteen_resets_at_once_succeed_with_a_host_each(backend: BackendName) -> None:
    async with await open_pool(backend=backend, cells_per_host=1) as pool:
        cells = await asyncio.gather(*(pool.acquire() for _ in range(16)))
        results = await asyncio.gather(*(cell.run(ALIVE, timeout_s=60) for cell in cells))
        assert [result.stdout for result in results] == [b"alive\n"] * 16
        seen = pool.metrics()
        assert (seen.cells, seen.hosts, seen.hosts_started, seen.host_failures) == (16, 16, 16, 0)
        for cell in cells:
            await cell.close()
        assert pool.live_cells == 0
    assert (pool.hosts, pool.metrics().hosts) == ((), 0)


async def test_cells_that_live_are_never_more_than_were_asked_for(own_pool: Pool) -> None:
    asked = most = 0

    async def episode() -> None:
        nonlocal asked, most
        asked += 1
        sandbox = await own_pool.acquire()
        most = max(most, own_pool.live_cells - asked)
        await sandbox.renew()
        await sandbox.close()
        asked -= 1

    await asyncio.gather(*(episode() for _ in range(24)))
    assert (most <= 0, own_pool.live_cells) == (True, 0)


async def test_no_more_cells_are_being_made_at_once_than_the_limit_says(
    own_pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    under_way = most = 0
    really_open = pool_module.open_cell

    async def open_cell(*arguments: Any) -> Any:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        try:
            return await really_open(*arguments)
        finally:
            under_way -= 1

    monkeypatch.setattr(pool_module, "open_cell", open_cell)
    cells = await asyncio.gather(*(own_pool.acquire() for _ in range(8)))
    assert most == min(8, pool_module.CELLS_AT_ONCE)
    for cell in cells:
        await cell.close()


async def test_a_warm_cell_that_waited_long_is_asked_before_it_is_handed_out(
    backend: BackendName, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "_FRESH_S", 0.0)
    async with await open_pool(backend=backend, warm=1) as pool:
        await pool.warmed_up()
        async with sandbox_of(pool) as sandbox:
            assert (await sandbox.run(ALIVE, timeout_s=10)).ok
        await pool.warmed_up()
        monkeypatch.setattr(pool._warm[0].connection, "request", refuse)
        async with sandbox_of(pool) as sandbox:
            assert (await sandbox.run(ALIVE, timeout_s=10)).ok
        seen = pool.metrics()
        assert (seen.from_warm, seen.stale, seen.hosts_retired) == (1, 1, {})


async def test_a_warm_cell_whose_neighbour_was_lost_since_is_asked_too(backend: BackendName) -> None:
    async with await open_pool(backend=backend, warm=1) as pool:
        await pool.warmed_up()
        first = await pool.acquire()
        await pool.warmed_up()
        first._connection.close()
        assert (await first.run(ALIVE, timeout_s=5)).killed_by == "cell"
        asked: list[str] = []
        warm = pool._warm[0].connection
        request = warm.request

        async def noted(header: dict[str, Any], *arguments: Any, **options: Any) -> Any:
            asked.append(header["op"])
            return await request(header, *arguments, **options)

        warm.request = noted  # type: ignore[method-assign]
        second = await pool.acquire()
        assert (asked, pool.metrics().from_warm) == (["write"], 2)
        for cell in (first, second):
            await cell.close()


async def refuse(*arguments: Any, **options: Any) -> Any:
    raise SandboxDied("injected")


class sandbox_of:
    """``async with sandbox_of(pool) as sandbox``: acquired, and closed at the end."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool

    async def __aenter__(self) -> Sandbox:
        self.sandbox = await self.pool.acquire()
        return self.sandbox

    async def __aexit__(self, *exc_info: object) -> None:
        await self.sandbox.close()


@pytest.mark.parametrize("option", [{"idle_s": -1.0}, {"acquire_s": 0.0}, {"acquire_s": float("nan")}, {"warm": -1}])
async def test_an_option_that_cannot_be_is_refused(option: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(option))):
        await open_pool(**option)


async def test_idle_hosts_of_real_backends_are_closed(backend: BackendName) -> None:
    async with await open_pool(backend=backend, cells_per_host=1, idle_s=0.1) as pool:
        cells = [await pool.acquire() for _ in range(3)]
        for cell in cells:
            await cell.close()
        async with asyncio.timeout(30):
            while pool.metrics().hosts > 1:  # noqa: ASYNC110 - its end has no event
                await asyncio.sleep(0.02)
        assert pool.metrics().hosts_retired == {"idle": 2}
        async with sandbox_of(pool) as sandbox:
            assert (await sandbox.run(ALIVE, timeout_s=10)).ok
