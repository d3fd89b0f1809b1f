"""One connection to a supervisor, for asyncio: a request frame goes out, its reply frame comes back."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from palaestra.envs.errors import SandboxDied
from palaestra.envs.sandboxes.cell_groups import CellGroup
from palaestra.envs.sandboxes.supervisor.frames import (
    MAGIC,
    PREFIX,
    Header,
    MalformedFrame,
    decode_body,
    decode_prefix,
    encode,
)

Reply = tuple[Header, list[bytes]]

_OPEN_S = 10.0
_BREATH_S = 1.0
"""How long a request waits on past its timeout: when our event loop stood still, the timeout is over before the reply,
which is there, was read."""


class Connection(asyncio.Protocol):
    """Requests are answered in order, one at a time. The end of the connection fails the one that is waiting."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._waiter: asyncio.Future[Reply] | None = None
        self._transport: asyncio.Transport | None = None
        self._max_reply_bytes = 0
        self._lengths: tuple[int, int] | None = None
        self._at_end: list[Callable[[], None]] = []
        self.lost = False
        self.group: CellGroup | None = None
        """The control group of the cell behind this connection."""
        self.broke_protocol = False
        """The other end sent what is no frame, which no program can make it do. (A frame that is too large is one.)"""

    @classmethod
    async def open(cls, path: Path) -> Connection:
        """Connect to the socket at ``path``. Raises OSError, also when nobody accepts in time."""
        async with asyncio.timeout(_OPEN_S):
            _, connection = await asyncio.get_running_loop().create_unix_connection(cls, str(path))
        return connection

    @classmethod
    async def over(cls, stream: socket.socket) -> Connection:
        """Take over a connected socket between two requests."""
        _, connection = await asyncio.get_running_loop().create_unix_connection(cls, sock=stream)
        return connection

    async def request(
        self,
        header: Header,
        blobs: Sequence[bytes] = (),
        *,
        timeout_s: float,
        max_reply_bytes: int = 1 << 16,
        trailer: bytes = b"",
    ) -> Reply:
        """Send a frame, and ``trailer`` behind it as it is, and wait for the answer.

        Raises ``SandboxDied`` at the end of the connection or on anything that is not a frame within
        ``max_reply_bytes``, and ``TimeoutError``. After either, and after a cancellation, the connection is closed: a
        late answer can never be taken for that of another request. Raises ``MalformedFrame``, with nothing sent, for a
        request that is too large for a frame.
        """
        if self._transport is None or self.lost:
            raise SandboxDied("the connection to the sandbox is closed")
        if self._waiter is not None:
            raise RuntimeError("a sandbox serves one request at a time")
        frame = encode(header, blobs)
        self._max_reply_bytes = max_reply_bytes
        waiter: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiter = waiter
        try:
            self._transport.write(frame)
            if trailer:
                self._transport.write(trailer)
            for patience_s in (timeout_s, _BREATH_S):
                # Not asyncio.timeout: it cancels us even when the reply came in the same pass of the loop.
                if (await asyncio.wait([waiter], timeout=patience_s))[0]:
                    return waiter.result()
            raise TimeoutError(f"the supervisor did not answer within {timeout_s:.1f} s")
        except BaseException:
            self.close()
            raise
        finally:
            self._waiter = None
            if waiter.done() and not waiter.cancelled():
                waiter.exception()  # seen, also where we were cancelled in the moment in which it was set

    def close(self) -> None:
        """Drop the connection at once; the supervisor ends the cell behind it."""
        self._end()
        if self._transport is not None:
            self._transport.abort()

    def at_end(self, function: Callable[[], None]) -> None:
        """Have the function called, once, when the connection is closed or lost; at once if it is already."""
        self._at_end.append(function)
        if self.lost:
            self._end()

    def _end(self) -> None:
        self.lost = True
        while self._at_end:
            self._at_end.pop()()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        try:
            if self._lengths is None and len(self._buffer) >= PREFIX.size:
                self._lengths = decode_prefix(bytes(self._buffer[: PREFIX.size]), self._max_reply_bytes)
            if self._lengths is None or len(self._buffer) < PREFIX.size + sum(self._lengths):
                return
            text_end = PREFIX.size + self._lengths[0]
            reply = decode_body(bytes(self._buffer[PREFIX.size : text_end]), bytes(self._buffer[text_end:]))
        except MalformedFrame as error:
            self.broke_protocol = self._lengths is not None or not self._buffer.startswith(MAGIC)
            self._fail(SandboxDied(f"the supervisor broke the protocol: {error}"))
            self.close()
            return
        self._buffer.clear()
        self._lengths = None
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(reply)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()
        self._fail(SandboxDied("the connection to the sandbox ended" + (f": {exc}" if exc else "")))

    def _fail(self, error: Exception) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error)
