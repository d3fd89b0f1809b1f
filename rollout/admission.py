"""Staleness bounded by admission: a group only starts while what it brings can still be trained on in time.

    accepted + running + group_size <= (max_staleness + version + 1) * batch_episodes

``accepted`` counts the episodes handed to the learner since version 0, ``running`` those under way. A group that is
dropped or cancelled gives its share back. So no finished group is ever too old, nothing is thrown away for age, and as
long as the learner trains whenever it has a batch, there is always room for the next one.
"""

from __future__ import annotations

import asyncio

from palaestra.envs.errors import UsageError


class AdmissionControl:
    """The count, and the wait for it. ``max_staleness`` is in optimizer updates: 0 is on-policy.

    ``version`` is where training resumes; what was accepted before it is taken to be ``version`` whole batches.
    """

    def __init__(self, *, max_staleness: int, batch_episodes: int, version: int = 0) -> None:
        if max_staleness < 0 or batch_episodes < 1 or version < 0:
            raise UsageError(
                f"max_staleness ({max_staleness}) and version ({version}) must be at least 0, "
                f"batch_episodes ({batch_episodes}) at least 1"
            )
        self.max_staleness, self.batch_episodes, self.version = max_staleness, batch_episodes, version
        self.accepted, self.running = version * batch_episodes, 0
        self._changed = asyncio.Condition()

    @property
    def room(self) -> int:
        """Episodes that may start now."""
        return (self.max_staleness + self.version + 1) * self.batch_episodes - self.accepted - self.running

    def check(self, group_size: int) -> None:
        """Batches are made of whole groups, or the last group of a batch would wait for a batch that waits for it."""
        if self.batch_episodes % group_size:
            raise UsageError(
                f"batch_episodes is {self.batch_episodes}, which is no multiple of group_size ({group_size})"
            )

    async def admit(self, episodes: int) -> None:
        """Wait until a group of this size may start, and count it as running."""
        async with self._changed:
            await self._changed.wait_for(lambda: episodes <= self.room)
            self.running += episodes

    async def settle(self, episodes: int, *, accepted: bool) -> None:
        """A group ended: handed to the learner, or dropped, its share given back."""
        async with self._changed:
            self.running -= episodes
            self.accepted += episodes if accepted else 0
            self._changed.notify_all()

    async def advance(self, version: int) -> None:
        """The learner finished an update; versions only grow."""
        async with self._changed:
            if version < self.version:
                raise UsageError(f"version {version} is older than {self.version}; versions only grow")
            self.version = version
            self._changed.notify_all()
