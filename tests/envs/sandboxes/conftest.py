"""A pool whose cells have small limits, so that a test reaches them quickly, on each backend in turn; and what tests
see and do from outside of sandboxes.

Pool and sandboxes live in the session's event loop: ``pytestmark = pytest.mark.asyncio(loop_scope="session")``.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from palaestra.envs.sandboxes import BackendName, ExecResult, Python, Sandbox, SandboxSpec, Shell, leases, open_pool
from palaestra.envs.sandboxes.bubblewrap import BubblewrapHost
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


class Machine:
    """Processes and containers, as somebody outside of Palaestra sees them."""

    def podman(self, *arguments: str) -> str:
        command = ["podman", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout

    def supervisor(self, host: Any) -> int:
        """Process id of a host's supervisor."""
        if isinstance(host, BubblewrapHost):
            status = next(
                path for path in Path("/proc").glob("[0-9]*/status") if f"\nPPid:\t{host.pid}\n" in self._text(path)
            )
            return int(status.parent.name)
        return int(self.podman("inspect", "--format", "{{.State.Pid}}", host.name))

    def kill(self, host: Any) -> None:
        """End a host from outside, as the kernel's out-of-memory killer would."""
        os.kill(host.pid if isinstance(host, BubblewrapHost) else self.supervisor(host), signal.SIGKILL)

    def processes_with(self, marker: str) -> list[int]:
        """Processes whose command line, or list of mounts, holds the marker; zombies have neither."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            if int(folder.name) != os.getpid():
                text = self._text(folder / "cmdline") + self._text(folder / "mountinfo")
                if marker in text:
                    found.append(int(folder.name))
        return found

    def stop(self, pid: int) -> None:
        """Stop a process, and return when all its threads stand still: the signal alone takes effect a little later."""
        os.kill(pid, signal.SIGSTOP)

        def stands_still() -> bool:
            threads = [self._text(stat) for stat in Path(f"/proc/{pid}/task").glob("*/stat")]
            return all(text.rpartition(")")[2].split()[:1] == ["T"] for text in threads)

        assert self.holds_within(stands_still, 30)

    def runs(self, pid: int) -> bool:
        """Whether there is such a process; a zombie is none."""
        return bool(self._text(Path(f"/proc/{pid}/cmdline")))

    def holds_within(self, condition: Callable[[], bool], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def containers_of(self, base: Path) -> list[str]:
        """Names of the containers whose lease lies in that folder."""
        if os.getuid() == 0 or shutil.which("podman") is None:
            return []
        listing = '{{.Names}}\t{{index .Labels "palaestra.lease"}}'
        lines = self.podman("ps", "--all", "--filter", "label=palaestra.lease", "--format", listing).splitlines()
        return [line.partition("\t")[0] for line in lines if line.partition("\t")[2].startswith(f"{base}/")]

    def nothing_is_left_of(self, base: Path, *, within_s: float = 20) -> bool:
        """Whether neither a process, nor a folder, nor a container of those who use this base folder is left."""

        def nothing() -> bool:
            return not any(base.iterdir()) and not self.processes_with(base.name) and not self.containers_of(base)

        return self.holds_within(nothing, within_s)

    def _text(self, path: Path) -> str:
        try:
            return path.read_text("utf-8", "replace")
        except OSError:
            return ""


@pytest.fixture(scope="session")
def machine() -> Machine:
    return Machine()


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A base folder of this test alone, so that all that it leaves, and nothing of others, is seen."""
    folder = Path(tempfile.mkdtemp(prefix="pal-", dir="/tmp"))
    folder.chmod(0o711)
    monkeypatch.setattr(leases, "base_folder", lambda: folder)
    monkeypatch.setattr(leases, "base_folders", lambda: [folder])
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest_asyncio.fixture(loop_scope="session")
async def own_pool(backend: BackendName) -> AsyncIterator[Pool]:
    """A pool of this test alone, whose hosts it may break."""
    async with await open_pool(backend=backend, cells_per_host=8) as opened:
        yield opened


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
