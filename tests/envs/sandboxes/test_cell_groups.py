"""Memory, processes and CPU of a whole cell, bounded by control groups, and no group left behind.

Where none are delegated to us these tests are skipped, unless PALAESTRA_REQUIRE_CONTROL_GROUPS is set, as CI does
wherever root could delegate them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from palaestra.envs.errors import CellFull, SandboxDied, SandboxUnavailable
from palaestra.envs.sandboxes import BackendName, Python, Sandbox, SandboxSpec, Shell, cell_groups, open_pool
from palaestra.envs.sandboxes.cell_groups import (
    HostGroups,
    limits,
    open_groups,
    remove_abandoned_groups,
    usable_controllers,
)
from palaestra.envs.sandboxes.cgroups import JOIN_FILE, Delegation, find_delegation, version_of
from palaestra.envs.sandboxes.pool import Pool

pytestmark = pytest.mark.asyncio(loop_scope="session")

SPEC = SandboxSpec(memory_mib=128, address_space_mib=4096, pids=40, file_mib=60)
NONE = Delegation(1, {}, "nothing is delegated", "ask root")
ALIVE = Python("print('alive')", "fork")
HOG = "x = []\nwhile True: x.append(b'x' * (1 << 20))"
MANY_HOGS = """
import os, time
ready, told = os.pipe()
go, release = os.pipe()
alive, waiting = set(), set()
for _ in range(20):
    child = os.fork()
    if child == 0:
        os.close(release)
        x = b'x' * (30 << 20)
        os.write(told, b'%8d' % os.getpid())
        os.read(go, 1)
        os._exit(0)
    alive.add(child)
os.set_blocking(ready, False)
while not alive <= waiting:
    try: waiting.add(int(os.read(ready, 8)))
    except BlockingIOError: time.sleep(0.01)
    child, status = os.waitpid(-1, os.WNOHANG)
    if child:
        alive.remove(child)
        assert status == 9, status
