"""Who killed the sandbox? Once is bad luck; the same actions again are the agent's doing.

A host that died is an infrastructure failure, unless the very same actions on the very same task took one down
before. Otherwise a program that brings its sandbox down would be an escape from every bad reward. Within a process
the fatal attempts are remembered, the latest ``_REMEMBERED`` of them.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

_REMEMBERED = 4096


class FatalAttempts:
    """Remembers by digest which (task, actions) a sandbox died under."""

    def __init__(self) -> None:
        self._seen: OrderedDict[bytes, None] = OrderedDict()

    def is_agents_doing(self, task_id: str, actions: Sequence[str]) -> bool:
        """Record one death; True when the same attempt had died before."""
        digest = hashlib.blake2b(digest_size=16)
        for text in (task_id, *actions):
            data = text.encode("utf-8", "surrogatepass")
            digest.update(len(data).to_bytes(8, "little") + data)
        key = digest.digest()
        again = key in self._seen
        self._seen[key] = None
        self._seen.move_to_end(key)
        while len(self._seen) > _REMEMBERED:
            self._seen.popitem(last=False)
        return again


FATAL_ATTEMPTS = FatalAttempts()
"""Of this process."""
