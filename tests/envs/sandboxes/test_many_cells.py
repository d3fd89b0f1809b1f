"""Many cells alive at once, in a process that may open few files."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from palaestra.envs.sandboxes import BackendName

_ACQUIRE = """
import asyncio, resource, sys
from palaestra.envs.sandboxes import Python, open_pool

async def alive(cells):
    results = await asyncio.gather(*(cell.run(Python("print(42)", "fork"), timeout_s=60) for cell in cells))
    return [result.stdout for result in results].count(b"42\\n")

async def main():
    soft, count = map(int, sys.argv[2:])
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    async with await open_pool(backend=sys.argv[1]) as pool:
        cells = [await pool.acquire() for _ in range(count)]
        print(await alive(cells), len(pool.hosts))

asyncio.run(main())
"""


def acquire(backend: BackendName, count: int, *, soft: int) -> str:
    """How many cells are alive, and in how many hosts, in a process that acquires ``count`` of them and may open
    ``soft`` files before it opens its pool."""
    command = [sys.executable, "-c", textwrap.dedent(_ACQUIRE), backend, str(soft), str(count)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_soft_limit_of_open_files_is_no_limit_of_cells(backend: BackendName) -> None:
    assert acquire(backend, 60, soft=48) == "60 1\n"


@pytest.mark.soak
def test_cells_live_many_to_a_host(backend: BackendName, soak_factor: int) -> None:
    cells = 60 * soak_factor
    assert acquire(backend, cells, soft=128) == f"{cells} {-(-cells // 256)}\n"
