"""A pool whose cells have small limits, so that a test reaches them quickly, on each backend in turn.

Pool and sandboxes live in the session's event loop: ``pytestmark = pytest.mark.asyncio(loop_scope="session")``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from palaestra.envs.sandboxes import BackendName, Sandbox, SandboxSpec, open_pool
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
