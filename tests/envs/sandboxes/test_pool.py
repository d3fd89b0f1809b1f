"""Hosts and cells come and go; what a pool promises holds throughout."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest

from palaestra.envs.errors import SandboxDied, SandboxUnavailable, UsageError
from palaestra.envs.sandboxes import BackendName, Python, SandboxSpec, Shell, bubblewrap, open_pool
from palaestra.envs.sandboxes.backends import candidates
from palaestra.envs.sandboxes.cell import Cell
from palaestra.envs.sandboxes.leases import Lease, base_folder
from palaestra.envs.sandboxes.podman import backend as podman
from palaestra.envs.sandboxes.pool import Pool

pytestmark = pytest.mark.asyncio(loop_scope="session")
ALIVE = Python("print('alive')", "fork")


async def test_sixty_four_cells_at_once_each_see_only_themselves(pool: Pool) -> None:
    async def episode(number: int) -> bytes:
        sandbox = await pool.acquire()
        try:
            await sandbox.write({"mine": str(number).encode()})
            code = (
                "import os\nprint(open('mine').read(), os.listdir('.'), sum(n.isdigit() for n in os.listdir('/proc')))"
            )
            return (await sandbox.run(Python(code, "fork"), timeout_s=30)).stdout
        finally:
            await sandbox.close()

    outputs = await asyncio.gather(*(episode(number) for number in range(64)))
    assert outputs == [f"{number} ['mine'] 1\n".encode() for number in range(64)]
    assert pool.live_cells == 0


async def test_each_cell_has_its_own_process_budget(pool: Pool) -> None:
    cells = [await pool.acquire() for _ in range(3)]
    try:
        bomb = (
            "import os, time\nn = 0\ntry:\n  while True:\n    if os.fork() == 0: time.sleep(1.5)\n    n += 1\n"
            "except OSError: print(n); time.sleep(1)"
        )
        results = await asyncio.gather(*(cell.run(Python(bomb, "fork"), timeout_s=20) for cell in cells))
        # 33 processes, less the cell's init and the program; one that has just ended may still be counted for a while.
        assert all(30 <= int(result.stdout) <= 31 for result in results), results
    finally:
        for cell in cells:
            await cell.close()


async def test_a_cell_that_is_closed_ends_with_its_processes(pool: Pool, machine: Any) -> None:
    marker = f"31{os.getpid()}.4159"
    sandbox = await pool.acquire()
    running = asyncio.create_task(sandbox.run(Shell(f"sleep {marker} & sleep {marker}"), timeout_s=60))
    for _ in range(200):
        if len(machine.processes_with(f"sleep\0{marker}")) >= 2:
            break
        await asyncio.sleep(0.02)
    assert len(machine.processes_with(f"sleep\0{marker}")) == 2
    running.cancel()
    await asyncio.wait([running])
    await sandbox.close()
    assert machine.holds_within(lambda: not machine.processes_with(f"sleep\0{marker}"), 10)


async def test_hosts_are_added_when_the_others_are_full(own_pool: Pool) -> None:
    cells = [await own_pool.acquire() for _ in range(9)]
    assert len(own_pool.hosts) == 2
    for cell in cells:
        await cell.close()
    assert own_pool.live_cells == 0


async def test_a_host_killed_in_the_middle_of_a_run_is_replaced_and_blamed(own_pool: Pool, machine: Any) -> None:
    victim = await own_pool.acquire()
    running = asyncio.create_task(victim.run(Shell("sleep 60"), timeout_s=90))
    await asyncio.sleep(0.3)
    machine.kill(own_pool.hosts[0])
    with pytest.raises(SandboxDied):
        await running
    with pytest.raises(SandboxDied):
        await victim.renew()
    await victim.close()
    successor = await own_pool.acquire()
    assert (await successor.run(ALIVE, timeout_s=10)).stdout == b"alive\n"
    assert len(own_pool.hosts) == 1
    await successor.close()


async def test_a_warm_cell_whose_host_died_is_never_handed_out(backend: BackendName, machine: Any) -> None:
    async with await open_pool(backend=backend, warm=2) as pool:
        await pool.warmed_up()
        machine.kill(pool.hosts[0])
        await asyncio.sleep(0.2)
        sandbox = await pool.acquire()
        assert (await sandbox.run(ALIVE, timeout_s=10)).stdout == b"alive\n"
        await sandbox.close()


async def test_warm_cells_are_refilled_and_each_is_handed_out_once(backend: BackendName) -> None:
    async with await open_pool(backend=backend, warm=3) as pool:
        cells = []
        for number in range(8):
            cells.append(await pool.acquire())
            await cells[-1].write({str(number): b""})
        for number, cell in enumerate(cells):
            assert (await cell.run(Shell("ls"), timeout_s=10)).stdout == f"{number}\n".encode()
        for cell in cells:
            await cell.close()


async def test_a_cancelled_acquire_leaves_nothing(own_pool: Pool) -> None:
    for delay_ms in range(8):
        task = asyncio.create_task(own_pool.acquire())
        await asyncio.sleep(delay_ms / 1000)
        task.cancel()
        try:
            await (await task).close()
        except asyncio.CancelledError:
            pass
    assert own_pool.live_cells == 0
    sandbox = await own_pool.acquire()
    assert (await sandbox.run(ALIVE, timeout_s=10)).ok
    await sandbox.close()


async def test_a_cancelled_run_cannot_lend_its_answer_to_the_next(own_pool: Pool) -> None:
    sandbox = await own_pool.acquire()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await sandbox.run(Shell("sleep 0.3; echo late"), timeout_s=10)
    assert sandbox.broken
    await sandbox.renew()
    assert (await sandbox.run(Shell("echo mine"), timeout_s=10)).stdout == b"mine\n"
    await sandbox.close()


async def test_a_cell_that_its_program_broke_is_the_agents_doing_until_renewed(own_pool: Pool) -> None:
    sandbox = await own_pool.acquire()
    sandbox._connection.close()  # what the owner sees when the first process of a cell is gone
    assert sandbox.broken
    result = await sandbox.run(ALIVE, timeout_s=5)
    assert (result.killed_by, result.ok) == ("cell", False)
    assert (await sandbox.run(ALIVE, timeout_s=5)).killed_by == "cell"
    assert sandbox.broken
    await sandbox.renew()
    assert not sandbox.broken
    assert (await sandbox.run(ALIVE, timeout_s=5)).ok
    await sandbox.close()


async def test_closing_a_pool_ends_its_cells_and_leaves_no_folder(backend: BackendName) -> None:
    pool = await open_pool(backend=backend)
    folder = pool.hosts[0].socket.parent.parent
    assert folder.parent == base_folder()
    sandbox = await pool.acquire()
    await pool.close()
    await pool.close()
    with pytest.raises(SandboxDied):
        await sandbox.run(ALIVE, timeout_s=5)
    with pytest.raises(SandboxUnavailable, match="closed"):
        await pool.acquire()
    assert not folder.exists()
    assert not folder.with_name(f"{folder.name}.lease").exists()


async def test_closing_a_pool_while_cells_are_acquired_leaves_no_host(
    backend: BackendName, machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    leases: list[Lease] = []

    class RecordedLease(Lease):
        def __init__(self, kind: str) -> None:
            super().__init__(kind)
            leases.append(self)

    monkeypatch.setattr(bubblewrap, "Lease", RecordedLease)
    monkeypatch.setattr(podman, "Lease", RecordedLease)
    for delay_ms in (0, 5, 20, 60):
        pool = await open_pool(backend=backend, cells_per_host=8)
        acquiring = [asyncio.create_task(pool.acquire()) for _ in range(40)]
        await asyncio.sleep(delay_ms / 1000)
        await pool.close()
        outcomes = await asyncio.gather(*acquiring, return_exceptions=True)
        expected = (Cell, SandboxUnavailable, SandboxDied)
        assert [outcome for outcome in outcomes if not isinstance(outcome, expected)] == []
        assert pool.hosts == ()
    assert [lease.folder for lease in leases if lease.folder.exists() or lease.file.exists()] == []
    assert machine.holds_within(lambda: not any(machine.processes_with(lease.name) for lease in leases), 10)


async def test_a_stage_of_closing_that_fails_does_not_stop_the_others(
    backend: BackendName, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = await open_pool(backend=backend, cells_per_host=1)
    await asyncio.gather(pool.acquire(), pool.acquire())
    first, second = pool.hosts
    really_close = first.close

    async def fail() -> None:
        await really_close()
        raise RuntimeError("injected")

    monkeypatch.setattr(first, "close", fail)
    with pytest.raises(RuntimeError, match="injected"):
        await pool.close()
    assert not await second.healthy()


async def test_preloaded_modules_are_there_in_a_forked_interpreter(backend: BackendName) -> None:
    async with await open_pool(SandboxSpec(preload=("statistics",)), backend=backend) as pool:
        sandbox = await pool.acquire()
        result = await sandbox.run(Python("import sys\nprint('statistics' in sys.modules)", "fork"), timeout_s=5)
        assert result.stdout == b"True\n"
        await sandbox.close()


async def test_a_module_that_cannot_be_preloaded_is_named(backend: BackendName) -> None:
    with pytest.raises(SandboxUnavailable, match="no_such_module"):
        await open_pool(SandboxSpec(preload=("no_such_module",)), backend=backend)


async def test_the_environment_variable_chooses_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PALAESTRA_SANDBOX", raising=False)
    assert candidates("auto") == ("podman", "bubblewrap")
    monkeypatch.setenv("PALAESTRA_SANDBOX", "bubblewrap")
    assert candidates("auto") == ("bubblewrap",)
    assert candidates("podman") == ("podman",)
    monkeypatch.setenv("PALAESTRA_SANDBOX", "docker")
    with pytest.raises(UsageError, match="docker"):
        candidates("auto")
