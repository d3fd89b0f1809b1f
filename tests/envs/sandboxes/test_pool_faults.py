"""Hosts that fail in every way: they get no more cells and are replaced, and cells of others notice nothing."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import resource
import signal
import zipfile
from collections.abc import Callable
from typing import Any

import pytest

from palaestra.envs.errors import SandboxBusy, SandboxDied
from palaestra.envs.sandboxes import BackendName, Python, Shell, bubblewrap, open_pool
from palaestra.envs.sandboxes import host as host_module
from palaestra.envs.sandboxes.bundle import supervisor_zip
from palaestra.envs.sandboxes.cell import open_cell
from palaestra.envs.sandboxes.connection import Connection
from palaestra.envs.sandboxes.podman import backend as podman
from palaestra.envs.sandboxes.pool import Pool
from palaestra.envs.sandboxes.supervisor.frames import encode

pytestmark = pytest.mark.asyncio(loop_scope="session")
ALIVE = Python("print('alive')", "fork")


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.01)


async def test_a_host_whose_supervisor_breaks_the_protocol_gets_no_more_cells_and_goes_with_its_last(
    own_pool: Pool,
) -> None:
    culprit, sibling = await own_pool.acquire(), await own_pool.acquire()
    host = own_pool.hosts[0]
    running = asyncio.create_task(culprit.run(Shell("sleep 60"), timeout_s=90))
    await asyncio.sleep(0.1)
    culprit._connection.data_received(b"HTTP/1.1 200 OK\r\n\r\n")
    with pytest.raises(SandboxDied, match="broke the protocol"):
        await running
    assert host not in own_pool.hosts
    other = await own_pool.acquire()
    assert own_pool.metrics().hosts == 2
    for cell in (sibling, other):
        assert (await cell.run(ALIVE, timeout_s=10)).stdout == b"alive\n"
    await culprit.close()
    await sibling.close()
    await until(lambda: own_pool.metrics().hosts == 1)
    assert not host.socket.exists()
    assert own_pool.metrics().hosts_retired == {"protocol": 1}
    await other.close()


async def test_a_reply_that_is_too_large_is_the_programs_doing_and_costs_no_host(own_pool: Pool) -> None:
    sandbox = await own_pool.acquire()
    running = asyncio.create_task(sandbox.run(Shell("sleep 60"), timeout_s=90))
    await asyncio.sleep(0.1)
    sandbox._connection.data_received(encode({}, (bytes(8 << 20),)))
    assert (await running).killed_by == "cell"
    assert (len(own_pool.hosts), own_pool.metrics().hosts_retired) == (1, {})
    await sandbox.renew()
    assert (await sandbox.run(ALIVE, timeout_s=10)).ok
    await sandbox.close()


async def test_a_supervisor_killed_by_sigkill_takes_its_cells_and_is_replaced(own_pool: Pool, machine: Any) -> None:
    victim = await own_pool.acquire()
    first = own_pool.hosts[0]
    os.kill(machine.supervisor(first), signal.SIGKILL)
    with pytest.raises(SandboxDied):
        await victim.run(Shell("sleep 60"), timeout_s=90)
    await victim.close()
    successor = await own_pool.acquire()
    assert (await successor.run(ALIVE, timeout_s=10)).ok
    await until(lambda: own_pool.metrics().hosts == 1)
    assert own_pool.metrics().hosts_retired == {"failed": 1}
    assert not first.socket.exists()
    await successor.close()


async def test_a_stopped_supervisor_keeps_its_cells_and_gets_no_more(
    own_pool: Pool, machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_module, "_REPLY_S", 1.0)
    sibling = await own_pool.acquire()
    first = own_pool.hosts[0]
    supervisor = machine.supervisor(first)
    machine.stop(supervisor)
    try:
        assert not await own_pool.fleet.judge(own_pool.fleet.slots[0])
        other = await own_pool.acquire()
        assert own_pool.hosts[0] is not first
        for cell in (sibling, other):
            assert (await cell.run(ALIVE, timeout_s=10)).ok
        await sibling.close()
        await until(lambda: own_pool.metrics().hosts == 1)
        await other.close()
    finally:
        with contextlib.suppress(ProcessLookupError):  # it was ended with its host, as it should be
            os.kill(supervisor, signal.SIGCONT)
    assert own_pool.metrics().hosts_retired == {"failed": 1}


async def test_a_process_without_file_descriptors_says_so_and_loses_no_host(own_pool: Pool) -> None:
    host = own_pool.hosts[0]
    in_use = await own_pool.acquire()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, soft), hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        with pytest.raises(SandboxBusy, match="ulimit -Hn"):
            await own_pool.acquire()
        with contextlib.suppress(SandboxBusy):  # where the cell has a control group, which is read after each run
            assert (await in_use.run(ALIVE, timeout_s=10)).ok
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert own_pool.hosts == (host,)
    sandbox = await own_pool.acquire()
    for cell in (in_use, sandbox):
        assert (await cell.run(ALIVE, timeout_s=10)).ok
        await cell.close()


def impatient_supervisor_zip() -> bytes:
    """The supervisor with a tenth of the patience for a connection's first words."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(supervisor_zip())) as intact, zipfile.ZipFile(buffer, "w") as changed:
        for name in intact.namelist():
            text = intact.read(name).decode()
            assert not name.endswith("/main.py") or "_FIRST_FRAME_S = 10\n" in text
            changed.writestr(name, text.replace("_FIRST_FRAME_S = 10\n", "_FIRST_FRAME_S = 1\n"))
    return buffer.getvalue()


async def test_a_connection_that_never_says_what_it_is_for_is_dropped_and_hinders_nobody(
    backend: BackendName, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (bubblewrap, podman):
        monkeypatch.setattr(module, "supervisor_zip", impatient_supervisor_zip)
    async with await open_pool(backend=backend) as pool:
        silent = [await Connection.open(pool.hosts[0].socket) for _ in range(20)]
        sandbox = await pool.acquire()
        assert (await sandbox.run(ALIVE, timeout_s=10)).ok
        await until(lambda: all(connection.lost for connection in silent))
        assert (await sandbox.run(ALIVE, timeout_s=10)).ok
        await sandbox.close()


async def test_a_dropped_connection_frees_its_cell_at_once(own_pool: Pool, machine: Any) -> None:
    host = own_pool.hosts[0]
    marker = f"16{os.getpid()}.1803"
    connection = await open_cell(host, own_pool.spec)
    request = {"op": "run", "kind": "argv", "timeout_s": 600, "env": {}, "result_bytes": 0, "stdin_bytes": 0}
    running = asyncio.create_task(connection.request({**request, "argv": ["sleep", marker]}, (b"",), timeout_s=600))
    await until(lambda: len(machine.processes_with(f"sleep\0{marker}")) == 1)
    connection.close()
    with pytest.raises(SandboxDied):
        await running
    await until(lambda: not machine.processes_with(f"sleep\0{marker}"))
