"""The first frames of a connection, with open files beside them, which asyncio's transports cannot carry.

With the opening frame the owner sends the files through which a cell joins its control groups; beside the answer a
cell with a proxy sends the port for it. On no later frame are descriptors taken: what comes beside one, the kernel
closes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Sequence
from pathlib import Path

from palaestra.envs.errors import SandboxDied
from palaestra.envs.sandboxes.connection import Connection
from palaestra.envs.sandboxes.supervisor.frames import (
    PREFIX,
    Header,
    MalformedFrame,
    decode_body,
    decode_prefix,
    encode,
)

_MAX_BYTES = 1 << 16
_MAX_DESCRIPTORS = 1


async def begin(
    path: Path, opening: Header, *, timeout_s: float, descriptors: Sequence[int] = ()
) -> tuple[Connection, Header, list[int]]:
    """Connect, send the first frame with these descriptors, and wait for the answer.

    Returns the connection, the answer, and the descriptors that came with it, which are the caller's to close.
    Raises OSError (TimeoutError is one) and ``SandboxDied``.
    """
    loop = asyncio.get_running_loop()
    received: list[int] = []
    with contextlib.ExitStack() as on_failure:
        stream = on_failure.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK))
        on_failure.callback(_close_all, received)
        async with asyncio.timeout(timeout_s):
            await loop.sock_connect(stream, str(path))
            frame = encode(opening)
            # The buffer of a new connection is empty, so the descriptors are off with the first byte.
            await loop.sock_sendall(stream, frame[socket.send_fds(stream, [frame], descriptors) :])
            await _until_readable(stream)
            data, came, _, _ = socket.recv_fds(stream, _MAX_BYTES, _MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
            received.extend(came)
            answer = await _rest_of_frame(stream, data)
        connection = await Connection.over(stream)
        on_failure.pop_all()
    return connection, answer, received


def _close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


async def _until_readable(stream: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(stream, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(stream)


async def _rest_of_frame(stream: socket.socket, data: bytes) -> Header:
    """The header of the frame that begins with ``data`` and has no payload."""
    more = data
    while more:
        try:
            if len(data) >= PREFIX.size:
                header_bytes, _ = decode_prefix(data[: PREFIX.size], 0)
                if len(data) >= PREFIX.size + header_bytes:
                    return decode_body(data[PREFIX.size :], b"")[0]
        except MalformedFrame as error:
            raise SandboxDied(f"the supervisor broke the protocol: {error}") from error
        more = await asyncio.get_running_loop().sock_recv(stream, _MAX_BYTES)
        data += more
    raise SandboxDied("the connection to the sandbox ended")
