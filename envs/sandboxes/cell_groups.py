"""The control groups of cells: one group folder for a host, in it one group for each cell.

Only the owner of a host touches these folders. It makes a cell's group, writes the limits, and sends the file through
which a process joins, open, along with the first frame; so nothing inside of a host ever sees a control group's
folder, let alone a limit that it could write.

A group's folder can be removed once its last process is gone, which is a little after a cell's connection closed. So
groups of closed cells are kept in mind and removed as later ones are made, a moment later where none are, and the last
of them when the host closes.
While its owner lives, a host's folder is under an exclusive ``flock``; whoever comes next removes what nobody holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import os
import signal
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from palaestra.envs.errors import SandboxDied, SandboxUnavailable
from palaestra.envs.sandboxes.cgroups import (
    JOIN_FILE,
    PREFIX,
    Delegation,
    Version,
    find_delegation,
    lock,
    make_locked,
    remove_group,
    version_of,
)
from palaestra.envs.sandboxes.protocol import SandboxSpec

_CPU_PERIOD_US = 100_000
_REMOVED_AT_ONCE = 4
"""How many groups of closed cells are looked at when a new one is made: more than one, so that they become fewer."""
_SWEEP_S = 0.2
_SWEPT_AT_ONCE = 64
_REMOVE_S = 5.0
_REMOVE_ABANDONED_S = 2.0
_OWN_KERNEL = ("runsc", "krun", "kata")
"""Runtimes whose cells are no processes of this kernel, so that its control groups do not reach them one by one."""
_NEARLY = 0.9
_NOT_NOW = (errno.ENOENT, errno.EMFILE, errno.ENFILE)
"""The group was removed; or no file can be opened at the moment, and the next look counts what this one missed."""
_log = logging.getLogger(__name__)


class CellGroup:
    """The control group of one cell, in each hierarchy that bounds it."""

    def __init__(self, host: HostGroups, folders: tuple[Path, ...], memory: Path | None) -> None:
        self.folders = folders
        self._host, self._memory = host, memory
        self._kills = self._kills_seen = 0
        self._limit_met = False

    @contextlib.contextmanager
    def join_files(self) -> Iterator[list[int]]:
        """File descriptors to which the cell's first process writes "0" to join. Raises OSError."""
        opened: list[int] = []
        try:
            for folder in self.folders:
                opened.append(os.open(folder / JOIN_FILE[version_of(folder)], os.O_WRONLY | os.O_CLOEXEC))
            yield opened
        finally:
            for descriptor in opened:
                os.close(descriptor)

    def new_oom_kills(self) -> int:
        """How many processes the kernel killed since the last call because the cell's own memory was used up.

        Raises ``SandboxDied`` when it killed some though the cell never came near its limit: then the memory of the
        machine was used up, or that of a group above.
        """
        self._count()
        new_kills = self._kills - self._kills_seen
        self._kills_seen = self._kills
        if new_kills and not self._limit_met:
            raise SandboxDied(
                f"the kernel killed {new_kills} process(es) of a cell that was within its own memory limit: the memory "
                "of the machine, or of a control group above, is used up; run fewer cells, or give them less memory_mib"
            )
        return new_kills

    def retire(self) -> None:
        """The cell is ending: remove the group as soon as its last process is gone."""
        self._host.retire(self)
        with contextlib.suppress(OSError):  # no descriptor left: whoever asks after that is told
            self._count()

    def _count(self) -> None:
        if self._memory is None:
            return
        try:
            kills = _oom_kills(self._memory)
            if kills > self._kills:
                self._kills, self._limit_met = kills, _limit_was_met(self._memory)
        except OSError as error:
            if error.errno not in _NOT_NOW:
                raise

    def removed(self) -> bool:
        """Remove what can be removed now; whether that is all of it."""
        self.folders = tuple(folder for folder in self.folders if not remove_group(folder))
        return not self.folders