os.close(release)
print(20 - len(alive), len(alive))
"""


@pytest.fixture(scope="session")
def delegated() -> Delegation:
    found = find_delegation()
    if found.problem is not None:
        stop = pytest.fail if os.environ.get("PALAESTRA_REQUIRE_CONTROL_GROUPS") else pytest.skip
        stop(f"{found.problem}. {found.advice}")
    return found


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def bounded(backend: BackendName, delegated: Delegation) -> AsyncIterator[Pool]:
    async with await open_pool(SPEC, backend=backend) as opened:
        yield opened


@pytest_asyncio.fixture(loop_scope="session")
async def cell(bounded: Pool) -> AsyncIterator[Sandbox]:
    acquired = await bounded.acquire()
    yield acquired
    await acquired.close()


def groups_of(pool: Pool) -> HostGroups:
    (host,) = pool.hosts
    assert host.groups is not None
    return host.groups


def inner_groups(pool: Pool) -> list[Path]:
    return [path for folder in groups_of(pool).folders for path in folder.iterdir() if path.is_dir()]


def start_in(folder: Path, command: str) -> subprocess.Popen[bytes]:
    """A shell of this machine, in a session of its own, that joins a group and runs the command."""
    join = f'echo 0 > "$0/{JOIN_FILE[version_of(folder)]}"; {command}'
    return subprocess.Popen(["/bin/sh", "-c", join, str(folder)], stdout=subprocess.PIPE, start_new_session=True)


async def alive(sandbox: Sandbox) -> bool:
    return (await sandbox.run(ALIVE, timeout_s=20)).stdout == b"alive\n"


async def test_processes_that_together_exceed_the_memory_are_killed_and_nobody_else_notices(
    bounded: Pool, cell: Sandbox
) -> None:
    other = await bounded.acquire()
    await other.write({"kept": b"kept"})
    result = await cell.run(Python(MANY_HOGS, "fork"), timeout_s=120)
    killed, survived = map(int, result.stdout.split())
    assert killed >= 16  # at most four times 30 MiB fit in 128 MiB
    assert killed + survived == 20
    assert (result.oom_kills, result.killed_by, result.exit_code) == (killed, None, 0)
    assert await other.read("kept") == b"kept"
    assert await alive(other)
    assert await alive(cell)
    await other.close()


@pytest.mark.parametrize(
    "command",
    [Python(HOG, "fork"), Python(HOG), Shell(f'python3 -c "{HOG}"'), Shell(f'python3 -c "{HOG}"; exit $?')],
    ids=["forked", "new", "shell", "shell's last"],
)
async def test_a_command_that_uses_up_the_memory_is_killed_by_memory(cell: Sandbox, command: Python | Shell) -> None:
    result = await cell.run(command, timeout_s=60)
    assert (result.killed_by, result.exit_code, result.timed_out, result.ok) == ("memory", None, False, False)
    assert result.oom_kills == 1
    following = await cell.run(ALIVE, timeout_s=20)
    assert (following.stdout, following.killed_by, following.oom_kills) == (b"alive\n", None, 0)


async def test_a_command_that_outlives_its_killed_child_says_so(cell: Sandbox) -> None:
    result = await cell.run(Shell(f'python3 -c "{HOG}"; echo went on: $?'), timeout_s=60)
    assert (result.stdout, result.ok, result.killed_by, result.oom_kills) == (b"went on: 137\n", True, None, 1)


async def test_files_count_as_memory_and_a_cell_that_they_fill_is_full_until_renewed(cell: Sandbox) -> None:
    fill = (
        "for folder in ('/workspace', '/tmp', '/dev/shm'):\n  with open(folder + '/f', 'wb', buffering=0) as f:\n"
        "    for _ in range(50): f.write(bytes(1 << 20))"
    )
    result = await cell.run(Python(fill, "fork"), timeout_s=60)
    assert (result.killed_by, result.timed_out) == ("memory", False)
    with pytest.raises(CellFull, match=r"memory|broke"):
        await cell.write({"more": bytes(40 << 20)})
    await cell.renew()
    assert await alive(cell)


async def test_files_of_a_quarter_of_the_memory_can_be_written_packed_and_unpacked(cell: Sandbox) -> None:
    content = os.urandom(32 << 20)
    await cell.write({"large": content})
    await cell.renew(await cell.snapshot())
    assert await cell.read("large", max_bytes=len(content)) == content


async def test_programs_go_before_the_init_of_their_cell_which_would_take_it_along(cell: Sandbox) -> None:
    assert (await cell.run(Shell("cat /proc/self/oom_score_adj"), timeout_s=20)).stdout == b"1000\n"
    assert (await cell.run(Shell("cat /proc/1/oom_score_adj"), timeout_s=20)).stdout in (b"500\n", b"")  # or hidden


async def test_a_program_that_puts_its_cells_init_first_in_line_loses_its_cell_and_no_more(
    bounded: Pool, cell: Sandbox
) -> None:
    other = await bounded.acquire()
    code = f"try: open('/proc/self/oom_score_adj', 'w').write('0')\nexcept OSError: pass\n{MANY_HOGS}"
    result = await cell.run(Python(code, "fork"), timeout_s=60)
    assert (result.killed_by, result.timed_out, result.oom_kills > 0) == ("memory", False, True)
    assert cell.broken
    assert await alive(other)
    await cell.renew()
    assert await alive(cell)
    await other.close()


async def test_memory_that_ran_out_above_the_cell_is_not_the_agents_doing(
    backend: BackendName, delegated: Delegation
) -> None:
    async with await open_pool(SandboxSpec(memory_mib=512), backend=backend) as pool:
        sandbox = await pool.acquire()
        folder = groups_of(pool).folders[0]
        name = "memory.max" if version_of(folder) == 2 else "memory.limit_in_bytes"
        (folder / name).write_text(str(64 << 20))
        with pytest.raises(SandboxDied, match="within its own memory limit"):
            await sandbox.run(Python("x = [b'x' * (1 << 20) for _ in range(200)]", "fork"), timeout_s=60)
        await sandbox.close()


async def test_the_address_space_is_bounded_apart_from_the_memory(backend: BackendName, cell: Sandbox) -> None:
    code = Python("import resource\nprint(resource.getrlimit(resource.RLIMIT_AS)[1] >> 20)", "fork")
    assert (await cell.run(code, timeout_s=20)).stdout == b"4096\n"
    async with await open_pool(SandboxSpec(memory_mib=300), backend=backend) as pool:
        other = await pool.acquire()
        assert (await other.run(code, timeout_s=20)).stdout == b"300\n"
        await other.close()


async def test_the_number_of_processes_is_bounded_by_the_group_too(delegated: Delegation) -> None:
    """Without any RLIMIT_NPROC, which in a cell would be met first."""
    groups = HostGroups(f"pids-{os.getpid()}", SandboxSpec(pids=4), {"pids": delegated.controllers["pids"]})
    try:
        (folder,) = groups.make().folders
        code = (
            "import os, time\nmade = 0\ntry:\n  while made < 50:\n    if os.fork() == 0: time.sleep(100)\n"
            "    made += 1\nexcept BlockingIOError: pass\nprint(made, flush=True)\nos.kill(0, 9)"
        )
        process = start_in(folder, f"exec '{sys.executable}' -c '{code}'")
        made, _ = await asyncio.to_thread(process.communicate, timeout=60)
        assert made == b"5\n"  # with the first process 6: four, the init, and the one that makes it
    finally:
        await groups.close()
    assert not groups.folders[0].exists()


async def test_cpu_time_of_all_processes_together_is_bounded(backend: BackendName, delegated: Delegation) -> None:
    async with await open_pool(SandboxSpec(cpus=0.05), backend=backend) as pool:
        sandbox = await pool.acquire()
        busy = "import os, time\nos.fork()\nend = time.monotonic() + 2\nwhile time.monotonic() < end: pass"
        busy += "\ntry: os.wait()\nexcept ChildProcessError: pass"
        result = await sandbox.run(Python(busy, "fork"), timeout_s=60)
        assert result.exit_code == 0
        assert result.cpu_s < 0.15 * result.wall_s  # two busy processes get more than that even of a loaded machine
        await sandbox.close()


async def test_a_program_cannot_reach_a_control_group_let_alone_change_its_limits(bounded: Pool, cell: Sandbox) -> None:
    before = {path: path.read_text() for group in inner_groups(bounded) for path in group.glob("*.[lm][ia][mx]*")}
    before = {path: text for path, text in before.items() if "usage" not in path.name and "peak" not in path.name}
    code = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
os.makedirs("/tmp/m")
mounted = [kind for kind in (b"cgroup", b"cgroup2")
           if libc.mount(b"none", b"/tmp/m", kind, 0, b"memory" if kind == b"cgroup" else None) == 0]
written = []
for top in ("/sys", "/run", "/proc/1/root", "/proc/self/root/sys/fs", "/tmp/m"):
    for folder, _, names in os.walk(top):
        for name in names:
            if name in ("cgroup.procs", "tasks") or name.split(".")[0] in ("memory", "pids", "cpu", "cgroup"):
                try: os.close(os.open(os.path.join(folder, name), os.O_WRONLY)); written.append(folder + "/" + name)
                except OSError: pass
held = []
for pid in ("self", "1"):
    try: held += [os.readlink(f"/proc/{pid}/fd/{n}") for n in os.listdir(f"/proc/{pid}/fd")]
    except OSError: pass
print(mounted, written, [name for name in held if "cgroup" in name or "tasks" in name])
"""
    for interpreter in ("new", "fork"):
        result = await cell.run(Python(code, interpreter), timeout_s=60)  # type: ignore[arg-type]
        assert (result.stdout, result.stderr) == (b"[] [] []\n", b"")
        await cell.renew()
    assert before
    assert {path: path.read_text() for path in before if path.exists()}.items() <= before.items()


