"""Who killed the sandbox? Once is bad luck; the same actions again are the agent's doing.

A host that died is an infrastructure failure, unless the very same actions on the very same task took one down before
the episode began. Otherwise a program that brings its sandbox down would be an escape from every bad reward. Episodes
that shared the host when it died are witnesses of one death, not of several, even where all of them did the same.
Within a process the fatal attempts are remembered, the latest ``_REMEMBERED`` of them.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

_REMEMBERED = 4096


class FatalAttempts:
    """Remembers by digest under which (task, actions) a sandbox died, and when first."""

    def __init__(self) -> None:
        self._first_death: OrderedDict[bytes, int] = OrderedDict()
        self._deaths = 0

    def now(self) -> int:
        """The moment, counted in recorded deaths: what an episode keeps from before it asks for its cell."""
        return self._deaths

    def is_agents_doing(self, task_id: str, actions: Sequence[str], *, since: int) -> bool:
        """Record one death; True when the same attempt had already died before ``since``, the episode's ``now()``."""
        digest = hashlib.blake2b(digest_size=16)
        for text in (task_id, *actions):
            data = text.encode("utf-8", "surrogatepass")
            digest.update(len(data).to_bytes(8, "little") + data)
        key = digest.digest()
        first = self._first_death.setdefault(key, self._deaths)
        self._deaths += 1
        self._first_death.move_to_end(key)
        while len(self._first_death) > _REMEMBERED:
            self._first_death.popitem(last=False)
        return first < since


FATAL_ATTEMPTS = FatalAttempts()
"""Of this process."""
