"""Podman's API service dies, hangs, is stopped or runs out of descriptors: the next call finds another one, and the
cells notice nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from palaestra.envs.errors import SandboxBusy, SandboxUnavailable
from palaestra.envs.sandboxes import BackendName, Python, Shell, open_pool
from palaestra.envs.sandboxes.host import HOST_STARTS
from palaestra.envs.sandboxes.podman import service as podman_service
from palaestra.envs.sandboxes.podman.backend import PodmanBackend
from palaestra.envs.sandboxes.podman.command import PodmanFailed, run_podman
from palaestra.envs.sandboxes.podman.service import PodmanService
from palaestra.envs.sandboxes.pool import Pool
from palaestra.envs.sandboxes.processes import children
from palaestra.envs.sandboxes.protocol import SandboxSpec

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.parametrize("backend", ["podman"], indirect=True, scope="session"),
]
ALIVE = Python("print('alive')", "fork")


@pytest_asyncio.fixture(loop_scope="session")
async def service(backend: BackendName) -> AsyncIterator[PodmanService]:
    made = PodmanBackend(SandboxSpec())
    yield made.service
    await made.close()


def process_of(service: PodmanService) -> int:
    """The process that serves: Podman's own, or where that had to make a user namespace first, the child in it."""
    assert service._process is not None
    return next(iter(children(service._process.pid)), service._process.pid)


def version(client: Any) -> str:
    return str(client.version()["Version"])


async def works(pool: Pool) -> bool:
    sandbox = await pool.acquire()
    try:
        return (await sandbox.run(ALIVE, timeout_s=20)).stdout == b"alive\n"
    finally:
        await sandbox.close()


def kill(machine: Any, pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    assert machine.holds_within(lambda: not machine.runs(pid), 30)


def stop(machine: Any, pid: int) -> None:
    machine.stop(pid)


def take_its_descriptors(machine: Any, pid: int) -> None:
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, 3))