class HostGroups:
    """The groups of one host's cells. ``folders`` gives the place in which to make groups for each controller."""

    def __init__(self, name: str, spec: SandboxSpec, folders: Mapping[str, Path]) -> None:
        self.retired: deque[CellGroup] = deque()
        self._made = 0
        self._memory: Path | None = None
        self._limits: dict[Path, tuple[tuple[str, str], ...]] = {}
        self._locks: dict[Path, int] = {}
        self._loop = asyncio.get_running_loop()
        self._sweeping: asyncio.TimerHandle | None = None
        try:
            for place in dict.fromkeys(folders.values()):
                names = [controller for controller in folders if folders[controller] == place]
                folder = place / f"{PREFIX}{name}"
                self._locks[folder] = make_locked(folder)
                version = version_of(folder)
                if version == 2:
                    (folder / "cgroup.subtree_control").write_text(" ".join(f"+{controller}" for controller in names))
                self._limits[folder] = limits(version, spec, names)
                if "memory" in names:
                    self._memory = folder
        except OSError as error:
            self._give_up()
            raise SandboxUnavailable(f"no control group can be made for the cells of a host: {error}") from error

    @property
    def folders(self) -> tuple[Path, ...]:
        """The host's own folder in each hierarchy."""
        return tuple(self._limits)

    def make(self) -> CellGroup:
        """The group of a new cell, with its limits set. Raises OSError."""
        self._remove_retired(_REMOVED_AT_ONCE)
        self._made += 1
        name = str(self._made)
        memory = None if self._memory is None else self._memory / name
        group = CellGroup(self, tuple(folder / name for folder in self._limits), memory)
        try:
            for folder, values in self._limits.items():
                os.mkdir(folder / name)
                for file, value in values:
                    _write(folder / name / file, value)
        except OSError:
            group.retire()
            raise
        return group

    async def close(self) -> None:
        """Remove everything, once the host has ended. Idempotent. What cannot be removed is for the next start."""
        try:
            left = await _removed_within(_REMOVE_S, tuple(self._limits))
            if left:
                _log.warning("processes of a closed host are still in %s; the next start removes it", left[0])
        finally:
            self._give_up()

    def retire(self, group: CellGroup) -> None:
        """Remove a group as soon as its last process is gone."""
        self.retired.append(group)
        if self._sweeping is None and self._locks:
            self._sweeping = self._loop.call_later(_SWEEP_S, self._sweep)

    def _sweep(self) -> None:
        self._sweeping = None
        self._remove_retired(_SWEPT_AT_ONCE)
        if self.retired:
            self._sweeping = self._loop.call_later(_SWEEP_S, self._sweep)

    def _remove_retired(self, most: int) -> None:
        for _ in range(min(most, len(self.retired))):
            group = self.retired.popleft()
            if not group.removed():
                self.retired.append(group)

    def _give_up(self) -> None:
        for folder, descriptor in self._locks.items():
            remove_group(folder)
            os.close(descriptor)
        self._locks.clear()
        self.retired.clear()
        if self._sweeping is not None:
            self._sweeping.cancel()
            self._sweeping = None


async def open_groups(name: str, spec: SandboxSpec) -> HostGroups | None:
    """Groups for the cells of the host ``name``; None where none are delegated to us.

    Raises ``SandboxUnavailable`` when the spec asks for a bound that only a control group could keep.
    """
    found = await asyncio.to_thread(find_delegation)
    folders = usable_controllers(spec, found)
    return HostGroups(name, spec, folders) if folders else None


def usable_controllers(spec: SandboxSpec, found: Delegation) -> dict[str, Path]:
    """The controllers that bound cells of this spec, each with the place for its groups.

    ``cpus`` that cannot be bounded is an error; memory falls back to the limits of each process, with a warning.
    """
    own_kernel = spec.runtime in _OWN_KERNEL
    problem = f"the runtime {spec.runtime} runs cells on a kernel of its own" if own_kernel else found.problem
    usable = {} if own_kernel else dict(found.controllers)
    if spec.cpus is None:
        usable.pop("cpu", None)
    elif "cpu" not in usable:
        cure = "leave SandboxSpec.cpus unset" if own_kernel else found.advice
        raise SandboxUnavailable(f"SandboxSpec.cpus={spec.cpus} cannot be enforced here: {problem}. {cure}")
    if "memory" not in usable:
        _warn_of_memory(f"{problem}. {'' if own_kernel else found.advice}")
    return usable


