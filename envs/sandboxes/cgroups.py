"""Where this process may make control groups for its cells, found by trying.

Version 1 has one hierarchy for each controller, and any group may hold processes and groups alike. Version 2 has one
for all; there a group that hands controllers down to others may hold no process itself, and whoever moves a process
must be allowed to write both into its new group and into what that one and the old one have in common. So on version 1
any folder that was given to us will do; on version 2 it is the group that we already run in, or what root chooses.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import os
import re
import subprocess
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

CONTROLLERS = ("memory", "pids", "cpu")
ENVIRONMENT_VARIABLE = "PALAESTRA_CGROUP"
"""Names the group in which to make ours, as a path below the mount of each controller."""
PREFIX = "cells-"
"""What the names of all groups that we make begin with."""
JOIN_FILE: Mapping[int, str] = {1: "tasks", 2: "cgroup.procs"}
"""Where a process of one thread writes "0" to join a group. On version 1 this spares it the lock that keeps every
process of the machine from forking while ``cgroup.procs`` is written."""
_LEAF = "palaestra-leaf"
"""Where the processes of a version 2 group go that hands its controllers down."""
_ATTEMPTS = 10
_TRY_S = 10.0
_PAUSE_S = 0.002

Version = Literal[1, 2]


@dataclass(frozen=True, slots=True)
class Delegation:
    """What ``find_delegation`` found."""

    version: int
    """Of the control groups that bound memory here: 1 or 2; 0 where none are mounted."""
    controllers: Mapping[str, Path]
    """Of ``memory``, ``pids`` and ``cpu`` those that we may use, and the folder in which we make groups for each."""
    problem: str | None
    """Why not all of them; None when all three work."""
    advice: str
    """What to do about the problem; empty without one."""


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """A mounted hierarchy of control groups."""

    version: Version
    mount: Path
    own: Path | None
    """The group that we run in; None when it lies outside of what is mounted."""


@functools.cache
def find_delegation() -> Delegation:
    """Where groups can be made: looked for, and tried, once in the life of a process. Takes some 10 ms.

    On version 2 our own group's processes are moved into a child of it when that is what handing its controllers down
    takes.
    """
    try:
        mounts, membership = Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text()
    except OSError as error:
        return Delegation(0, {}, f"cannot read {error.filename}: {error.strerror}", "Mount /proc.")
    return delegation(hierarchies(mounts, membership), os.environ.get(ENVIRONMENT_VARIABLE), os.getuid())


def version_of(folder: Path) -> Version:
    """The version of the hierarchy that a group's folder lies in."""
    return 2 if (folder / "cgroup.controllers").exists() else 1


def hierarchies(mountinfo: str, membership: str) -> dict[str, Hierarchy]:
    """The hierarchy of each controller of version 1, and that of version 2 as ``""``.

    Takes the texts of ``/proc/self/mountinfo`` and ``/proc/self/cgroup`` (see proc(5) and cgroups(7)).
    """
    own: dict[str, str] = {}
    for line in membership.splitlines():
        _, names, path = line.split(":", 2)
        own |= dict.fromkeys(names.split(","), path)
    found: dict[str, Hierarchy] = {}
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        root, mount = (_unescaped(text) for text in left.split()[3:5])
        kind, _, options = right.split(" ", 2)
        if kind == "cgroup2":
            found.setdefault("", Hierarchy(2, Path(mount), _visible(own.get(""), root, Path(mount))))
        elif kind == "cgroup":
            for name in set(CONTROLLERS) & set(options.split(",")):
                found.setdefault(name, Hierarchy(1, Path(mount), _visible(own.get(name), root, Path(mount))))
    return found


def delegation(found: Mapping[str, Hierarchy], chosen: str | None, uid: int) -> Delegation:
    """What of the hierarchies the user may use; ``chosen`` is the value of the environment variable."""
    usable: dict[str, Path] = {}
    problems: dict[str, str] = {}
    unified = found.get("")
    shared = [name for name in CONTROLLERS if name not in found]
    if shared and unified is not None:
        folders, problems = _try_version_2(unified, shared, chosen, uid)
        usable |= folders
    else:
        problems = dict.fromkeys(shared, "no hierarchy that has it is mounted")
    for name in CONTROLLERS:
        if name in found:
            folder, problem = _try_version_1(found[name], chosen, uid)
            if folder is not None:
                usable[name] = folder
            else:
                problems[name] = problem
    version = found["memory"].version if "memory" in found else 2 if unified is not None else 0
    texts = list(dict.fromkeys(f"{', '.join(n for n in problems if problems[n] == p)}: {p}" for p in problems.values()))
    advice = _advice(version, {name: found[name].mount for name in CONTROLLERS if name in found}, uid) if texts else ""
    return Delegation(version, usable, "; ".join(texts) or None, advice)


def make_locked(folder: Path) -> int:
    """Make a group and hold it; the descriptor of the lock. Raises OSError.

    In between another start may take it for abandoned and remove it, which is over in a moment.
    """
    deadline = time.monotonic() + _TRY_S
    while True:
        folder.mkdir(exist_ok=True)
        try:
            return lock(folder)
        except (FileNotFoundError, BlockingIOError):
            if time.monotonic() > deadline:
                raise
        time.sleep(_PAUSE_S)


