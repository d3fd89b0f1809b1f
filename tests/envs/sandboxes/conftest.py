"""A pool whose cells have small limits, so that a test reaches them quickly, on each backend in turn.

Pool and sandboxes live in the session's event loop: ``pytestmark = pytest.mark.asyncio(loop_scope="session")``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest_asyncio

from palaestra.envs.sandboxes import BackendName, ExecResult, Python, Sandbox, SandboxSpec, Shell, open_pool
from palaestra.envs.sandboxes.pool import Pool

SPEC = SandboxSpec(memory_mib=256, pids=32, file_mib=4, workspace_mib=16, inodes=1000)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def pool(backend: BackendName) -> AsyncIterator[Pool]:
    async with await open_pool(SPEC, backend=backend) as opened:
        yield opened


@pytest_asyncio.fixture(loop_scope="session")
async def sandbox(pool: Pool) -> AsyncIterator[Sandbox]:
    """A fresh cell, given back after the test."""
    acquired = await pool.acquire()
    yield acquired
    await acquired.close()


@dataclass(slots=True)
class Arena:
    """Where a program attacks: its own cell, beside one that lives on and works all the while."""

    pool: Pool
    sandbox: Sandbox
    bystander: asyncio.Task[ExecResult]

    async def assert_all_well(self) -> None:
        """The supervisor, the same sandbox once renewed, a new cell and the bystander: none has come to harm."""
        for host in self.pool.hosts:
            assert await host.healthy()
        await self.sandbox.renew()
        fresh = await self.pool.acquire()
        for sandbox in (self.sandbox, fresh):
            for command in (Python("import os\nprint(os.listdir())", "fork"), Shell("cd /tmp; ls -A; echo []")):
                assert (await sandbox.run(command, timeout_s=30)).stdout == b"[]\n"
        await fresh.close()
        assert not self.bystander.done(), self.bystander.result()


ARENA_SPEC = SandboxSpec(memory_mib=96, pids=16, file_mib=8, workspace_mib=16, inodes=10_200, cpu_s=1, output_kib=16)
BYSTANDER = """
import os, socket, sys, time
server = socket.create_server(("127.0.0.1", 4242))
abstract = socket.socket(socket.AF_UNIX)
abstract.bind("\\0bystander")
abstract.listen()
path = socket.socket(socket.AF_UNIX)
path.bind("/tmp/bystander.sock")
path.listen()
open("/dev/shm/bystander", "w").write("shared")
terminal = os.openpty()
kept = sys.stdin.read()
open("ready", "w").close()
while os.path.exists("ready"):
    time.sleep(0.1)
"""
SECRET = b"of-the-bystander-"


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def arena_pool(backend: BackendName) -> AsyncIterator[tuple[Pool, asyncio.Task[ExecResult]]]:
    async with await open_pool(ARENA_SPEC, backend=backend) as opened:
        cell = await opened.acquire()
        await cell.write({"secret": SECRET * 1000})
        living = asyncio.create_task(cell.run(Python(BYSTANDER, "fork"), timeout_s=3600, stdin=SECRET * 1000))
        await asyncio.wait([living], timeout=1)
        yield opened, living
        living.cancel()
        await asyncio.wait([living])


@pytest_asyncio.fixture(loop_scope="session")
async def arena(arena_pool: tuple[Pool, asyncio.Task[ExecResult]]) -> AsyncIterator[Arena]:
    opened, living = arena_pool
    acquired = await opened.acquire()
    yield Arena(opened, acquired, living)
    await acquired.close()
