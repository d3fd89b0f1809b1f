"""One sandbox pool a process for each (spec, backend), shared by its environments and closed with the last of them.

A pool belongs to the event loop that opened it, so the loop is part of what it is found by.
"""

from __future__ import annotations

import asyncio
import atexit
import math
import os
from dataclasses import dataclass, field
from typing import get_args

from palaestra.envs import loop
from palaestra.envs.errors import UsageError
from palaestra.envs.sandboxes import BackendName, open_pool
from palaestra.envs.sandboxes.protocol import SandboxPool, SandboxSpec
from palaestra.envs.tasks.task import Limits

PRELOAD = ("collections", "functools", "itertools", "json", "math", "re")
"""What a forked interpreter of these pools finds already imported."""
_WARM_CELLS = 2
_LEAST_CPU_S = SandboxSpec().cpu_s

Key = tuple[SandboxSpec, BackendName, asyncio.AbstractEventLoop]


@dataclass(slots=True)
class _Shared:
    opening: asyncio.Task[SandboxPool]
    holders: set[int] = field(default_factory=set)


_shared: dict[Key, _Shared] = {}


class PoolLease:
    """What one environment holds of the shared pools: a function from a task's limits and image to its pool."""

    def __init__(self, backend: str) -> None:
        if backend not in get_args(BackendName):
            raise UsageError(f"backend={backend!r} is not one of {', '.join(map(repr, get_args(BackendName)))}")
        self.backend: BackendName = backend  # type: ignore[assignment]
        self._keys: set[Key] = set()

    async def __call__(self, limits: Limits, image: str | None = None) -> SandboxPool:
        """The pool whose cells have these limits and that image; opened with its first holder."""
        # A deadline that the CPU limit undercuts would be none.
        cpu_s = max(_LEAST_CPU_S, math.ceil(limits.step_s))
        spec = SandboxSpec(
            memory_mib=limits.memory_mib,
            pids=limits.pids,
            cpu_s=cpu_s,
            preload=PRELOAD,
            egress=limits.egress,
            image=image,
        )
        key = (spec, self.backend, asyncio.get_running_loop())
        shared = _shared.get(key)
        if shared is None:
            shared = _shared[key] = _Shared(asyncio.create_task(_open(spec, self.backend)))
        shared.holders.add(id(self))
        self._keys.add(key)
        try:
            return await asyncio.shield(shared.opening)
        except BaseException:
            opening = shared.opening
            # Done and without error, it is this caller who was cancelled, and the pool is still to be closed.
            if opening.done() and (opening.cancelled() or opening.exception() is not None):
                # It could not be opened: the next one who asks tries afresh.
                self._keys.discard(key)
                if _shared.get(key) is shared:
                    del _shared[key]
            raise

    async def release(self) -> None:
        """Let go of all of them. Idempotent."""
        keys, self._keys = self._keys, set()
        for key in keys:
            shared = _shared.get(key)
            if shared is None:
                continue
            shared.holders.discard(id(self))
            if not shared.holders:
                del _shared[key]
                await _close(shared)


async def _open(spec: SandboxSpec, backend: BackendName) -> SandboxPool:
    return await open_pool(spec, backend=backend, warm=_WARM_CELLS)


async def _close(shared: _Shared) -> None:
    await asyncio.wait([shared.opening])
    if not shared.opening.cancelled() and shared.opening.exception() is None:
        await shared.opening.result().close()


async def close_all() -> None:
    """Close every shared pool of the running loop, whoever still holds it."""
    running = asyncio.get_running_loop()
    for key in [key for key in _shared if key[2] is running]:
        await _close(_shared.pop(key))


def _close_at_exit() -> None:
    if loop.is_running():
        loop.run(close_all())


def _forget_after_fork() -> None:
    """The parent's pools are the parent's: the child neither uses nor closes them."""
    loop.abandon(list(_shared.values()))
    _shared.clear()


os.register_at_fork(after_in_child=_forget_after_fork)
# Registered after the loop's own exit function, hence run before it.
atexit.register(_close_at_exit)
