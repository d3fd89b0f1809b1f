"""The pool: healthy cells on demand, warm ones where there are some, hosts started and replaced as needed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import deque
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from palaestra.envs.errors import SandboxDied, SandboxUnavailable
from palaestra.envs.sandboxes.cell import Cell, open_cell
from palaestra.envs.sandboxes.connection import Connection
from palaestra.envs.sandboxes.host import Backend, Host
from palaestra.envs.sandboxes.protocol import SandboxSpec

_ATTEMPTS = 3
_log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Slot:
    """A host and how many cells of it are open or being opened."""

    host: Host
    cells: int = 0
    retired: bool = field(default=False)


class Pool:
    """A ``SandboxPool`` over one backend.

    * A cell is handed out at most once, and never after its connection was seen to end.
    * At most one cell a core is being made at any time, and one host.
    * A host that fails its health check is closed and replaced; cells of other hosts notice nothing.
    """

    def __init__(self, backend: Backend, spec: SandboxSpec, *, cells_per_host: int, warm: int) -> None:
        self.backend, self.spec = backend, spec
        self._cells_per_host, self._warm_wanted = cells_per_host, warm
        self._slots: list[_Slot] = []
        self._warm: deque[tuple[_Slot, Connection]] = deque()
        self._making = asyncio.Semaphore(max(2, os.cpu_count() or 2))
        self._starting: asyncio.Task[None] | None = None
        self._refilling: asyncio.Task[None] | None = None
        self._closed = False

    async def start(self) -> None:
        """Start the first host, so that a machine that cannot is known at once; then warm up."""
        await self._start_host()
        self._refill()

    async def acquire(self) -> Cell:
        self._check_open()
        slot, connection = self._take_warm() or await self._make()
        if self._closed:
            self._give_back(slot, connection)
            self._check_open()
        self._refill()
        return _PooledCell(self, slot, connection)

    async def close(self) -> None:
        """As ``SandboxPool`` says; an ``acquire`` under way ends with ``SandboxUnavailable``."""
        self._closed = True
        async with contextlib.AsyncExitStack() as stages:
            stages.push_async_callback(self.backend.close)
            stages.push_async_callback(self._close_hosts)
            for task in (self._starting, self._refilling):
                if task is not None and not task.done():
                    stages.push_async_callback(_cancel, task)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def hosts(self) -> tuple[Host, ...]:
        """The hosts that run now."""
        return tuple(slot.host for slot in self._slots)

    @property
    def live_cells(self) -> int:
        """Cells that are open, being opened, or warm."""
        return sum(slot.cells for slot in self._slots)

    async def warmed_up(self) -> None:
        """Wait until the warm cells that were asked for are there, or cannot be made."""
        if self._refilling is not None:
            await asyncio.wait([self._refilling])

    def _check_open(self) -> None:
        if self._closed:
            raise SandboxUnavailable("the pool is closed")

    async def _close_hosts(self) -> None:
        """Every host that there is now; only after no task is left that could add one."""
        slots, self._slots = self._slots, []
        async with contextlib.AsyncExitStack() as stages:
            for slot in slots:
                slot.retired = True
                stages.push_async_callback(slot.host.close)
            while self._warm:
                stages.callback(self._warm.pop()[1].close)

    def _take_warm(self) -> tuple[_Slot, Connection] | None:
        while self._warm:
            slot, connection = self._warm.popleft()
            if not connection.lost and not slot.retired:
                return slot, connection
            self._give_back(slot, connection)
        return None

    async def _make(self) -> tuple[_Slot, Connection]:
        """A new cell in the emptiest host that has room."""
        for attempt in range(_ATTEMPTS):
            slot = await self._reserve()
            try:
                async with self._making:
                    return slot, await open_cell(slot.host, self.spec)
            except SandboxDied as error:
                slot.cells -= 1
                if not await slot.host.healthy():
                    _log.warning("sandbox host ended and is replaced: %s", error)
                    await self._retire(slot)
                elif attempt == _ATTEMPTS - 1:
                    raise SandboxUnavailable(f"{self.backend.name}: {error}") from error
            except BaseException:
                slot.cells -= 1
                raise
        raise SandboxUnavailable(f"{self.backend.name}: {_ATTEMPTS} hosts in a row ended while a cell was made")

    async def _reserve(self) -> _Slot:
        while True:
            self._check_open()
            free = [slot for slot in self._slots if slot.cells < self._cells_per_host]
            if free:
                slot = min(free, key=lambda slot: slot.cells)
                slot.cells += 1
                return slot
            await self._start_host()

    async def _start_host(self) -> None:
        """Start one host; everyone who needs one meanwhile waits for the same, and a cancelled waiter stops nobody."""
        self._check_open()
        if self._starting is None or self._starting.done():
            self._starting = asyncio.create_task(self._start_one())
        starting = self._starting
        await asyncio.wait([starting])
        if starting.cancelled():  # by ``close``, and not the caller itself
            raise SandboxUnavailable("the pool was closed while a host was being started")
        starting.result()

    async def _start_one(self) -> None:
        host = await self.backend.start_host()
        if self._closed:
            await host.close()
            raise SandboxUnavailable("the pool was closed while a host was being started")
        self._slots.append(_Slot(host))

    async def _retire(self, slot: _Slot) -> None:
        if not slot.retired:
            slot.retired = True
            self._slots = [other for other in self._slots if other is not slot]
            await slot.host.close()

    def _give_back(self, slot: _Slot, connection: Connection) -> None:
        connection.close()
        slot.cells -= 1

    def _refill(self) -> None:
        idle = self._refilling is None or self._refilling.done()
        if idle and not self._closed and len(self._warm) < self._warm_wanted:
            self._refilling = asyncio.create_task(self._fill())

    async def _fill(self) -> None:
        while len(self._warm) < self._warm_wanted:
            try:
                self._warm.append(await self._make())
            except SandboxUnavailable as error:  # whoever acquires next meets it and is told
                _log.warning("no warm sandbox could be made: %s", error)
                return


class _PooledCell(Cell):
    """A cell that tells its pool when it is given back."""

    def __init__(self, pool: Pool, slot: _Slot, connection: Connection) -> None:
        super().__init__(slot.host, pool.spec, connection)
        self._pool, self._slot = pool, slot

    async def close(self) -> None:
        if not self._closed:
            self._slot.cells -= 1
        await super().close()


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.warning("while closing the pool: %s", error)