def limits(version: Version, spec: SandboxSpec, controllers: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """The files of a cell's group and what is written into each, in this order."""
    memory, quota = str(spec.memory_mib << 20), str(round((spec.cpus or 0) * _CPU_PERIOD_US))
    # The cell's init is one more, and so is, for a moment, the process that made it.
    pids = (("pids.max", str(spec.pids + 2)),)
    files: dict[str, tuple[tuple[str, str], ...]]
    if version == 1:
        files = {
            "memory": (("memory.limit_in_bytes", memory), ("memory.memsw.limit_in_bytes", memory)),
            "pids": pids,
            "cpu": (("cpu.cfs_period_us", str(_CPU_PERIOD_US)), ("cpu.cfs_quota_us", quota)),
        }
    else:
        files = {
            "memory": (("memory.max", memory), ("memory.swap.max", "0")),
            "pids": pids,
            "cpu": (("cpu.max", f"{quota} {_CPU_PERIOD_US}"),),
        }
    return tuple(setting for controller in controllers for setting in files[controller])


async def remove_abandoned_groups(found: Delegation, *, dry_run: bool = False) -> list[Path]:
    """Remove the groups of hosts whose owner is gone; which ones they were, or would be."""
    abandoned: dict[Path, int] = {}
    try:
        for place in set(found.controllers.values()):
            for folder in place.glob(f"{PREFIX}*"):
                with contextlib.suppress(OSError):  # held by a live owner, or removed by another start
                    abandoned[folder] = lock(folder)
        left = await _removed_within(_REMOVE_ABANDONED_S, () if dry_run else tuple(abandoned))
        if left:
            _log.warning("processes of an earlier run are still in %s; the next start removes it", left[0])
        return [folder for folder in abandoned if folder not in left]
    finally:
        for descriptor in abandoned.values():
            os.close(descriptor)


@functools.cache
def _warn_of_memory(problem: str) -> None:
    """Once in the life of a process for each reason."""
    _log.warning("the memory of a cell as a whole is not bounded, only that of each of its processes: %s", problem)


async def _removed_within(seconds: float, folders: tuple[Path, ...]) -> list[Path]:
    """Remove groups with those in them, ending the processes that are left; the groups that still are there then."""
    deadline, pause_s = time.monotonic() + seconds, 0.002
    while left := [folder for folder in folders if not _remove_tree(folder)]:
        if time.monotonic() > deadline:
            break
        for folder in left:
            _kill_processes(folder)
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.1)
    return left


def _kill_processes(folder: Path) -> None:
    """What we may not kill, as other users' processes on version 1, ends with its host."""
    for group in folder.glob("*/"):
        with contextlib.suppress(OSError):  # gone meanwhile, or an old kernel without cgroup.kill
            if version_of(group) == 2:
                _write(group / "cgroup.kill", "1")
                continue
        with contextlib.suppress(OSError):
            for pid in map(int, (group / "cgroup.procs").read_text().split()):
                if pid > 0:  # 0 stands for a process that we cannot see, and for all of ours to kill(2)
                    os.kill(pid, signal.SIGKILL)


def _remove_tree(folder: Path) -> bool:
    try:
        inner = [entry.path for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return True
    left = [path for path in inner if not remove_group(Path(path))]
    return not left and remove_group(folder)


def _write(file: Path, value: str) -> None:
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        if "memsw" in file.name or "swap" in file.name:  # this kernel does not count swap, or has none
            return
        raise
    try:
        os.write(descriptor, value.encode())
    finally:
        os.close(descriptor)


def _oom_kills(folder: Path) -> int:
    """Processes of the group that were killed for memory. Raises OSError."""
    file = "memory.oom_control" if version_of(folder) == 1 else "memory.events"
    return _pairs(folder / file)["oom_kill"]


def _limit_was_met(folder: Path) -> bool:
    """Whether the group's own memory was ever used up. Raises OSError.

    Version 1 tells only how much was used at most (``memory.failcnt`` stays 0 in some kernels); the last bytes of a
    limit are taken in batches and so left over.
    """
    if version_of(folder) == 2:
        return _pairs(folder / "memory.events")["oom"] > 0
    most, limit = (int((folder / f"memory.{name}_in_bytes").read_text()) for name in ("max_usage", "limit"))
    return most > limit * _NEARLY


def _pairs(file: Path) -> dict[str, int]:
    return {name: int(value) for name, value in (line.split() for line in file.read_text().splitlines())}
