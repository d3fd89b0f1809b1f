"""The pools that a process's environments share: what they are found by, and that each that was opened is closed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from palaestra.envs import shared_pools
from palaestra.envs.shared_pools import PoolLease
from palaestra.envs.tasks.task import Limits


async def test_a_cell_has_the_cpu_time_that_its_deadline_needs() -> None:
    lease = PoolLease("bubblewrap")
    try:
        usual: Any = await lease(Limits(step_s=5.0))
        long: Any = await lease(Limits(step_s=90.5))

        assert await lease(Limits(step_s=10.0)) is usual
        assert (usual.spec.cpu_s, long.spec.cpu_s) == (60, 91)
    finally:
        await lease.release()


async def test_a_task_reaches_what_its_limits_list_and_shares_its_pool_with_tasks_that_list_the_same() -> None:
    lease = PoolLease("bubblewrap")
    try:
        closed: Any = await lease(Limits())
        open_one: Any = await lease(Limits(egress=("example.org:443",)))

        assert await lease(Limits(egress=("example.org:443",))) is open_one
        assert (closed.spec.egress, open_one.spec.egress) == ((), ("example.org:443",))
    finally:
        await lease.release()


async def test_a_caller_cancelled_just_as_its_pool_opens_still_has_it_closed() -> None:
    lease = PoolLease("bubblewrap")
    asking = asyncio.create_task(lease(Limits()))
    await asyncio.sleep(0)
    (shared,) = shared_pools._shared.values()
    shared.opening.add_done_callback(lambda opening: asking.cancel())

    with pytest.raises(asyncio.CancelledError):
        await asking
    pool: Any = shared.opening.result()
    assert len(pool.hosts) == 1

    await lease.release()
    assert pool.hosts == ()
    assert not shared_pools._shared


async def test_a_pool_that_could_not_be_opened_is_tried_afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*arguments: Any, **options: Any) -> Any:
        raise OSError("no room")

    lease = PoolLease("bubblewrap")
    with monkeypatch.context() as patch:
        patch.setattr(shared_pools, "open_pool", refuse)
        with pytest.raises(OSError, match="no room"):
            await lease(Limits())

    assert await lease(Limits()) is not None
    await lease.release()
    assert not shared_pools._shared
