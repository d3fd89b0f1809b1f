"""Limits of a cell's connections, and that they end with whatever they belong to."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from palaestra.envs.sandboxes import BackendName, Python, Sandbox, SandboxSpec, open_pool
from palaestra.envs.sandboxes.egress import proxy

pytestmark = pytest.mark.asyncio(loop_scope="session")
Program = Callable[..., Awaitable[Any]]
Until = Callable[[Callable[[], bool]], Awaitable[None]]
NothingLeft = Callable[[], AbstractAsyncContextManager[None]]
FLOOD_BYTES = 64 << 20


async def test_a_head_that_does_not_come_and_a_connection_that_says_nothing_end(
    cell: Sandbox, outside: Any, monkeypatch: pytest.MonkeyPatch, program: Program
) -> None:
    monkeypatch.setattr(proxy, "HEAD_S", 0.3)
    body = "outcome = status(until_end(send(arguments[0])))"
    assert await program(cell, body, f"CONNECT {outside.targets['echo']} HTTP/1.1\r\nX: ") == 408
    monkeypatch.setattr(proxy, "HEAD_S", 10.0)
    monkeypatch.setattr(proxy, "IDLE_S", 0.3)
    body = "outcome = len(until_end(tunnel(arguments[0])))"
    assert await program(cell, body, outside.targets["silent"]) == 0


async def test_a_cell_has_so_many_connections_at_once_and_no_more(
    cell: Sandbox, outside: Any, program: Program
) -> None:
    body = """
import resource
held = [tunnel(arguments[0]) for _ in range(64)]
def refused():
    connection = socket.create_connection(PROXY, 30)
    return status(until_end(connection))
outcome = [refused(), refused()]
held.pop().close()
while True:
    try:
        tunnel(arguments[0])
        break
    except (AssertionError, OSError):
        time.sleep(0.05)
"""
    assert await program(cell, body, outside.targets["silent"]) == [503, 503]


async def test_who_reads_slowly_is_sent_slowly_and_gets_every_byte(
    cell: Sandbox, outside: Any, program: Program, until: Until
) -> None:
    body = """
gate, connection = tunnel(arguments[1]), tunnel(arguments[0])
gate.recv(1)
piece, size, right = bytes(range(256)) * 256, 0, True
while data := connection.recv(1 << 16):
    start = size % 256
    right = right and data == (piece + piece)[start:start + len(data)]
    size += len(data)
outcome = [size, right]
"""
    outside.gate.clear()
    running = asyncio.ensure_future(program(cell, body, outside.targets["flood"], outside.targets["gate"]))
    await until(lambda: outside.connections["flood"] == 1)
    sent, still = -1, 0
    while still < 10:  # until nothing has moved for half a second
        await asyncio.sleep(0.05)
        still = still + 1 if outside.flooded_bytes == sent else 0
        sent = outside.flooded_bytes
    outside.gate.set()
    assert await running == [FLOOD_BYTES, True]
    assert sent < FLOOD_BYTES / 2


@pytest.mark.parametrize("how", ["closed", "renewed", "cancelled", "host ended", "pool closed"])
async def test_a_cell_that_ends_in_the_middle_of_a_transfer_leaves_nothing(
    backend: BackendName, outside: Any, how: str, until: Until, client: str, nothing_left: NothingLeft
) -> None:
    spec = SandboxSpec(egress=(outside.targets["flood"], outside.targets["silent"]))
    code = f"""{client}
held = [tunnel({outside.targets["silent"]!r}) for _ in range(3)]
held.append(send("CONNECT "))
connection = tunnel({outside.targets["flood"]!r})
connection.recv(1 << 20)
time.sleep(60)
"""
    async with nothing_left(), await open_pool(spec, backend=backend) as pool:
        sandbox = await pool.acquire()
        running = asyncio.create_task(sandbox.run(Python(code), timeout_s=60))
        await until(lambda: (outside.connections["flood"], outside.connections["silent"]) == (1, 3))
        if how == "closed":
            await sandbox.close()
        elif how == "renewed":
            await sandbox.renew()
        elif how == "cancelled":
            running.cancel()
        elif how == "host ended":
            await pool.hosts[0].close()
        else:
            await pool.close()
        await asyncio.wait([running])
        assert how == "cancelled" or running.exception() is not None or not running.result().ok
        await until(lambda: not any(outside.connections.values()))
