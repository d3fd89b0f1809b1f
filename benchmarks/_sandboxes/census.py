"""What exists because of this process: processes, containers, folders, descriptors; and the machine's free memory."""

from __future__ import annotations

import asyncio
import fcntl
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from palaestra.envs.sandboxes.bubblewrap import BubblewrapHost
from palaestra.envs.sandboxes.cgroups import PREFIX, find_delegation
from palaestra.envs.sandboxes.host import Host
from palaestra.envs.sandboxes.leases import base_folder, is_abandoned
from palaestra.envs.sandboxes.podman.backend import PodmanHost
from palaestra.envs.sandboxes.podman.container import LABEL
from palaestra.envs.sandboxes.podman.service import environment

Process = tuple[int, int]
"""A process id and when it started, so that a reused id is another process."""
SETTLE_S = 30.0
"""How long what was closed may take to be gone before it counts as left."""


@dataclass(frozen=True, slots=True)
class Holdings:
    """What may outlive a pool: containers, folders and control groups of this user that nobody holds; our descriptors.

    What we forgot to release shows as an open descriptor; what is held otherwise is another process's.
    """

    containers: frozenset[str]
    folders: frozenset[str]
    descriptors: int

    @classmethod
    def now(cls, backend: str) -> Holdings:
        names = {path.name.removesuffix(".lease") for path in base_folder().iterdir()}
        left = frozenset(name for name in names if is_abandoned(base_folder() / f"{name}.lease"))
        left |= frozenset(map(str, _abandoned_groups()))
        containers = frozenset(_abandoned_containers()) if backend == "podman" else frozenset[str]()
        return cls(containers, left, len(os.listdir("/proc/self/fd")))


def _abandoned_groups() -> list[Path]:
    found = []
    for place in set(find_delegation().controllers.values()):
        for folder in place.glob(f"{PREFIX}*"):
            try:
                descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                found.append(folder)
            except BlockingIOError:
                continue
            finally:
                os.close(descriptor)
    return found


def _abandoned_containers() -> list[str]:
    shown = '{{.Names}} {{index .Labels "' + LABEL + '"}}'
    command = ["podman", "ps", "--all", "--filter", f"label={LABEL}", "--format", shown]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment(), timeout=60)
    pairs = [line.split(" ", 1) for line in done.stdout.splitlines()]
    return [name for name, lease in pairs if is_abandoned(Path(lease))]


def processes_of(hosts: Iterable[Host]) -> set[Process]:
    """Every process of the hosts: theirs, their cells', and what keeps them (bwrap, conmon)."""
    children: dict[int, list[int]] = {}
    started: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        pid = int(folder.name)
        started[pid] = int(fields[19])
        children.setdefault(int(fields[1]), []).append(pid)
    found: set[Process] = set()
    left = [root for host in hosts for root in _roots(host)]
    while left:
        pid = left.pop()
        if pid in started:
            found.add((pid, started[pid]))
        left += children.get(pid, [])
    return found


def _roots(host: Host) -> list[int]:
    if isinstance(host, BubblewrapHost):
        return [host.pid]
    assert isinstance(host, PodmanHost)
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if arguments[0].endswith(b"conmon") and host.name.encode() in arguments:
            found.append(int(folder.name))
    return found


def still_alive(processes: Iterable[Process]) -> list[Process]:
    """Those that run; a zombie that waits for its parent does not."""
    alive = []
    for pid, started in processes:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[19]) == started and fields[0] not in "ZX":
            alive.append((pid, started))
    return alive


async def settle(condition: Callable[[], bool], seconds: float = SETTLE_S) -> float:
    """Seconds until the condition holds; at most ``seconds``, whether it does or not."""
    started = time.perf_counter()
    while not condition() and time.perf_counter() - started < seconds:  # noqa: ASYNC110 - the kernel tells nobody
        await asyncio.sleep(0.02)
    return time.perf_counter() - started


def available_mib() -> float:
    """Memory that the machine could still give out: the median of readings over a second, as others run too."""
    readings = []
    for _ in range(11):
        text = Path("/proc/meminfo").read_text()
        readings.append(int(text.partition("MemAvailable:")[2].split()[0]) / 1024)
        time.sleep(0.1)
    return statistics.median(readings)


def proportional_mib(processes: Iterable[Process]) -> float | None:
    """Their own memory and their part of what they share; None where it may not be read (it takes root)."""
    total = 0
    for pid, _ in processes:
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except PermissionError:
            return None
        except OSError:
            continue
        total += int(text.partition("\nPss:")[2].split()[0])
    return total / 1024
