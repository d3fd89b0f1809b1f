"""The HTTP proxy of one cell, in the owner's event loop: what is on the allow-list passes, all else is told why not.

* One request a connection; what it asks for is checked, and nothing else is reached over that connection.
* A name is resolved here, and the address that was checked is the one that is connected to.
* A head has to come within ``HEAD_S``, an answer to connecting within ``CONNECT_S``, then a byte in either direction
  every ``IDLE_S``. No more than some pieces of 64 KiB are buffered: who reads slowly is sent slowly.
* ``close`` ends every connection at once.
"""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import logging
import socket
from typing import Self

from palaestra.envs.sandboxes.egress.allow_list import Address, AllowList, Target
from palaestra.envs.sandboxes.egress.request import MAX_HEAD_BYTES, Exchange, Refused, Tunnel, parse

MAX_CONNECTIONS = 64
"""Of one cell at once. One more is answered with 503."""
HEAD_S = 10.0
CONNECT_S = 10.0
"""For resolving a name, and again for each of its addresses that is tried."""
IDLE_S = 300.0
_ADDRESSES_TRIED = 3
_CHUNK_BYTES = 1 << 16
_LINGER_S, _LINGER_BYTES = 2.0, 1 << 20
_TARGETS_LOGGED = 100
_log = logging.getLogger(__name__)

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class CellProxy:
    """Serves the listening socket that a cell handed to its owner."""

    def __init__(self, allowed: AllowList) -> None:
        self._allowed = allowed
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[None]] = set()
        self._lookups: dict[str, asyncio.Task[list[Address]]] = {}
        self._refused: set[Target] = set()

    @classmethod
    async def start(cls, listener: socket.socket, allowed: AllowList) -> Self:
        """Serve a listening TCP socket from now on; it is closed with the proxy. Raises OSError."""
        proxy = cls(allowed)
        proxy._server = await asyncio.start_server(proxy._accepted, sock=listener, limit=MAX_HEAD_BYTES)
        return proxy

    def close(self) -> None:
        """Stop listening and drop every connection. Idempotent."""
        if self._server is not None:
            self._server.close()
        for task in (*self._serving, *self._lookups.values()):
            task.cancel()

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._serving) >= MAX_CONNECTIONS:  # at once, so that no more than these cost us a descriptor
            writer.write(_response("503 Service Unavailable", f"A cell has {MAX_CONNECTIONS} connections at most."))
            writer.close()
            return
        task = asyncio.create_task(self._serve((reader, writer)))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, client: Stream) -> None:
        try:
            try:
                request = await _receive(client[0])
                upstream = await self._connect(request.target)
                try:
                    await _pass(request, client, upstream)
                finally:
                    upstream[1].transport.abort()
            except Refused as refusal:
                await _answer(client, refusal)
        except* OSError as gone:  # one side went away, or both said nothing for too long
            _log.debug("a connection of a cell ended: %s", gone.exceptions)
        finally:
            client[1].transport.abort()

    async def _connect(self, target: Target) -> Stream:
        """A connection to the target, if it is allowed. Raises ``Refused``."""
        if target not in self._allowed:
            raise self._refuse(target, f"{target} is not on this cell's allow-list, which is: {self._allowed}.")
        literal = target.address
        addresses = [literal] if literal is not None else await self._look_up(target)
        problem = "it has no address"
        for address in addresses[:_ADDRESSES_TRIED]:
            try:
                async with asyncio.timeout(CONNECT_S):
                    return await asyncio.open_connection(str(address), target.port, limit=_CHUNK_BYTES)
            except OSError as error:
                problem = error.strerror or f"no answer within {CONNECT_S:.0f} s"
        raise Refused("502 Bad Gateway", f"{target} cannot be reached: {problem}.")

    async def _look_up(self, target: Target) -> list[Address]:
        """The addresses that the target's name stands for and may stand for. One lookup a name is under way."""
        lookup = self._lookups.get(target.host)
        if lookup is None:
            lookup = self._lookups[target.host] = asyncio.create_task(_resolve(target.host))
            lookup.add_done_callback(functools.partial(self._looked_up, target.host))
        try:
            async with asyncio.timeout(CONNECT_S):
                addresses = await asyncio.shield(lookup)
        except OSError as error:
            problem = error.strerror or f"no answer within {CONNECT_S:.0f} s"
            raise Refused("502 Bad Gateway", f"{target.host} cannot be resolved: {problem}.") from None
        permitted = [address for address in addresses if self._allowed.permits(address, target.port)]
        if addresses and not permitted:
            text = f"{target} resolves to an address that is not public and not itself allowed."
            raise self._refuse(target, text, f" (it resolves to {', '.join(map(str, addresses))})")
        return permitted

    def _looked_up(self, host: str, lookup: asyncio.Task[list[Address]]) -> None:
        del self._lookups[host]
        if not lookup.cancelled():
            lookup.exception()  # whoever still waits is told; perhaps nobody does

    def _refuse(self, target: Target, text: str, for_the_log: str = "") -> Refused:
        if target not in self._refused and len(self._refused) < _TARGETS_LOGGED:
            self._refused.add(target)
            _log.info("egress refused: %s%s", text, for_the_log)
        return Refused("403 Forbidden", text)


