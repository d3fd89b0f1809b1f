"""The cell of one episode: entered with the task's files, and replaced when the agent breaks it."""

from __future__ import annotations

import os

from palaestra.envs import loop
from palaestra.envs.errors import CellFull, SandboxDied
from palaestra.envs.sandboxes.protocol import Sandbox, SandboxPool
from palaestra.envs.tasks.task import Task


class EpisodeCell:
    """Remembers the files that were written through it, so that a replacement starts from them.

    What programs wrote themselves is lost with a broken cell.
    """

    def __init__(self, pool: SandboxPool, task: Task) -> None:
        self.task = task
        self._pool = pool
        self._sandbox: Sandbox | None = None
        self._pid = os.getpid()
        self._files: dict[str, bytes] = {path: text.encode() for path, text in task.files.items()}
        self._solution: bytes | None = self._files.get(task.solution_path)

    @property
    def sandbox(self) -> Sandbox:
        if self._sandbox is None:
            raise SandboxDied("the episode has no cell")
        return self._sandbox

    async def enter(self) -> None:
        self._sandbox = await self._pool.acquire()
        if self._files:
            await self._sandbox.write(self._files)

    async def write(self, path: str, data: bytes) -> None:
        """Raises ``CellFull`` where the file doesn't fit."""
        await self.sandbox.write({path: data})
        self._files[path] = data
        if path == self.task.solution_path:
            self._solution = data

    async def solution_changed(self) -> bool:
        """Whether the solution's file is another than when it was last written or looked at here."""
        before = self._solution
        try:
            self._solution = await self.sandbox.read(self.task.solution_path)
        except FileNotFoundError:
            self._solution = None
        except CellFull:  # it became huge, or the cell broke; either way it is not what it was
            return True
        return self._solution != before

    async def renew(self) -> None:
        """A fresh cell in the same host, with the files written so far."""
        await self.sandbox.renew()
        await self.sandbox.write(self._files)

    async def replace(self) -> None:
        """A fresh cell, wherever, with the files written so far."""
        await self.leave()
        await self.enter()

    async def leave(self) -> None:
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is None:
            return
        if self._pid != os.getpid():
            # Inherited through a fork. Closing it here would take it out of the parent's epoll set.
            loop.abandon(sandbox)
        else:
            await sandbox.close()
