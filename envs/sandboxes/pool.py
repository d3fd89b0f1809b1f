"""The pool: healthy cells on demand, warm ones where there are some."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from palaestra.envs.errors import SandboxBusy, SandboxDied, SandboxUnavailable
from palaestra.envs.sandboxes.cell import Cell, open_cell
from palaestra.envs.sandboxes.connection import Connection
from palaestra.envs.sandboxes.fleet import Fleet, Slot
from palaestra.envs.sandboxes.host import Backend, Host
from palaestra.envs.sandboxes.pool_metrics import Counts, PoolMetrics
from palaestra.envs.sandboxes.protocol import SandboxSpec, Snapshot
from palaestra.envs.sandboxes.waiting import back_off, cancel_all, to_the_end

CELLS_AT_ONCE = max(2, os.cpu_count() or 2)
"""Cells that are being made at the same time."""
_ATTEMPTS = 3
_BACK_OFF_S = 0.05
_FRESH_S = 5.0
"""A warm cell older than this is asked whether it still answers before it is handed out."""
_CHECK_S = 5.0
_CANCEL_S = 30.0
_BACKEND_S = 30.0
_log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Warm:
    """A cell that waits to be handed out."""

    slot: Slot
    connection: Connection
    since: float = field(default_factory=time.monotonic)


class Pool:
    """A ``SandboxPool`` over one backend.

    * A cell is handed out at most once, and never after it, or its host, was seen to fail.
    * There are never more cells than callers asked for and ``warm``; at most one cell a core is being made.
    * A host that fails, or whose supervisor breaks the protocol, gets no more cells and is replaced; cells of other
      hosts notice nothing.
    * Every wait has a deadline: an ``acquire`` ends within ``acquire_s``.
    """

    def __init__(
        self, backend: Backend, spec: SandboxSpec, *, cells_per_host: int, warm: int, idle_s: float, acquire_s: float
    ) -> None:
        self.backend, self.spec = backend, spec
        self.counts = Counts()
        self.fleet = Fleet(
            backend, self.counts, cells_per_host=cells_per_host, idle_s=idle_s, on_retire=self._discard_warm
        )
        self.making = asyncio.Semaphore(CELLS_AT_ONCE)
        self.acquire_s = acquire_s
        self._warm_wanted = warm
        self._warm: deque[_Warm] = deque()
        self._filling: set[asyncio.Task[None]] = set()
        self._closing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the first host, so that a machine that cannot is known at once; then warm up."""
        self.fleet.release(await self.fleet.reserve())
        self._refill()

    async def acquire(self) -> Cell:
        self._check_open()
        began = time.monotonic()
        self.counts.waiting += 1
        try:
            async with asyncio.timeout(self.acquire_s):
                warm = await self._take_warm()
                slot, connection = warm or await self._make()
        except TimeoutError as error:
            raise SandboxUnavailable(
                f"{self.backend.name}: no sandbox within {self.acquire_s:.0f} s; the pool: {self.metrics()}"
            ) from error
        finally:
            self.counts.waiting -= 1
        if self._closing is not None:
            self._give_back(slot, connection)
            self._check_open()
        self.counts.acquired += 1
        self.counts.from_warm += warm is not None
        self.counts.waits_s.append(time.monotonic() - began)
        self._refill()
        return _PooledCell(self, slot, connection)

    async def close(self) -> None:
        """As ``SandboxPool`` says; an ``acquire`` under way ends with ``SandboxUnavailable``. Idempotent.

        Raises the first failure, after every stage has run. Cancelling it changes nothing of that.
        """
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(), name="closing a sandbox pool")
        await to_the_end(self._closing)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def hosts(self) -> tuple[Host, ...]:
        """The hosts that take cells now."""
        return tuple(slot.host for slot in self.fleet.slots)

    @property
    def live_cells(self) -> int:
        """Cells that are open, being opened, or warm."""
        return self.fleet.cells

    def metrics(self) -> PoolMetrics:
        """What the pool holds now, and what it has done since it was opened."""
        counts = self.counts
        return PoolMetrics(
            backend=self.backend.name,
            hosts=self.fleet.hosts,
            hosts_starting=self.fleet.hosts_starting,
            cells=self.fleet.cells,
            warm=len(self._warm),
            waiting=counts.waiting,
            acquired=counts.acquired,
            from_warm=counts.from_warm,
            renewed=counts.renewed,
            stale=counts.stale,
            hosts_started=counts.hosts_started,
            hosts_retired=dict(counts.hosts_retired),
            host_failures=counts.host_failures,
            cell_failures=counts.cell_failures,
            acquire_s_p50=counts.wait_s(0.5),
            acquire_s_p95=counts.wait_s(0.95),
        )

    async def warmed_up(self) -> None:
        """Wait until the warm cells that were asked for are there, or cannot be made."""
        while self._filling:
            await asyncio.wait(self._filling)

    def _check_open(self) -> None:
        if self._closing is not None:
            raise SandboxUnavailable("the pool is closed")

    async def _close(self) -> None:
        errors: list[BaseException] = []
        for stage in (self._stop_filling, self.fleet.close, self._close_warm, self._close_backend):
            try:
                await stage()
            except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - raised when every stage has run
                _log.warning("while a sandbox pool was closed: %r", error)
                errors.append(error)
        if errors:
            raise errors[0]

    async def _stop_filling(self) -> None:
        await cancel_all(list(self._filling), timeout_s=_CANCEL_S)

    async def _close_warm(self) -> None:
        while self._warm:
            self._warm.pop().connection.close()

    async def _close_backend(self) -> None:
        async with asyncio.timeout(_BACKEND_S):
            await self.backend.close()

    async def _take_warm(self) -> tuple[Slot, Connection] | None:
        while self._warm:
            warm = self._warm.popleft()
            warm.slot.warm -= 1
            try:
                fit = await self._is_fit(warm)
            except BaseException:
                self._give_back(warm.slot, warm.connection)
                raise
            if fit:
                return warm.slot, warm.connection
            self.counts.stale += 1
            self._give_back(warm.slot, warm.connection)
        return None

    async def _is_fit(self, warm: _Warm) -> bool:
        """Whether a warm cell may be handed out: by what is known, and by asking it where that is old."""
        if warm.connection.lost or warm.slot.retired or warm.slot.host.ended:
            return False
        if time.monotonic() - warm.since < _FRESH_S and warm.slot.troubled_at < warm.since:
            return True
        nothing = {"op": "write", "paths": [], "append": False}
        try:
            reply, _ = await warm.connection.request(nothing, timeout_s=_CHECK_S)
        except (SandboxDied, TimeoutError):
            await self.fleet.judge(warm.slot)
            return False
        return "error" not in reply and not warm.slot.retired

    async def _make(self) -> tuple[Slot, Connection]:
        """A new cell."""
        for attempt in range(_ATTEMPTS):
            slot = await self.fleet.reserve()
            kept = False
            try:
                async with self.making:
                    connection = await open_cell(slot.host, self.spec)
                kept = True
                return slot, connection
            except SandboxDied as error:
                self.counts.cell_failures += 1
                if await self.fleet.judge(slot) and attempt == _ATTEMPTS - 1:
                    raise SandboxUnavailable(f"{self.backend.name}: {error}") from error
                _log.warning("a cell could not be made, attempt %d: %s", attempt + 1, error)
            finally:
                if not kept:
                    self.fleet.release(slot)
            await back_off(attempt, base_s=_BACK_OFF_S)
        raise SandboxUnavailable(f"{self.backend.name}: {_ATTEMPTS} hosts in a row ended while a cell was made")

    def _give_back(self, slot: Slot, connection: Connection) -> None:
        connection.close()
        self.fleet.release(slot)

    def _refill(self) -> None:
        while (
            self._closing is None
            and len(self._filling) < CELLS_AT_ONCE
            and len(self._warm) + len(self._filling) < self._warm_wanted
        ):
            task = asyncio.create_task(self._fill(), name="making a warm cell")
            self._filling.add(task)
            task.add_done_callback(self._filled)

    async def _fill(self) -> None:
        slot, connection = await self._make()
        self._warm.append(_Warm(slot, connection))
        self.fleet.keep_warm(slot)

    def _filled(self, task: asyncio.Task[None]) -> None:
        self._filling.discard(task)
        if task.cancelled():
            return
        if (error := task.exception()) is None:
            self._refill()
        else:  # whoever acquires next meets it and is told
            _log.warning("no warm sandbox could be made: %s", error)

    def _discard_warm(self, slot: Slot) -> None:
        """The warm cells of a host that is given up go with it; others are made elsewhere."""
        gone = [warm for warm in self._warm if warm.slot is slot]
        self._warm = deque(warm for warm in self._warm if warm.slot is not slot)
        for warm in gone:
            slot.warm -= 1
            self._give_back(slot, warm.connection)
        self._refill()


class _PooledCell(Cell):
    """A cell that tells its pool what becomes of it."""

    def __init__(self, pool: Pool, slot: Slot, connection: Connection) -> None:
        super().__init__(slot.host, pool.spec, connection)
        self._pool, self._slot = pool, slot

    async def renew(self, snapshot: Snapshot | None = None) -> None:
        try:
            async with asyncio.timeout(self._pool.acquire_s), self._pool.making:
                await super().renew(snapshot)
        except TimeoutError as error:
            raise SandboxBusy(f"a cell could not be renewed within {self._pool.acquire_s:.0f} s") from error
        self._pool.counts.renewed += 1

    async def close(self) -> None:
        already = self._closed
        try:
            await super().close()
        finally:
            if not already:
                self._pool.fleet.release(self._slot)

    async def _attribute(self, error: Exception) -> int:
        self._slot.troubled_at = time.monotonic()
        if self._connection.broke_protocol:
            self._pool.fleet.retire(self._slot, "protocol")
        try:
            return await super()._attribute(error)
        except SandboxDied:
            await self._pool.fleet.judge(self._slot)
            raise