async def _receive(reader: asyncio.StreamReader) -> Tunnel | Exchange:
    try:
        async with asyncio.timeout(HEAD_S):
            return parse(await reader.readuntil(b"\r\n\r\n"))
    except asyncio.LimitOverrunError:
        raise Refused(
            "431 Request Header Fields Too Large", f"The head of a request has {MAX_HEAD_BYTES} bytes at most."
        ) from None
    except TimeoutError:
        raise Refused("408 Request Timeout", f"No whole head of a request came within {HEAD_S:.0f} s.") from None
    except asyncio.IncompleteReadError:
        raise ConnectionResetError("the client left before its request was whole") from None


async def _resolve(host: str) -> list[Address]:
    """Every address of a name, each once, as the resolver orders them. Raises OSError."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # a label is empty or too long
        raise OSError(22, f"not a host name ({error})") from None
    return list(dict.fromkeys(ipaddress.ip_address(address[0]) for *_, address in found))


async def _pass(request: Tunnel | Exchange, client: Stream, upstream: Stream) -> None:
    """Carry bytes both ways: of a tunnel until both sides have ended, of an exchange until the answer has."""
    for _, writer in (client, upstream):
        writer.transport.set_write_buffer_limits(high=0)  # ``drain`` waits until the kernel has everything
    async with asyncio.timeout(IDLE_S) as idle, asyncio.TaskGroup() as pumps:
        if isinstance(request, Tunnel):
            client[1].write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            pumps.create_task(_pump(client[0], upstream[1], idle))
            await _pump(upstream[0], client[1], idle)
        else:
            upstream[1].write(request.head)
            upload = pumps.create_task(_upload(client[0], upstream[1], idle, request.body_bytes))
            await _pump(upstream[0], client[1], idle)
            upload.cancel()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, idle: asyncio.Timeout) -> None:
    while data := await reader.read(_CHUNK_BYTES):
        await _forward(data, writer, idle)
    writer.write_eof()


async def _upload(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, idle: asyncio.Timeout, body_bytes: int
) -> None:
    """The body of one request and no byte of another; then the client's end of sending, if it comes."""
    while body_bytes and (data := await reader.read(min(_CHUNK_BYTES, body_bytes))):
        await _forward(data, writer, idle)
        body_bytes -= len(data)
    if not await reader.read(1):
        writer.write_eof()


async def _forward(data: bytes, writer: asyncio.StreamWriter, idle: asyncio.Timeout) -> None:
    writer.write(data)
    await writer.drain()
    if not idle.expired():
        idle.reschedule(asyncio.get_running_loop().time() + IDLE_S)


async def _answer(client: Stream, refusal: Refused) -> None:
    """Say no, and read on for a moment: a connection closed over unread bytes takes the answer with it."""
    reader, writer = client
    writer.write(_response(refusal.status, refusal.text))
    async with asyncio.timeout(_LINGER_S):
        await writer.drain()
        writer.write_eof()
        left = _LINGER_BYTES
        while left > 0 and (data := await reader.read(_CHUNK_BYTES)):
            left -= len(data)


def _response(status: str, text: str) -> bytes:
    body = f"{text}\n".encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: {len(body)}\r\n"
    return f"{head}Connection: close\r\n\r\n".encode() + body
