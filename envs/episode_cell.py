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
        # The agent may have put a folder where a file was, or the reverse; what is remembered must fit into one tree.
        for other in [other for other in self._files if _excludes(other, path)]:
            del self._files[other]
        self._files.pop(path, None)
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

    async def renew(self) -> tuple[str, ...]:
        """A fresh cell in the same host, with the files written so far. Returns the paths for which it had no room."""
        await self.sandbox.renew()
        return await self._restore()

    async def replace(self) -> tuple[str, ...]:
        """A fresh cell, wherever, with the files written so far. Returns the paths for which it had no room."""
        await self.leave()
        self._sandbox = await self._pool.acquire()
        return await self._restore()

    async def _restore(self) -> tuple[str, ...]:
        """Write what is remembered, the newest first: together the files may need room that removing the old gave."""
        newest_first = dict(reversed(self._files.items()))
        try:
            await self.sandbox.write(newest_first)
        except CellFull:
            pass  # each by itself, then
        else:
            return ()
        left_out = []
        for path, data in newest_first.items():
            try:
                await self.sandbox.write({path: data})
            except CellFull:
                left_out.append(path)
        if not self.sandbox.broken:  # else nothing is wrong with the files, and the next cell gets them
            for path in left_out:
                del self._files[path]
        return tuple(left_out)

    async def leave(self) -> None:
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is None:
            return
        if self._pid != os.getpid():
            # Inherited through a fork. Closing it here would take it out of the parent's epoll set.
            loop.abandon(sandbox)
        else:
            await sandbox.close()


def _excludes(path: str, other: str) -> bool:
    """Whether there cannot be files at both paths, because one is a folder of the other."""
    return path.startswith(f"{other}/") or other.startswith(f"{path}/")
