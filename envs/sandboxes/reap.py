"""Removing what a killed process has left: one function for ``palaestra gc`` and for the next start.

An owner that dies takes its hosts and cells along, since they live as long as its connections. What stays is what no
process is left to remove: folders and their leases, control groups, containers that Podman has not cleaned up yet,
Podman's API services in their last idle seconds, and hosts whose owner was killed before it was connected with them.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palaestra.envs.sandboxes import leases
from palaestra.envs.sandboxes.cell_groups import remove_abandoned_groups
from palaestra.envs.sandboxes.cgroups import find_delegation
from palaestra.envs.sandboxes.podman.container import LABEL
from palaestra.envs.sandboxes.podman.service import SERVICE_KIND, PodmanService
from palaestra.envs.sandboxes.processes import send, users_of

_REMOVE_S = 15.0
_SERVICE_S = 5.0
_BATCH = 64
"""Leases that are claimed at once; each takes a file descriptor."""


@dataclass(frozen=True, slots=True)
class Reaped:
    """What was removed, or would be, and what was not."""

    containers: tuple[str, ...]
    """Names of containers whose owner is gone."""
    folders: tuple[str, ...]
    """Folders whose owner is gone."""
    groups: tuple[str, ...]
    """Control groups whose owner is gone."""
    processes: int
    """Processes of hosts that outlived their owner."""
    live: int
    """Hosts of runs that live; they were left alone."""
    unknown: tuple[str, ...]
    """Containers whose owner cannot be seen from here, and which were left alone: their runtime folder is elsewhere."""


async def reap(podman: PodmanService | None = None, *, dry_run: bool = False) -> Reaped:
    """Remove what owners that are gone have left: folders and processes, and containers where a service is given.

    What a live process owns is never touched, whatever its age: its lease is locked. Safe to run several times at once.
    """
    ended_services = await _end_services(dry_run)
    removed, unknown, live = await _reap_containers(podman, dry_run) if podman is not None else ([], [], set())
    folders, processes = [], ended_services
    files = leases.lease_files()
    for start in range(0, len(files), _BATCH):
        batch = files[start : start + _BATCH]
        gone, ended = _reap_folders(batch, dry_run)
        folders += [str(file.with_suffix("")) for file in gone]
        processes += ended
        live |= {str(file) for file in batch if file not in gone and not file.name.startswith(f"{SERVICE_KIND}-")}
    # Control groups last: they go when their processes have.
    groups = await remove_abandoned_groups(await asyncio.to_thread(find_delegation), dry_run=dry_run)
    names = (tuple(removed), tuple(folders), tuple(map(str, groups)))
    return Reaped(*names, processes=processes, live=len(live), unknown=tuple(unknown))


async def _end_services(dry_run: bool) -> int:
    """End the API services of owners that are gone: how many there were.

    They would end by themselves soon, but until then one may still be making a container. On SIGTERM it finishes that.
    """
    with contextlib.ExitStack() as claims:
        files = [file for file in leases.lease_files() if file.name.startswith(f"{SERVICE_KIND}-")][:_BATCH]
        gone = {file.stem for file in files if claims.enter_context(leases.claim(file))}
        handles = [os.dup(handle) for handle in users_of(gone)] if gone else []
        for handle in handles:
            claims.callback(os.close, handle)
        if dry_run:
            return 0  # they are there still, and counted with their folders
        left = [handle for handle in handles if send(handle, signal.SIGTERM)]
        deadline = time.monotonic() + _SERVICE_S
        while left and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
            left = [handle for handle in left if send(handle, 0)]
        for handle in left:
            send(handle, signal.SIGKILL)
    return len(handles)


def _reap_folders(files: list[Path], dry_run: bool) -> tuple[list[Path], int]:
    """The leases among these whose owner is gone, and how many processes had their folders mounted.

    They stay claimed until they are removed: one that its owner was about to lock is then seen as removed by it.
    """
    processes = 0
    with contextlib.ExitStack() as claims:
        gone = [file for file in files if claims.enter_context(leases.claim(file))]
        for handle in users_of({file.stem for file in gone}) if gone else ():
            processes += 1
            if not dry_run:
                send(handle, signal.SIGKILL)
        for file in gone if not dry_run else ():
            leases.remove(file)
    return gone, processes


async def _reap_containers(podman: PodmanService, dry_run: bool) -> tuple[list[str], list[str], set[str]]:
    """Names of those that were removed and of those that cannot be judged, and the leases of the others."""
    gone, unknown, live = [], [], set()
    for name, lease in await podman.call(_labelled, repeatable=True):
        if not leases.visible(Path(lease)):
            unknown.append(name)
        elif leases.is_abandoned(Path(lease)):
            gone.append(name)
        else:
            live.add(lease)
    if not dry_run:
        removals = [podman.call(functools.partial(remove_container, name=name), repeatable=True) for name in gone]
        for outcome in await asyncio.gather(*removals, return_exceptions=True):
            if outcome is not None:
                raise outcome
    return gone, unknown, live


def _labelled(client: Any) -> list[tuple[str, str]]:
    listed = client.containers.list(all=True, filters={"label": LABEL})
    return [(item.name, item.labels.get(LABEL, "")) for item in listed]


def remove_container(client: Any, name: str) -> None:
    """Remove a container that may be ending, or be removed by Podman itself, at this moment."""
    from podman.errors import APIError, NotFound

    deadline = time.monotonic() + _REMOVE_S
    while client.containers.exists(name):
        try:
            client.containers.get(name).remove(force=True)
        except NotFound:
            return
        except APIError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
