"""Waiting for work that must not be left half done, and never for ever."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Collection
from typing import Any, TypeVar

T = TypeVar("T")
_log = logging.getLogger(__name__)


async def to_the_end(task: asyncio.Task[T]) -> T:
    """Await a task; a caller who is cancelled meanwhile is so only after it has ended."""
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # seen: the cancellation is what the caller gets
        raise


async def cancel_all(tasks: Collection[asyncio.Task[Any]], *, timeout_s: float) -> None:
    """Cancel tasks and wait until they have ended; one that does not in time is named in the log and left."""
    for task in tasks:
        task.cancel()
    if not tasks:
        return
    done, late = await asyncio.wait(tasks, timeout=timeout_s)
    for task in done:
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.warning("%s was cancelled and failed: %s", task.get_name(), error)
    for task in late:
        _log.error("%s was cancelled and has not ended within %.0f s", task.get_name(), timeout_s)


async def back_off(attempt: int, *, base_s: float) -> None:
    """Sleep before the attempt after ``attempt`` (from 0): twice as long each time, and never as long as others do."""
    await asyncio.sleep(random.uniform(0.5, 1.5) * base_s * 2**attempt)
