"""The world that a cell may reach: servers of the test, on addresses of this machine's loopback, which a cell has not.

As these addresses are not public, the allow-list names them literally; a name then may stand for them.
"""

from __future__ import annotations

import asyncio
import json
import operator
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio

from palaestra.envs.sandboxes import BackendName, Python, Sandbox, SandboxSpec, open_pool
from palaestra.envs.sandboxes.pool import Pool

_FLOOD_BYTES = 64 << 20


class Outside:
    """Servers and what they saw.

    ``web`` answers with the request that it got, ``echo`` with every byte, ``flood`` with 64 MiB, ``gate`` with a byte
    once it is opened, ``silent`` with nothing. ``forbidden`` is the web at an address that no allow-list has.
    """

    def __init__(self) -> None:
        self.requests: list[bytes] = []
        self.connections = dict.fromkeys(("web", "echo", "flood", "gate", "silent", "forbidden"), 0)
        """Open now."""
        self.seen = dict.fromkeys(self.connections, 0)
        """Since the beginning."""
        self.flooded_bytes = 0
        self.gate = asyncio.Event()
        self.targets: dict[str, str] = {}

    async def open(self, stack: AsyncExitStack) -> None:
        for name in self.connections:
            host = "127.0.0.3" if name == "forbidden" else "127.0.0.2"
            server = await asyncio.start_server(self._server(name), host, 0)
            self.targets[name] = f"{host}:{server.sockets[0].getsockname()[1]}"
            stack.callback(server.close)

    def port(self, name: str) -> int:
        return int(self.targets[name].rpartition(":")[2])

    def _server(self, name: str) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any]:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.connections[name] += 1
            self.seen[name] += 1
            try:
                await getattr(self, f"_{name}")(reader, writer)
            except (ConnectionError, asyncio.IncompleteReadError):
                pass
            finally:
                self.connections[name] -= 1
                writer.close()

        return serve

    async def _web(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        for line in request.lower().split(b"\r\n"):
            if line.startswith(b"content-length:"):
                request += await reader.readexactly(int(line.partition(b":")[2]))
        self.requests.append(request)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(request), request))
        writer.write_eof()
        rest = await reader.read()  # until the proxy ends it: a second request would be here
        if rest:
            self.requests.append(rest)

    _forbidden = _web

    async def _echo(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.write_eof()

    async def _flood(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.flooded_bytes = 0
        chunk = bytes(range(256)) * 256
        while self.flooded_bytes < _FLOOD_BYTES:
            writer.write(chunk)
            await writer.drain()
            self.flooded_bytes += len(chunk)
        writer.write_eof()

    async def _gate(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self.gate.wait()
        writer.write(b"x")

    async def _silent(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def outside() -> AsyncIterator[Outside]:
    async with AsyncExitStack() as stack:
        world = Outside()
        await world.open(stack)
        yield world


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def egress_pool(backend: BackendName, outside: Outside) -> AsyncIterator[Pool]:
    """A pool whose cells reach all of ``outside`` but the forbidden server, by address and by some names."""
    names = [f"{name}.test:{outside.port('web')}" for name in ("named", "moving", "private")]
    listed = [target for name, target in outside.targets.items() if name != "forbidden"]
    spec = SandboxSpec(egress=(*listed, *names))
    async with await open_pool(spec, backend=backend) as pool:
        yield pool


@pytest_asyncio.fixture(loop_scope="session")
async def cell(egress_pool: Pool, outside: Outside) -> AsyncIterator[Sandbox]:
    acquired = await egress_pool.acquire()
    yield acquired
    await acquired.close()
    await wait_until(lambda: not any(outside.connections.values()))


async def wait_until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - what it asks is the kernel's, mostly
            await asyncio.sleep(0.01)


_CLIENT = """
import json, os, socket, sys, time, urllib.error, urllib.request
PROXY = ("127.0.0.1", 3128)
def send(data):
    connection = socket.create_connection(PROXY, 30)
    connection.sendall(data if isinstance(data, bytes) else data.encode("latin-1"))
    return connection
def until_end(connection):
    received = b""
    try:
        while data := connection.recv(1 << 16):
            received += data
    except ConnectionResetError:
        pass
    return received
def status(received):
    return int(received.split(b" ")[1]) if received else 0
def tunnel(target):
    connection = send(f"CONNECT {target} HTTP/1.1\\r\\n\\r\\n")
    head = b""
    while not head.endswith(b"\\r\\n\\r\\n"):
        head += connection.recv(1)
    assert status(head) == 200, head
    return connection
def fetch(url):
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return answer.status, answer.read().decode("latin-1")
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
def attempt(function):
    try:
        return repr(function())
    except OSError as error:
        return type(error).__name__ + " " + str(error.errno)
"""


async def run_program(sandbox: Sandbox, body: str, *arguments: object, interpreter: str = "fork") -> Any:
    code = f"{_CLIENT}\narguments = json.loads({json.dumps(arguments)!r})\n{body}\nprint(json.dumps(outcome))"
    result = await sandbox.run(Python(code, interpreter), timeout_s=90)  # type: ignore[arg-type]
    assert result.ok, (result.stdout_text, result.stderr_text)
    return json.loads(result.stdout)


@asynccontextmanager
async def check_nothing_left() -> AsyncIterator[None]:
    def held() -> tuple[int, int]:
        return len(asyncio.all_tasks()), len(os.listdir("/proc/self/fd"))

    await asyncio.sleep(0.2)  # for what an earlier test closed; if that takes longer, less is noticed here
    most = held()
    yield
    try:
        await wait_until(lambda: all(map(operator.le, held(), most)))
    except TimeoutError:
        pytest.fail(f"tasks and descriptors were {most} and are {held()}")


@pytest.fixture
def until() -> Callable[[Callable[[], bool]], Awaitable[None]]:
    """Wait for a condition; fails the test when it does not come true."""
    return wait_until


@pytest.fixture
def nothing_left() -> Callable[[], AbstractAsyncContextManager[None]]:
    """A context after which the tasks and descriptors of this process must be what they were before."""
    return check_nothing_left


@pytest.fixture
def client() -> str:
    """What programs in the tests begin with: functions of a client of the proxy."""
    return _CLIENT


@pytest.fixture
def program() -> Callable[..., Awaitable[Any]]:
    """``program(sandbox, body, *arguments, interpreter="fork")``: run the body after ``client``, with ``arguments`` as
    they are here, and return the value that it gives to ``outcome``."""
    return run_program
