"""The one event-loop thread of a process, on which pools, sockets and environments live.

It starts with the first call and is started anew in a forked child, where the parent's thread doesn't exist. Code
that runs in an event loop of its own may call ``run`` too: it waits for another thread, not for itself; or it
crosses over without blocking with ``asyncio.wrap_future(submit(...))``.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from palaestra.envs.errors import UsageError

T = TypeVar("T")

_STOP_S = 10.0


class _LoopThread:
    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._serve, name="palaestra-envs", daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def stop(self) -> None:
        if self.thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self.thread.join(_STOP_S)
        if not self.thread.is_alive():
            self.loop.close()


_lock = threading.Lock()
_current: _LoopThread | None = None


def submit(work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
    """Start ``work`` on the loop thread."""
    global _current
    with _lock:
        if _current is None or not _current.thread.is_alive():
            _current = _LoopThread()
        loop = _current.loop
    return asyncio.run_coroutine_threadsafe(work, loop)


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` on the loop thread and wait for it. An interrupt cancels it before it is raised on."""
    if _current is not None and threading.current_thread() is _current.thread:
        work.close()
        raise UsageError("this environment's loop thread cannot wait for itself; await AsyncAgentEnv instead")
    future = submit(work)
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


def is_running() -> bool:
    """Whether the loop thread was started and lives."""
    return _current is not None and _current.thread.is_alive()


def stop() -> None:
    """End the loop thread; the next call starts another."""
    global _current
    with _lock:
        current, _current = _current, None
    if current is not None:
        current.stop()


_abandoned: list[object] = []
"""What a forked child inherited and must not touch, nor let be collected: its file descriptors are the parent's."""


def abandon(inherited: object) -> None:
    """Keep something of the parent's alive in a forked child, unused, so that no destructor acts on it."""
    _abandoned.append(inherited)


def _forget_after_fork() -> None:
    global _current, _lock
    abandon(_current)
    _current, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_after_fork)
atexit.register(stop)
