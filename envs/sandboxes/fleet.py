"""The hosts of a pool: started when cells need them, replaced when they fail, closed when nobody needs them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from palaestra.envs.errors import SandboxBusy, SandboxUnavailable
from palaestra.envs.sandboxes.host import HOST_STARTS, Backend, Host
from palaestra.envs.sandboxes.pool_metrics import Counts, Retirement
from palaestra.envs.sandboxes.waiting import back_off, cancel_all

_ATTEMPTS = 3
_BACK_OFF_S = 0.2
_START_S = 90.0
_ENDING_S = 1.0
_CANCEL_S = 30.0
_CLOSE_S = 60.0
_CLOSE_EACH_S = 1.0
_log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Slot:
    """A host and what it holds."""

    host: Host
    cells: int = 0
    """Cells in use, being made, or warm."""
    warm: int = 0
    idle_since: float = field(default_factory=time.monotonic)
    """When it last had a cell in use; only of meaning while it has none."""
    troubled_at: float = 0.0
    """When a cell of it was last lost."""
    retired: bool = False
    closing: asyncio.Task[None] | None = None

    @property
    def idle(self) -> bool:
        return self.cells == self.warm


class Fleet:
    """Places for cells, in as few hosts as hold them, the oldest first, so that the youngest can go again.

    * At most ``HOST_STARTS`` hosts are being started at any time, and no more than the callers who wait need.
    * A host that is retired gets no more cells. It is closed once its last cell is given back, at once if it has ended.
    * Hosts after the first in which no cell was in use for ``idle_s`` are retired.
    """

    def __init__(
        self,
        backend: Backend,
        counts: Counts,
        *,
        cells_per_host: int,
        idle_s: float,
        on_retire: Callable[[Slot], None],
    ) -> None:
        self._backend, self._counts = backend, counts
        self._cells_per_host, self._idle_s, self._on_retire = cells_per_host, idle_s, on_retire
        self.slots: list[Slot] = []
        self._leaving: set[Slot] = set()
        self._waiters: deque[asyncio.Future[Slot]] = deque()
        self._starting: set[asyncio.Task[None]] = set()
        self._shrinking: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def cells(self) -> int:
        return sum(slot.cells for slot in (*self.slots, *self._leaving))

    @property
    def hosts(self) -> int:
        return len(self.slots) + len(self._leaving)

    @property
    def hosts_starting(self) -> int:
        return len(self._starting)

    async def reserve(self) -> Slot:
        """Room for one cell, to be given back with ``release``. Raises ``SandboxUnavailable``."""
        self._check_open()
        slot = self._with_room()
        if slot is not None:
            slot.cells += 1
            return slot
        waiter: asyncio.Future[Slot] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        self._start_hosts()
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self.release(waiter.result())  # it came at the same moment
            raise
        finally:
            with contextlib.suppress(ValueError):
                self._waiters.remove(waiter)

    def release(self, slot: Slot) -> None:
        """Give back the room of one cell."""
        slot.cells -= 1
        if slot.retired:
            self._close_when_done(slot)
            return
        self._serve_waiters()
        if slot.idle:
            slot.idle_since = time.monotonic()
        self._shrink_later()

    def keep_warm(self, slot: Slot) -> None:
        """A cell of the slot is nobody's until it is handed out."""
        slot.warm += 1
        self._shrink_later()

    def retire(self, slot: Slot, reason: Retirement) -> None:
        """Put no more cells into a host."""
        if not slot.retired:
            log = _log.info if reason == "idle" else _log.warning
            log("sandbox host %s is given up: %s", slot.host.socket.parent.parent.name, reason)
            slot.retired = True
            self.slots.remove(slot)
            self._leaving.add(slot)
            self._counts.hosts_retired[reason] += 1
            self._on_retire(slot)
            # That its lifeline is cut may be seen a little later than that it does not answer.
            asyncio.get_running_loop().call_later(_ENDING_S, self._close_when_done, slot)
        self._close_when_done(slot)

    async def judge(self, slot: Slot) -> bool:
        """Whether the host is well; one that is not is retired. Raises ``SandboxBusy`` where it cannot be known."""
        if slot.retired:
            return False
        if not slot.host.ended and await slot.host.healthy():
            return True
        self.retire(slot, "failed")
        return False

    async def close(self) -> None:
        """Close every host, also when closing another fails. Raises the first failure."""
        self._closed = True
        self._fail_waiters(SandboxUnavailable("the pool is closed"), len(self._waiters))
        tasks = [*self._starting, *([self._shrinking] if self._shrinking is not None else [])]
        await cancel_all(tasks, timeout_s=_CANCEL_S)
        slots, self.slots = [*self.slots, *self._leaving], []
        self._leaving.update(slots)
        for slot in slots:
            slot.retired = True
            if slot.closing is None:
                slot.closing = asyncio.create_task(self._close_host(slot), name="closing a sandbox host")
        closing = [slot.closing for slot in slots if slot.closing is not None]
        if not closing:
            return
        done, late = await asyncio.wait(closing, timeout=_CLOSE_S + _CLOSE_EACH_S * len(closing))
        errors = [error for task in done if not task.cancelled() and (error := task.exception()) is not None]
        if late:
            what = f"{len(late)} sandbox hosts did not end in time; `palaestra gc` removes what they leave"
            errors.append(SandboxUnavailable(what))
        for error in errors:
            raise error

    def _check_open(self) -> None:
        if self._closed:
            raise SandboxUnavailable("the pool is closed")

    def _with_room(self) -> Slot | None:
        for slot in [slot for slot in self.slots if slot.host.ended]:
            self.retire(slot, "failed")
        return next((slot for slot in self.slots if slot.cells < self._cells_per_host), None)

    def _serve_waiters(self) -> None:
        while self._waiters and (slot := self._with_room()) is not None:
            waiter = self._waiters.popleft()
            if not waiter.done():
                slot.cells += 1
                waiter.set_result(slot)

    def _fail_waiters(self, error: Exception, most: int) -> None:
        for _ in range(min(most, len(self._waiters))):
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_exception(error)

    def _start_hosts(self) -> None:
        needed = sum(not waiter.done() for waiter in self._waiters)
        while (
            not self._closed
            and len(self._starting) < HOST_STARTS
            and len(self._starting) * self._cells_per_host < needed
        ):
            task = asyncio.create_task(self._add_host(), name="starting a sandbox host")
            self._starting.add(task)
            task.add_done_callback(self._started)

    def _started(self, task: asyncio.Task[None]) -> None:
        self._starting.discard(task)
        self._start_hosts()

    async def _add_host(self) -> None:
        """Start a host for those who wait; when that fails, as many of them are told as it would have served."""
        try:
            slot = Slot(await self._start_host())
        except Exception as error:  # noqa: BLE001 - those who wait raise it
            self._fail_waiters(error, self._cells_per_host)
            return
        self.slots.append(slot)
        self._counts.hosts_started += 1
        self._serve_waiters()
        self._shrink_later()

    async def _start_host(self) -> Host:
        """A few attempts. The first host of all may have an image to fetch, and shows whether this machine can at all:
        it has the backend's own deadlines, and only what may pass is tried again."""
        for attempt in range(_ATTEMPTS):
            first = not self._counts.hosts_started
            try:
                async with asyncio.timeout(None if first else _START_S):
                    host = await self._backend.start_host()
            except (SandboxUnavailable, TimeoutError) as error:
                self._counts.host_failures += 1
                if attempt == _ATTEMPTS - 1 or (first and not isinstance(error, SandboxBusy)):
                    if isinstance(error, TimeoutError):
                        raise SandboxBusy(f"a sandbox host did not start within {_START_S:.0f} s") from error
                    raise
                _log.warning("a sandbox host did not start, attempt %d: %s", attempt + 1, error)
                await back_off(attempt, base_s=_BACK_OFF_S)
            else:
                if self._closed:
                    await host.close()
                    self._check_open()
                return host
        raise AssertionError("unreachable")

    def _close_when_done(self, slot: Slot) -> None:
        if slot.closing is None and (slot.cells == 0 or slot.host.ended):
            slot.closing = asyncio.create_task(self._close_host(slot), name="closing a sandbox host")
            slot.closing.add_done_callback(_log_failure)

    async def _close_host(self, slot: Slot) -> None:
        try:
            await slot.host.close()
        finally:
            self._leaving.discard(slot)

    def _shrink_later(self) -> None:
        if not self._closed and (self._shrinking is None or self._shrinking.done()) and self._surplus():
            self._shrinking = asyncio.create_task(self._shrink(), name="closing idle sandbox hosts")

    async def _shrink(self) -> None:
        while surplus := self._surplus():
            longest = min(surplus, key=lambda slot: slot.idle_since)
            left_s = longest.idle_since + self._idle_s - time.monotonic()
            if left_s > 0:
                await asyncio.sleep(left_s)
            else:
                self.retire(longest, "idle")

    def _surplus(self) -> list[Slot]:
        """Hosts after the first without a cell in use, whose warm cells have room elsewhere."""
        room = sum(self._cells_per_host - slot.cells for slot in self.slots)
        rest = self.slots[1:]
        return [slot for slot in rest if slot.idle and room - (self._cells_per_host - slot.cells) >= slot.warm]


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.warning("a sandbox host could not be closed in order: %s", error)
