"""How a cell's proxy port comes to its owner: as a descriptor beside the answer to the cell's first frame.

The connection is the cell, so the port is this cell's and no other's, without a token that could be stolen; and it is
the only frame with which a descriptor is taken: what a cell sends beside later ones, the kernel closes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from pathlib import Path

from palaestra.envs.errors import SandboxDied
from palaestra.envs.sandboxes.connection import Connection
from palaestra.envs.sandboxes.egress.allow_list import AllowList
from palaestra.envs.sandboxes.egress.proxy import CellProxy
from palaestra.envs.sandboxes.supervisor.frames import (
    PREFIX,
    Header,
    MalformedFrame,
    decode_body,
    decode_prefix,
    encode,
)

_MAX_BYTES = 1 << 16


async def open_with_proxy(
    path: Path, opening: Header, allowed: AllowList, *, timeout_s: float
) -> tuple[Connection, Header]:
    """Open a cell whose proxy port is served for as long as its connection lives. Returns that and the cell's answer.

    Raises OSError (TimeoutError is one) and ``SandboxDied``.
    """
    connection, answer, listener = await _open(path, opening, timeout_s)
    try:
        if "error" not in answer:
            if listener is None or not _listens(listener):
                raise SandboxDied("the cell gave no port for its proxy")
            proxy = await CellProxy.start(listener, allowed)
            connection.at_end(proxy.close)
    except BaseException:
        connection.close()
        if listener is not None:
            listener.close()
        raise
    return connection, answer


async def _open(path: Path, opening: Header, timeout_s: float) -> tuple[Connection, Header, socket.socket | None]:
    loop = asyncio.get_running_loop()
    with contextlib.ExitStack() as on_failure:
        stream = on_failure.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        stream.setblocking(False)
        async with asyncio.timeout(timeout_s):
            await loop.sock_connect(stream, str(path))
            await loop.sock_sendall(stream, encode(opening))
            await _until_readable(stream)
            data, descriptors, _, _ = socket.recv_fds(stream, _MAX_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
            listener = on_failure.enter_context(_adopt(descriptors[0])) if descriptors else None
            answer = await _rest_of_frame(stream, data)
        connection = await Connection.over(stream)
        on_failure.pop_all()
        return connection, answer, listener


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


def _adopt(descriptor: int) -> socket.socket:
    try:
        return socket.socket(fileno=descriptor)
    except OSError:  # no socket at all
        os.close(descriptor)
        raise


def _listens(candidate: socket.socket) -> bool:
    is_tcp = candidate.family == socket.AF_INET and candidate.type == socket.SOCK_STREAM
    return is_tcp and bool(candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