@pytest.mark.parametrize("harm", [kill, stop, take_its_descriptors])
async def test_a_service_that_fails_is_replaced_and_cells_notice_nothing(
    backend: BackendName, harm: Any, machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with await open_pool(backend=backend, cells_per_host=1) as pool:
        service: PodmanService = pool.backend.service  # type: ignore[attr-defined]
        sandbox = await pool.acquire()
        running = asyncio.create_task(sandbox.run(Shell("sleep 0.5; echo undisturbed"), timeout_s=60))
        harmed = process_of(service)
        harm(machine, harmed)
        with monkeypatch.context() as patch:
            patch.setattr(podman_service, "_PING_S", 1.0)
            assert await works(pool), "a host was started through another service"
        assert process_of(service) != harmed
        assert not machine.runs(harmed)
        assert (await running).stdout == b"undisturbed\n"
        await sandbox.close()
        assert len(pool.hosts) == 2


async def test_a_call_that_hangs_ends_at_its_deadline_and_blocks_no_other(service: PodmanService, machine: Any) -> None:
    await service.call(version)
    first = process_of(service)
    stopped = threading.Event()

    def hang(client: Any) -> None:
        machine.stop(first)
        stopped.set()
        client.version()

    hanging = asyncio.create_task(service.call(hang, timeout_s=1.0))
    await asyncio.to_thread(stopped.wait, 30)
    others = [asyncio.create_task(service.call(version)) for _ in range(2 * HOST_STARTS)]
    with pytest.raises(SandboxBusy):
        await hanging
    for outcome in await asyncio.gather(*others, return_exceptions=True):
        assert isinstance(outcome, str | SandboxBusy)
    assert await service.call(version)
    assert process_of(service) != first


async def test_a_cancelled_caller_waits_for_the_end_of_its_call(service: PodmanService) -> None:
    await service.call(version)
    begun, ended = threading.Event(), threading.Event()

    def work(client: Any) -> None:
        begun.set()
        time.sleep(0.3)
        ended.set()

    call = asyncio.create_task(service.call(work))
    await asyncio.to_thread(begun.wait, 30)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert ended.is_set()


@pytest.mark.parametrize(("repeatable", "attempts"), [(False, 1), (True, 3)])
async def test_a_locked_database_is_busy_and_only_what_is_repeatable_is_repeated(
    service: PodmanService, repeatable: bool, attempts: int
) -> None:
    from podman.errors import APIError

    made = []

    def refuse(client: Any) -> None:
        made.append(client)
        raise APIError("500 Server Error: database is locked")

    with pytest.raises(SandboxBusy, match="database is locked"):
        await service.call(refuse, repeatable=repeatable)
    assert len(made) == attempts


async def test_what_podman_refuses_for_good_is_not_repeated(service: PodmanService) -> None:
    from podman.errors import APIError

    made = []

    def refuse(client: Any) -> None:
        made.append(client)
        raise APIError("500 Server Error: no such image")

    with pytest.raises(SandboxUnavailable, match="no such image") as raised:
        await service.call(refuse, repeatable=True)
    assert (len(made), raised.type) == (1, SandboxUnavailable)


async def test_calls_run_a_few_at_a_time_and_no_more(service: PodmanService) -> None:
    lock, under_way, most = threading.Lock(), 0, 0

    def work(client: Any) -> None:
        nonlocal under_way, most
        with lock:
            under_way += 1
            most = max(most, under_way)
        time.sleep(0.05)
        with lock:
            under_way -= 1

    await asyncio.gather(*(service.call(work) for _ in range(4 * HOST_STARTS)))
    assert 1 < most <= HOST_STARTS


async def test_a_command_that_hangs_is_killed_at_its_deadline(
    service: PodmanService, tmp_path: Path, machine: Any
) -> None:
    hanging = ("system", "service", "--time=0", f"unix://{tmp_path}/socket")
    with pytest.raises(PodmanFailed, match="did not end within"):
        await run_podman(*hanging, timeout_s=1.0, on_line=lambda line: None)
    assert machine.holds_within(lambda: not machine.processes_with(f"{tmp_path}/socket"), 10)


async def test_each_container_has_one_conmon_no_exec_session_and_no_volume(backend: BackendName, machine: Any) -> None:
    async with await open_pool(backend=backend, cells_per_host=1) as pool:
        cells = [await pool.acquire() for _ in range(3)]
        for cell in cells:
            for _ in range(5):
                assert (await cell.run(ALIVE, timeout_s=20)).ok
        names = [host.name for host in pool.hosts]  # type: ignore[attr-defined]
        lines = machine.podman("inspect", "--format", "{{.ExecIDs}} {{range .Mounts}}{{.Type}} {{end}}", *names)
        assert [line.split()[0] for line in lines.splitlines()] == ["[]"] * 3
        assert {kind for line in lines.splitlines() for kind in line.split()[1:]} == {"bind"}
        ids = machine.podman("inspect", "--format", "{{.Id}}", *names).split()
        assert [len(conmons(machine, container)) for container in ids] == [1, 1, 1]
        for cell in cells:
            await cell.close()
    assert machine.holds_within(lambda: not any(conmons(machine, container) for container in ids), 20)


def conmons(machine: Any, container: str) -> list[int]:
    return machine.processes_with(f"conmon\0--api-version\0001\0-c\0{container}")  # type: ignore[no-any-return]


async def test_a_container_without_its_conmon_serves_on_and_is_removed(backend: BackendName, machine: Any) -> None:
    async with await open_pool(backend=backend) as pool:
        name = pool.hosts[0].name  # type: ignore[attr-defined]
        os.kill(int(machine.podman("inspect", "--format", "{{.State.ConmonPid}}", name)), signal.SIGKILL)
        assert await works(pool)
    assert name not in machine.podman("ps", "--all", "--format", "{{.Names}}").split()


async def test_a_container_with_an_exec_session_that_was_killed_is_removed(backend: BackendName, machine: Any) -> None:
    async with await open_pool(backend=backend) as pool:
        name = pool.hosts[0].name  # type: ignore[attr-defined]
        client = await asyncio.create_subprocess_exec("podman", "exec", name, "sleep", "300")
        try:
            async with asyncio.timeout(60):
                while machine.podman("inspect", "--format", "{{.ExecIDs}}", name).strip() == "[]":  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        finally:
            with contextlib.suppress(ProcessLookupError):
                client.kill()
            await client.wait()
    assert name not in machine.podman("ps", "--all", "--format", "{{.Names}}").split()


async def test_pools_of_one_process_share_one_image(backend: BackendName, machine: Any) -> None:
    before = set(machine.podman("images", "--quiet", "--no-trunc").split())
    async with await open_pool(backend=backend) as first, await open_pool(backend=backend) as second:
        names = [pool.hosts[0].name for pool in (first, second)]  # type: ignore[attr-defined]
        assert len(set(machine.podman("inspect", "--format", "{{.Image}}", *names).split())) == 1
    assert set(machine.podman("images", "--quiet", "--no-trunc").split()) == before
