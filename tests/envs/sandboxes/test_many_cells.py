"""Many cells alive at once, where the process that owns them may open few files, and where it may open none."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from palaestra.envs.sandboxes import BackendName

_ACQUIRE = """
import asyncio, resource, sys
from palaestra.envs.errors import SandboxUnavailable
from palaestra.envs.sandboxes import Python, open_pool

async def alive(cells):
    results = await asyncio.gather(*(cell.run(Python("print(42)", "fork"), timeout_s=60) for cell in cells))
    return [result.stdout for result in results].count(b"42\\n")

async def main():
    soft, hard, count = map(int, sys.argv[2:])
    cells = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    async with await open_pool(backend=sys.argv[1]) as pool:
        if hard:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        try:
            for _ in range(count):
                cells.append(await pool.acquire())
        except SandboxUnavailable as error:
            print("unavailable:", "ulimit -Hn" in str(error))
            for _ in range(3):
                await cells.pop().close()
        print(len(cells) > 20, await alive(cells) == len(cells), len(pool.hosts))

asyncio.run(main())
"""


def acquire(backend: BackendName, count: int, *, soft: int, hard: int = 0) -> list[str]:
    """What a process says that acquires so many cells. Before it opens its pool it may open ``soft`` files and raise
    that; after, no more than ``hard``."""
    command = [sys.executable, "-c", textwrap.dedent(_ACQUIRE), backend, str(soft), str(hard), str(count)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_soft_limit_of_open_files_is_no_limit_of_cells(backend: BackendName) -> None:
    assert acquire(backend, 60, soft=48) == ["True True 1"]


def test_an_owner_that_is_out_of_descriptors_is_told_so_and_its_cells_live_on(backend: BackendName) -> None:
    assert acquire(backend, 60, soft=48, hard=56) == ["unavailable: True", "True True 1"]


@pytest.mark.soak
def test_cells_live_many_to_a_host(backend: BackendName, soak_factor: int) -> None:
    cells = 60 * soak_factor
    assert acquire(backend, cells, soft=128) == [f"True True {-(-cells // 256)}"]
