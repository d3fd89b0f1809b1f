"""What is kept of a stream that may be endless, in bounded memory."""

from __future__ import annotations

_SLACK_BYTES = 1 << 16
"""How far a tail may grow beyond what is kept of it before it is cut: so most additions copy nothing."""


class Capture:
    """The first and the last half of a stream, and how much lay between."""

    def __init__(self, limit_bytes: int) -> None:
        self.half = max(limit_bytes // 2, 1)
        self.head, self.tail = bytearray(), bytearray()
        self.total = 0

    def add(self, data: bytes) -> None:
        self.total += len(data)
        room = self.half - len(self.head)
        if room > 0:
            self.head += data[:room]
            data = data[room:]
        if data:
            self.tail += data
            if len(self.tail) > 4 * self.half + _SLACK_BYTES:
                del self.tail[: -self.half]

    def finish(self) -> tuple[bytes, int]:
        """What is kept, and the number of bytes that are missing in its middle."""
        del self.tail[: -self.half]
        kept = bytes(self.head + self.tail)
        return kept, self.total - len(kept)


class Prefix:
    """The first ``limit_bytes`` of a stream."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit, self.data, self.total = limit_bytes, bytearray(), 0

    def add(self, data: bytes) -> None:
        self.total += len(data)
        self.data += data[: max(self.limit - len(self.data), 0)]
