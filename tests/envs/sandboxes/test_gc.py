"""Owners that are killed: their hosts die with them, ``palaestra gc`` or the next start removes the rest, and what
others own is left alone."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from palaestra.cli import app
from palaestra.envs.sandboxes import BackendName, Python, open_pool
from palaestra.envs.sandboxes.host import connect_lifeline
from palaestra.envs.sandboxes.reap import reap

pytestmark = pytest.mark.asyncio(loop_scope="session")

_OWNER = """
import asyncio, sys
from pathlib import Path
from palaestra.envs.sandboxes import Shell, leases, open_pool
backend, base, marker = sys.argv[1:]
leases.base_folder = lambda: Path(base)
leases.base_folders = lambda: [Path(base)]
async def main():
    print("opening", flush=True)
    pool = await open_pool(backend=backend, warm=2)
    sandbox = await pool.acquire()
    print("acquired", flush=True)
    await sandbox.run(Shell(f"sleep {marker} & setsid sleep {marker}"), timeout_s=600)
asyncio.run(main())
"""


@contextmanager
def an_owner(backend: BackendName, base: Path, marker: str, *, until: str) -> Iterator[subprocess.Popen[str]]:
    """Another process that uses a sandbox; killed by SIGKILL at the end of the block, if not before."""
    command = [sys.executable, "-c", _OWNER, backend, str(base), marker]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        try:
            assert owner.stdout is not None
            while owner.stdout.readline().strip() != until:
                assert owner.poll() is None
            yield owner
        finally:
            owner.kill()


def gc(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["gc", *arguments], env={"COLUMNS": "200"})


async def next_start(backend: BackendName) -> None:
    await (await open_pool(backend=backend)).close()


async def test_an_owner_killed_by_sigkill_takes_its_cells_along_and_the_next_start_removes_the_rest(
    backend: BackendName, base: Path, machine: Any
) -> None:
    marker = f"27{os.getpid()}.1828"
    with an_owner(backend, base, marker, until="acquired"):
        assert machine.holds_within(lambda: len(machine.processes_with(f"sleep\0{marker}")) == 2, 20)
    assert machine.holds_within(lambda: not machine.processes_with(f"sleep\0{marker}"), 10)
    kind = {"podman": "podman", "bubblewrap": "bwrap"}[backend]
    assert machine.holds_within(lambda: not machine.processes_with(f"{base.name}/{kind}-"), 10)
    assert entries_of(base), "what no process was left to remove"
    await next_start(backend)
    assert machine.nothing_is_left_of(base, within_s=10)


async def test_gc_lists_and_removes_what_a_killed_owner_left_and_leaves_a_living_ones_alone(
    backend: BackendName, base: Path, machine: Any
) -> None:
    async with await open_pool(backend=backend) as mine:
        sandbox = await mine.acquire()
        kept = entries_of(base)
        with an_owner(backend, base, "600", until="acquired"):
            left = entries_of(base) - kept
        folders = {entry for entry in left if not entry.endswith(".lease")}
        listed = await asyncio.to_thread(gc, "--dry-run")
        assert listed.exit_code == 0, listed.output
        assert all(f"would remove folder {base}/{folder}\n" in listed.output for folder in folders)
        assert entries_of(base) == kept | left
        removed = await asyncio.to_thread(gc)
        assert removed.exit_code == 0, removed.output
        assert all(f"removed folder {base}/{folder}\n" in removed.output for folder in folders)
        assert not any(entry in removed.output for entry in kept)
        assert "hosts of runs that live" in removed.output
        assert entries_of(base) == kept
        assert (await sandbox.run(Python("print('mine')", "fork"), timeout_s=20)).stdout == b"mine\n"
        await sandbox.close()
    assert machine.nothing_is_left_of(base)


async def test_a_dry_run_counts_an_api_service_once(base: Path) -> None:
    name = "service-0123456789ab"
    (base / name).mkdir()
    (base / f"{name}.lease").touch()
    left = subprocess.Popen(["podman", "-c", "read line", name], executable="/bin/sh", stdin=subprocess.PIPE)  # noqa: ASYNC220
    try:
        found = await reap(dry_run=True)
        assert found.processes == 1
        assert left.poll() is None
        ended = asyncio.create_task(asyncio.to_thread(left.wait, 60))
        assert (await reap()).processes == 1
        assert await ended < 0
    finally:
        left.kill()
        left.communicate(timeout=20)
    assert not any(name in entry for entry in entries_of(base))


def entries_of(base: Path) -> set[str]:
    return {entry.name for entry in base.iterdir()}


@pytest.mark.soak
async def test_an_owner_killed_at_any_moment_leaves_nothing_and_another_is_undisturbed(
    backend: BackendName, base: Path, machine: Any, soak_factor: int
) -> None:
    moments = random.Random(5)
    async with await open_pool(backend=backend) as mine:
        sandbox = await mine.acquire()
        entries, containers = entries_of(base), machine.containers_of(base)
        for number in range(2 * soak_factor):
            with an_owner(backend, base, "600", until="opening"):
                await asyncio.sleep(moments.uniform(0, 1))
            if number % 2:
                assert (await asyncio.to_thread(gc)).exit_code == 0
            else:
                await next_start(backend)
            assert machine.holds_within(lambda: entries_of(base) == entries, 10)
            assert machine.containers_of(base) == containers
        assert (await sandbox.run(Python("print('mine')", "fork"), timeout_s=20)).stdout == b"mine\n"
        await sandbox.close()
    assert machine.nothing_is_left_of(base, within_s=10)


async def test_a_host_that_outlived_its_owner_is_killed(backend: BackendName, base: Path, machine: Any) -> None:
    """As one whose owner was killed after the host was started and before the two were connected."""
    async with await open_pool(backend=backend) as mine:
        host: Any = mine.hosts[0]
        folder = host.socket.parent.parent
        other = await connect_lifeline(host.socket, lambda: None)  # keeps it alive whatever its owner does
        os.close(host._lease._descriptor)  # as the kernel does when the owner dies
        host._lease._descriptor = -1
        done = await asyncio.to_thread(gc)
        assert done.exit_code == 0, done.output
        assert f"removed folder {folder}" in done.output
        assert machine.holds_within(lambda: not machine.processes_with(folder.name), 10)
        other.close()
    assert machine.nothing_is_left_of(base)


async def test_many_may_reap_at_once_and_each_thing_is_removed_by_one(base: Path, machine: Any) -> None:
    left = sorted(abandon(base, 200))
    outcomes = await asyncio.gather(*(asyncio.to_thread(lambda: asyncio.run(reap())) for _ in range(4)))
    assert sorted(folder for reaped in outcomes for folder in reaped.folders) == left
    assert machine.nothing_is_left_of(base)


def abandon(base: Path, count: int) -> list[str]:
    """Leases that nobody holds, with their folders."""
    folders = [base / f"bwrap-{number:012x}" for number in range(count)]
    for folder in folders:
        folder.mkdir()
        Path(f"{folder}.lease").touch()
    return [str(folder) for folder in folders]
