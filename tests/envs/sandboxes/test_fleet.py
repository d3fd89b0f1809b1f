"""Which hosts are started, retired and closed, with hosts that do what the test says."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from palaestra.envs.errors import SandboxBusy, SandboxUnavailable
from palaestra.envs.sandboxes import fleet as fleet_module
from palaestra.envs.sandboxes.fleet import Fleet, Slot
from palaestra.envs.sandboxes.host import HOST_STARTS
from palaestra.envs.sandboxes.pool import Pool
from palaestra.envs.sandboxes.pool_metrics import Counts
from palaestra.envs.sandboxes.protocol import SandboxSpec


class FakeHost:
    def __init__(self, backend: FakeBackend) -> None:
        self.socket = Path("/nowhere/host/control/socket")
        self.groups = None
        self.ended, self.well, self.closed = False, True, False
        self._backend = backend

    async def healthy(self) -> bool:
        return self.well

    async def close(self) -> None:
        self.closed = True
        self._backend.open -= 1


class FakeBackend:
    """Counts what is under way; ``starting`` is awaited by every start."""

    name = "fake"

    def __init__(self, starting: Callable[[], Awaitable[None]] = lambda: asyncio.sleep(0)) -> None:
        self.starting = starting
        self.attempts = self.under_way = self.most_under_way = self.open = 0
        self.closed = False

    async def start_host(self) -> FakeHost:
        self.attempts += 1
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            await self.starting()
        finally:
            self.under_way -= 1
        self.open += 1
        return FakeHost(self)

    async def close(self) -> None:
        self.closed = True


def raising(*errors: Exception | None) -> Callable[[], Awaitable[None]]:
    """A start that raises these, one after the other, and then works; None works."""
    left = list(errors)

    async def start() -> None:
        error = left.pop(0) if left else None
        if error is not None:
            raise error

    return start


def make_fleet(backend: FakeBackend, *, cells_per_host: int = 1, idle_s: float = 60.0) -> Fleet:
    return Fleet(backend, Counts(), cells_per_host=cells_per_host, idle_s=idle_s, on_retire=lambda slot: None)


def make_pool(backend: FakeBackend, *, acquire_s: float = 60.0) -> Pool:
    return Pool(backend, SandboxSpec(), cells_per_host=1, warm=0, idle_s=60.0, acquire_s=acquire_s)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.005)


@pytest.fixture(autouse=True)
def no_back_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "_BACK_OFF_S", 0.001)


async def test_many_hosts_start_a_few_at_a_time_and_no_more_than_are_needed() -> None:
    backend = FakeBackend()
    fleet = make_fleet(backend)
    slots = await asyncio.gather(*(fleet.reserve() for _ in range(16)))
    assert backend.most_under_way == HOST_STARTS
    assert len({id(slot) for slot in slots}) == backend.open == 16
    await fleet.close()
    assert backend.open == 0


async def test_callers_who_fit_in_one_host_start_one() -> None:
    backend = FakeBackend()
    fleet = make_fleet(backend, cells_per_host=16)
    slots = await asyncio.gather(*(fleet.reserve() for _ in range(16)))
    assert (backend.attempts, len(set(slots)), fleet.cells) == (1, 1, 16)
    await fleet.close()


async def test_the_oldest_host_with_room_is_filled_first() -> None:
    fleet = make_fleet(FakeBackend(), cells_per_host=2)
    first, _, second = [await fleet.reserve() for _ in range(3)]
    assert first is not second
    fleet.release(first)
    assert await fleet.reserve() is first
    await fleet.close()


async def test_a_room_that_is_given_back_goes_to_who_waits_for_a_host() -> None:
    gate = asyncio.Event()
    backend = FakeBackend()
    fleet = make_fleet(backend)
    slot = await fleet.reserve()
    backend.starting = lambda: asyncio.wait_for(gate.wait(), 30)
    waiting = asyncio.create_task(fleet.reserve())
    await until(lambda: backend.under_way == 1)
    fleet.release(slot)
    assert await waiting is slot
    gate.set()
    await fleet.close()
    assert backend.open == 0


@pytest.mark.parametrize("first", [True, False])
async def test_a_start_that_was_refused_for_now_is_tried_again(first: bool) -> None:
    backend = FakeBackend()
    fleet = make_fleet(backend)
    if not first:
        await fleet.reserve()
    backend.starting = raising(SandboxBusy("database is locked"), SandboxBusy("database is locked"))
    backend.attempts = 0
    await fleet.reserve()
    assert (backend.attempts, fleet._counts.host_failures) == (3, 2)
    await fleet.close()


async def test_a_machine_that_cannot_is_known_after_one_attempt_but_later_hosts_get_a_few() -> None:
    backend = FakeBackend(raising(SandboxUnavailable("no user namespaces")))
    fleet = make_fleet(backend)
    with pytest.raises(SandboxUnavailable, match="no user namespaces"):
        await fleet.reserve()
    assert backend.attempts == 1
    await fleet.reserve()
    backend.starting, backend.attempts = raising(*[SandboxUnavailable("no memory")] * 9), 0
    with pytest.raises(SandboxUnavailable, match="no memory"):
        await fleet.reserve()
    assert backend.attempts == 3
    await fleet.close()


async def test_a_start_that_fails_is_told_to_as_many_as_it_would_have_served() -> None:
    backend = FakeBackend()
    fleet = make_fleet(backend, cells_per_host=4)
    for _ in range(4):
        await fleet.reserve()
    backend.starting, backend.attempts = raising(*[SandboxUnavailable("no memory")] * 9), 0
    outcomes = await asyncio.gather(*(fleet.reserve() for _ in range(10)), return_exceptions=True)
    assert [str(outcome) for outcome in outcomes] == ["no memory"] * 10
    assert backend.attempts == 9  # three hosts for ten callers, three attempts each
    assert isinstance(await fleet.reserve(), Slot)
    await fleet.close()
    assert backend.open == 0


async def test_a_hung_start_ends_an_acquire_at_its_deadline_and_hinders_nobody_else() -> None:
    backend = FakeBackend()
    pool = make_pool(backend, acquire_s=0.2)
    await pool.start()
    in_use = await pool.fleet.reserve()
    backend.starting = lambda: asyncio.sleep(3600)
    with pytest.raises(SandboxUnavailable, match="no sandbox within 0 s"):
        await pool.acquire()
    assert (backend.under_way, pool.metrics().waiting) == (1, 0)
    pool.fleet.release(in_use)
    assert await pool.fleet.reserve() is in_use
    await pool.close()
    assert (backend.under_way, backend.open, backend.closed) == (0, 0, True)


async def test_closing_does_not_wait_for_ever_for_a_start_that_cannot_be_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fleet_module, "_CANCEL_S", 0.1)
    released = asyncio.Event()

    async def deaf() -> None:
        while not released.is_set():
            try:
                await released.wait()
            except asyncio.CancelledError:
                continue

    backend = FakeBackend()
    pool = make_pool(backend)
    await pool.start()
    await pool.fleet.reserve()
    backend.starting = deaf
    acquiring = asyncio.create_task(pool.acquire())
    await until(lambda: backend.under_way == 1)
    await pool.close()
    with pytest.raises(SandboxUnavailable, match="closed"):
        await acquiring
    assert backend.closed
    released.set()
    await until(lambda: backend.under_way == backend.open == 0)  # what starts after all is closed again


async def test_a_hung_close_of_one_host_does_not_keep_the_others_and_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fleet_module, "_CLOSE_S", 0.1)
    monkeypatch.setattr(fleet_module, "_CLOSE_EACH_S", 0.0)
    backend = FakeBackend()
    pool = make_pool(backend)
    slots = [await pool.fleet.reserve() for _ in range(3)]
    monkeypatch.setattr(slots[0].host, "close", lambda: asyncio.sleep(3600))
    with pytest.raises(SandboxUnavailable, match="palaestra gc"):
        await pool.close()
    assert (backend.open, backend.closed) == (1, True)


@pytest.mark.parametrize("stage", ["_stop_filling", "host", "_close_warm", "backend"])
async def test_every_stage_of_closing_runs_when_another_fails(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = FakeBackend()
    pool = make_pool(backend)
    slots = [await pool.fleet.reserve() for _ in range(3)]

    async def fail() -> None:
        raise RuntimeError("injected")

    target = {"host": slots[1].host, "backend": backend}.get(stage, pool)
    monkeypatch.setattr(target, stage if target is pool else "close", fail)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="injected"):
            await pool.close()
    assert backend.open == (1 if stage == "host" else 0)
    assert backend.closed == (stage != "backend")


async def test_closing_that_is_cancelled_goes_to_its_end() -> None:
    gate = asyncio.Event()
    backend = FakeBackend()
    pool = make_pool(backend)
    slot = await pool.fleet.reserve()
    closing_host, close = asyncio.Event(), slot.host.close

    async def slowly() -> None:
        closing_host.set()
        await gate.wait()
        await close()

    slot.host.close = slowly  # type: ignore[method-assign]
    closing = asyncio.create_task(pool.close())
    await closing_host.wait()
    closing.cancel()
    await asyncio.sleep(0)
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert (backend.open, backend.closed) == (0, True)


async def test_cancelled_callers_leave_no_room_taken() -> None:
    backend = FakeBackend(lambda: asyncio.sleep(0.002))
    fleet = make_fleet(backend, cells_per_host=2)
    for number in range(50):
        callers = [asyncio.create_task(fleet.reserve()) for _ in range(3)]
        await asyncio.sleep(number % 7 / 2000)
        for caller in callers:
            caller.cancel()
        for outcome in await asyncio.gather(*callers, return_exceptions=True):
            if isinstance(outcome, Slot):
                fleet.release(outcome)
    assert fleet.cells == 0
    await fleet.close()
    assert (backend.open, backend.under_way) == (0, 0)


async def test_hosts_that_nobody_needs_are_closed_but_the_first() -> None:
    backend = FakeBackend()
    fleet = make_fleet(backend, cells_per_host=2, idle_s=0.05)
    slots = [await fleet.reserve() for _ in range(6)]
    first, last = slots[0], slots[-1]
    for slot in slots[:-1]:
        fleet.release(slot)
    await until(lambda: backend.open == 2)
    assert fleet.slots == [first, last]
    fleet.release(last)
    await until(lambda: backend.open == 1)
    assert (fleet.slots, fleet._counts.hosts_retired) == ([first], {"idle": 2})
    await fleet.close()


async def test_a_host_with_warm_cells_is_idle_only_where_others_have_room_for_them() -> None:
    backend = FakeBackend()
    fleet = make_fleet(backend, cells_per_host=2, idle_s=0.01)
    first, _, second = [await fleet.reserve() for _ in range(3)]
    second.warm = 1
    assert fleet._surplus() == []
    fleet.release(first)
    await until(lambda: second.retired)
    assert not first.retired
    await fleet.close()


async def test_a_retired_host_gets_no_cell_and_is_closed_with_its_last() -> None:
    backend = FakeBackend()
    fleet = make_fleet(backend, cells_per_host=2)
    slot = await fleet.reserve()
    assert await fleet.reserve() is slot
    fleet.release(slot)
    fleet.retire(slot, "protocol")
    other = await fleet.reserve()
    assert other is not slot
    assert (fleet.hosts, backend.open) == (2, 2)
    fleet.release(slot)
    await until(lambda: backend.open == 1)
    assert (slot.host.closed, fleet.hosts) == (True, 1)  # type: ignore[attr-defined]
    await fleet.close()


async def test_a_host_that_has_ended_is_closed_at_once_and_replaced() -> None:
    backend = FakeBackend()
    fleet = make_fleet(backend, cells_per_host=2)
    slot = await fleet.reserve()
    slot.host.ended = True  # type: ignore[misc]
    other = await fleet.reserve()
    await until(lambda: backend.open == 1)
    assert other is not slot
    assert fleet._counts.hosts_retired == {"failed": 1}
    fleet.release(slot)
    await fleet.close()
    assert backend.open == 0


async def test_a_silent_host_keeps_its_cells_and_gets_no_more() -> None:
    backend = FakeBackend()
    fleet = make_fleet(backend, cells_per_host=2)
    slot = await fleet.reserve()
    assert await fleet.judge(slot)
    slot.host.well = False  # type: ignore[attr-defined]
    assert not await fleet.judge(slot)
    assert (slot.host.closed, await fleet.reserve() is slot) == (False, False)  # type: ignore[attr-defined]
    assert fleet._counts.hosts_retired == {"failed": 1}
    await fleet.close()
    assert backend.open == 0