@pytest.mark.soak
@pytest.mark.timeout(900)
async def test_a_closed_cells_group_goes_with_one_of_the_next_and_the_last_with_the_pool(
    backend: BackendName, delegated: Delegation, soak_factor: int
) -> None:
    async with await open_pool(backend=backend) as pool:
        most = 0
        folders = groups_of(pool).folders
        for _ in range(50 * soak_factor):  # two cells each
            sandbox = await pool.acquire()
            await sandbox.renew()
            await sandbox.close()
            most = max(most, len(inner_groups(pool)) // len(folders))
        assert most < 30  # those that are still ending
        assert [folder for folder in folders if not folder.exists()] == []
        for _ in range(1200):  # the last ones go without a next cell, too
            if not inner_groups(pool):
                break
            await asyncio.sleep(0.05)
        assert inner_groups(pool) == []
    assert [folder for folder in folders if folder.exists()] == []


_OWNER = """
import asyncio, sys
from palaestra.envs.sandboxes import Shell, open_pool
async def main():
    pool = await open_pool(backend=sys.argv[1], warm=2)
    sandbox = await pool.acquire()
    print(*pool.hosts[0].groups.folders, flush=True)
    await sandbox.run(Shell("sleep 600"), timeout_s=600)
asyncio.run(main())
"""


def kill_an_owner(backend: BackendName) -> list[Path]:
    """Let a process use a sandbox, kill it with SIGKILL, and return the group folders that its host had."""
    with subprocess.Popen([sys.executable, "-c", _OWNER, backend], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        folders = [Path(name) for name in owner.stdout.readline().split()]
        owner.kill()
    return folders


async def test_what_an_owner_killed_by_sigkill_left_goes_with_the_next_start_and_the_living_keep_theirs(
    backend: BackendName, bounded: Pool, cell: Sandbox
) -> None:
    folders = await asyncio.to_thread(kill_an_owner, backend)
    assert folders
    assert [folder for folder in folders if not folder.exists()] == []
    living = inner_groups(bounded)
    async with await open_pool(backend=backend):
        assert [folder for folder in folders if folder.exists()] == []
    assert [group for group in living if not group.exists()] == []
    assert await alive(cell)


async def test_a_group_is_removed_once_its_owner_let_go_of_it(delegated: Delegation) -> None:
    groups = await open_groups(f"held-{os.getpid()}", SandboxSpec())
    assert groups is not None
    groups.make()
    assert not set(groups.folders) & set(await remove_abandoned_groups(delegated))
    for descriptor in groups._locks.values():
        os.close(descriptor)
    groups._locks.clear()
    assert set(groups.folders) <= set(await remove_abandoned_groups(delegated))
    assert [folder for folder in groups.folders if folder.exists()] == []


async def test_a_group_whose_process_does_not_end_is_left_to_the_next_start(
    delegated: Delegation, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cell_groups, "_REMOVE_S", 0.1)
    monkeypatch.setattr(cell_groups, "_kill_processes", lambda folder: None)
    groups = HostGroups(f"stuck-{os.getpid()}", SandboxSpec(), {"pids": delegated.controllers["pids"]})
    (folder,) = groups.make().folders
    with start_in(folder, "echo joined; exec sleep 600") as process:
        assert process.stdout is not None
        assert await asyncio.to_thread(process.stdout.readline) == b"joined\n"
        await groups.close()
        assert folder.exists()
        assert "the next start removes it" in caplog.text
        monkeypatch.undo()
        assert folder.parent in await remove_abandoned_groups(delegated)
    assert process.returncode == -signal.SIGKILL
    assert not folder.exists()


async def test_without_delegation_cells_work_and_the_log_says_what_is_missing(
    backend: BackendName, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cell_groups, "find_delegation", lambda: NONE)
    cell_groups._warn_of_memory.cache_clear()
    with caplog.at_level(logging.WARNING):
        async with await open_pool(backend=backend) as pool:
            assert pool.hosts[0].groups is None
            sandbox = await pool.acquire()
            assert await alive(sandbox)
            await sandbox.close()
        await (await open_pool(backend=backend)).close()
    said = [record.message for record in caplog.records if "memory of a cell" in record.message]
    assert len(said) == 1
    assert "nothing is delegated. ask root" in said[0]


async def test_cpus_that_cannot_be_bounded_are_refused_with_the_cure(
    backend: BackendName, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cell_groups, "find_delegation", lambda: NONE)
    with pytest.raises(SandboxUnavailable, match=r"cpus=1.5 cannot be enforced here: nothing is delegated. ask root"):
        await open_pool(SandboxSpec(cpus=1.5), backend=backend)


async def test_only_what_the_spec_bounds_is_used() -> None:
    places = {name: Path(f"/{name}") for name in ("memory", "pids", "cpu")}
    everything = Delegation(1, places, None, "")
    assert set(usable_controllers(SandboxSpec(), everything)) == {"memory", "pids"}
    assert set(usable_controllers(SandboxSpec(cpus=2.0), everything)) == {"memory", "pids", "cpu"}
    assert usable_controllers(SandboxSpec(runtime="runsc"), everything) == {}
    with pytest.raises(SandboxUnavailable, match="a kernel of its own"):
        usable_controllers(SandboxSpec(runtime="krun", cpus=2.0), everything)


async def test_the_limits_of_both_versions() -> None:
    spec = SandboxSpec(memory_mib=64, pids=10, cpus=0.5)
    assert limits(1, spec, ["memory", "pids", "cpu"]) == (
        ("memory.limit_in_bytes", "67108864"),
        ("memory.memsw.limit_in_bytes", "67108864"),
        ("pids.max", "12"),
        ("cpu.cfs_period_us", "100000"),
        ("cpu.cfs_quota_us", "50000"),
    )
    assert limits(2, spec, ["memory", "pids", "cpu"]) == (
        ("memory.max", "67108864"),
        ("memory.swap.max", "0"),
        ("pids.max", "12"),
        ("cpu.max", "50000 100000"),
    )
    assert limits(2, SandboxSpec(), ["pids"]) == (("pids.max", "66"),)