def lock(folder: Path) -> int:
    """Lock the folder that has this name now. Raises OSError: BlockingIOError when another process holds it,
    FileNotFoundError when it is gone."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(descriptor), os.stat(folder)):
            raise FileNotFoundError(2, "replaced meanwhile", str(folder))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def remove_group(folder: Path) -> bool:
    """Whether the group no longer exists."""
    try:
        os.rmdir(folder)
    except FileNotFoundError:
        pass
    except OSError:  # a process or a group is still in it
        return False
    return True


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _visible(path: str | None, root: str, mount: Path) -> Path | None:
    """The folder of the group ``path`` in a mount that shows the hierarchy from the group ``root`` on."""
    root = root.rstrip("/")
    if path is None or not f"{path}/".startswith(f"{root}/") or ".." in path.split("/"):
        return None
    return mount / path[len(root) :].lstrip("/")


def _try_version_1(hierarchy: Hierarchy, chosen: str | None, uid: int) -> tuple[Path | None, str]:
    candidates = [hierarchy.own, hierarchy.mount / f"palaestra-{uid}"]
    if chosen is not None:
        candidates = [hierarchy.mount / chosen.strip("/")]
    problems = []
    for folder in candidates:
        if folder is not None:
            problem = _try_to_join(folder, 1)
            if problem is None:
                return folder, ""
            problems.append(problem)
    return None, " and ".join(problems)


def _try_version_2(
    hierarchy: Hierarchy, names: list[str], chosen: str | None, uid: int
) -> tuple[dict[str, Path], dict[str, str]]:
    """The controllers that work with their folder, and why the others don't."""
    folder = hierarchy.own
    if chosen is not None:
        folder = hierarchy.mount / chosen.strip("/")
    elif uid == 0:
        folder = hierarchy.mount
    elif folder is not None and folder.name == _LEAF:  # another process of ours was here first
        folder = folder.parent
    if folder is None:
        return {}, dict.fromkeys(names, f"the group of this process is not visible in {hierarchy.mount}")
    try:
        missing = hand_down(folder, names)
    except OSError as error:
        return {}, dict.fromkeys(names, f"{folder} cannot hand controllers down: {error.strerror or error}")
    working = [name for name in names if name not in missing]
    problem = _try_to_join(folder, 2) if working else None
    if problem is not None:
        return {}, dict.fromkeys(names, problem)
    return dict.fromkeys(working, folder), missing


def hand_down(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Let the children of a version 2 group bound these controllers; for each that cannot be, why. Raises OSError.

    A group with controllers in its children may hold no process, unless it is the root of the whole machine.
    """
    available = (folder / "cgroup.controllers").read_text().split()
    enabled = (folder / "cgroup.subtree_control").read_text().split()
    missing = {name: f"{folder} is not given it" for name in names if name not in available}
    wanted = [name for name in names if name in available and name not in enabled]
    if not wanted:
        return missing
    if not os.access(folder / "cgroup.subtree_control", os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    for name in wanted:
        for attempt in range(_ATTEMPTS):
            if (folder / "cgroup.type").exists():
                _move_processes(folder, folder / _LEAF)
            try:
                (folder / "cgroup.subtree_control").write_text(f"+{name}")
                break
            except OSError as error:
                if error.errno == errno.EBUSY and attempt < _ATTEMPTS - 1:  # a process was started there meanwhile
                    continue
                missing[name] = f"{folder} refuses to hand it down: {error.strerror}"
                break
    return missing


def _move_processes(source: Path, target: Path) -> None:
    for pid in (source / "cgroup.procs").read_text().split():
        target.mkdir(exist_ok=True)
        try:
            (target / "cgroup.procs").write_text(pid)
        except ProcessLookupError:  # it ended
            continue


def _try_to_join(folder: Path, version: Version) -> str | None:
    """Make a group in the folder and have a process of ours join it: what failed, or None."""
    group = folder / f"{PREFIX}try-{os.getpid()}"
    try:
        held = make_locked(group)
    except OSError as error:
        return f"cannot make a group in {folder}: {error.strerror}"
    try:
        joining = ["/bin/sh", "-c", 'echo 0 > "$0"', str(group / JOIN_FILE[version])]
        done = subprocess.run(joining, capture_output=True, timeout=_TRY_S, check=False, text=True)
    except subprocess.TimeoutExpired:
        return f"a process did not get into a group in {folder} within {_TRY_S:.0f} s"
    finally:
        remove_group(group)
        os.close(held)
    return None if done.returncode == 0 else f"a process cannot move into a group in {folder}: {done.stderr.strip()}"


def _advice(version: int, mounts: Mapping[str, Path], uid: int) -> str:
    if version == 0:
        return "Mount the control groups of this kernel (systemd does), or let the container that this is see them."
    if version == 1:
        folders = " ".join(f"{mount}/palaestra-{uid}" for mount in mounts.values())
        return f"As root run: mkdir -p {folders}; chown -R {uid} {folders}"
    return (
        "Start this program in a group of its own: systemd-run --user --scope -p Delegate=yes … (that gives away cpu "
        "only where /etc/systemd/system/user@.service.d/ has a file with [Service] and Delegate=memory pids cpu); "
        f"or have root start it in a group that belongs to you and name that one in {ENVIRONMENT_VARIABLE}. In a "
        "container, give it a writable cgroup namespace of its own."
    )
