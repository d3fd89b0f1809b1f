"""What Podman says about itself, and the settings and ids that decide how many containers it can carry."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from palaestra.envs.sandboxes.doctor.machine import MAKE_PODMAN, read, setting
from palaestra.envs.sandboxes.doctor.report import Check
from palaestra.envs.sandboxes.podman.backend import FIRST_CELL_ID
from palaestra.envs.sandboxes.podman.service import PodmanService
from palaestra.envs.sandboxes.supervisor.main import CELL_IDS

Info = Mapping[str, Any]
"""What Podman says of itself: over its API, or as ``podman info --format json`` prints it."""
_OLDEST = (4, 3)
_CAP_SYS_ADMIN = 21
_LOCKS = 2048
"""Podman's default for containers, pods and volumes together."""


async def examine_podman(
    service: PodmanService, *, root: Path = Path("/"), home: Path | None = None
) -> tuple[Check, ...]:
    """Ask Podman. Raises ``SandboxUnavailable`` when it does not answer."""
    info: Info = await service.call(lambda client: client.info())
    settings = containers_conf(root, home or Path.home())
    locks = info["host"].get("freeLocks")
    if locks is None:  # Podman before 4.6 does not say
        used = int(info["store"]["containerStore"]["number"])
        used += await service.call(lambda client: len(client.volumes.list()) + len(client.pods.list()))
        locks = int(settings.get("engine", {}).get("num_locks", _LOCKS)) - used
    return (*judge_info(info, int(locks)), *judge_settings(settings, root), _id_helpers(root))


def judge_info(info: Info, free_locks: int) -> tuple[Check, ...]:
    """What follows from ``podman info`` (the shapes of 4.3 and 5.4 are tested)."""
    host, store = info["host"], info["store"]
    return (
        _version(str(info["version"]["Version"])),
        _runtime(host),
        _conmon(host),
        _cgroups(host),
        _ids(host),
        _storage(store),
        _disk(store),
        _locks(free_locks),
    )


def judge_settings(settings: Mapping[str, Any], root: Path) -> tuple[Check, ...]:
    """What follows from ``containers.conf``."""
    tried = "read containers.conf"
    containers = settings.get("containers", {})
    keys = setting(root, "kernel.keys.maxkeys") or "200"
    keyring = Check("kernel keyrings", tried, "keyring = false: none is made", "ok")
    if containers.get("keyring", True):
        advice = "Put `keyring = false` under [containers] in ~/.config/containers/containers.conf."
        seen = f"one for every container, and {keys} (kernel.keys.maxkeys) are the most"
        keyring = Check("kernel keyrings", tried, seen, "warning", advice)
    mapping = str(containers.get("userns") or "")
    remap = Check("copies of images", tried, "containers use images as they are", "ok")
    if mapping.startswith(("auto", "keep-id", "nomap")):
        advice = (
            "Remove `userns` from containers.conf: Palaestra's containers need none, and each start copies the image."
        )
        remap = Check(
            "copies of images", tried, f"userns = {mapping!r} changes the owner of every file", "warning", advice
        )
    return keyring, remap


def containers_conf(root: Path, home: Path) -> dict[str, Any]:
    """The settings of the machine, then those of the user over them, table by table, as Podman reads them."""
    files: list[Path] = []
    for folder in (root / "usr/share/containers", root / "etc/containers", home / ".config/containers"):
        files += [folder / "containers.conf", *sorted((folder / "containers.conf.d").glob("*.conf"))]
    merged: dict[str, Any] = {}
    for file in files:
        with contextlib.suppress(OSError, tomllib.TOMLDecodeError):  # Podman says so itself, and does not start
            for table, values in tomllib.loads(file.read_text("utf-8")).items():
                if isinstance(values, dict):
                    merged.setdefault(table, {}).update(values)
    return merged


def _version(version: str) -> Check:
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    advice = "Use 4.3 or newer, or bubblewrap: before 4.0.3 containers have inheritable capabilities, and are refused."
    old = numbers < _OLDEST
    return Check("Podman", "podman info", version, "warning" if old else "ok", advice if old else "")


def _runtime(host: Info) -> Check:
    runtime = host.get("ociRuntime") or {}
    first_line = str(runtime.get("version", "")).partition("\n")[0]
    if runtime.get("name"):
        return Check("OCI runtime", "podman info", first_line or str(runtime["name"]), "ok")
    return Check("OCI runtime", "podman info", "none", "warning", "Run: apt-get install crun")


def _conmon(host: Info) -> Check:
    conmon = host.get("conmon") or {}
    if conmon.get("path"):
        return Check("conmon", "podman info", str(conmon.get("version", "")).partition(",")[0] or conmon["path"], "ok")
    return Check("conmon", "podman info", "none", "warning", "Run: apt-get install conmon")


def _cgroups(host: Info) -> Check:
    """Of Podman's own limits; those of cells are Palaestra's (see the machine's control groups)."""
    version, manager = host.get("cgroupVersion", "?"), host.get("cgroupManager", "?")
    controllers = ", ".join(host.get("cgroupControllers") or ()) or "none"
    return Check("Podman's control groups", "podman info", f"{version}, {manager}; delegated: {controllers}", "note")


def _ids(host: Info) -> Check:
    """Every cell of a container gets an id of its own, from ``FIRST_CELL_ID`` on."""
    wanted, tried = FIRST_CELL_ID + CELL_IDS, "podman info: id maps"
    maps = host.get("idMappings") or {}
    users, groups = (sum(int(entry["size"]) for entry in maps.get(name) or ()) for name in ("uidmap", "gidmap"))
    if min(users, groups) >= wanted:
        return Check("subordinate ids", tried, f"{users} user and {groups} group ids", "ok")
    seen = f"{users} user and {groups} group ids, and cells take those up to {wanted}"
    advice = f"{MAKE_PODMAN}, or give the user 65536 in /etc/subuid and /etc/subgid; then run: podman system migrate"
    return Check("subordinate ids", tried, seen, "warning", advice)


def _id_helpers(root: Path) -> Check:
    """In a container whose root has no CAP_SYS_ADMIN, only a file capability lets newuidmap write an id map."""
    name, tried = "id map helpers", "look at newuidmap and newgidmap"
    bounding = next(
        (line for line in read(root / "proc/self/status").splitlines() if line.startswith("CapBnd:")), "0: 0"
    )
    confined = not int(bounding.split()[1], 16) >> _CAP_SYS_ADMIN & 1
    weak = []
    for program in ("newuidmap", "newgidmap"):
        path = shutil.which(program)
        if path is None:
            weak.append(f"{program} is missing")
        elif not _has_capabilities(path) and (confined or not os.stat(path).st_mode & stat.S_ISUID):
            weak.append(f"{program} has no file capability" if confined else f"{program} is not setuid")
    if weak:
        return Check(name, tried, "; ".join(weak), "warning", f"{MAKE_PODMAN}, or reinstall the package uidmap.")
    return Check(name, tried, "both are there and privileged", "ok")


def _has_capabilities(path: str) -> bool:
    with contextlib.suppress(OSError):
        return bool(os.getxattr(path, "security.capability"))
    return False


def _storage(store: Info) -> Check:
    name, tried, driver = "storage driver", "podman info", store.get("graphDriverName", "?")
    backing = str((store.get("graphStatus") or {}).get("Backing Filesystem", "?"))
    through_fuse = "fuse-overlayfs" in str((store.get("graphOptions") or {}).get("overlay.mount_program", ""))
    if driver != "overlay":
        advice = (
            'Put [storage] driver="overlay" into ~/.config/containers/storage.conf, then run: podman system reset '
            "(it removes all of this user's containers and images)."
        )
        copies = " copies the whole image for every container" if driver == "vfs" else " is not tested"
        return Check(name, tried, f"{driver}{copies}", "warning", advice)
    how = "through fuse-overlayfs" if through_fuse else "the kernel's own"
    seen = f"overlay, {how}, on {backing}"
    if backing.startswith("nfs") or (backing == "overlayfs" and not through_fuse):
        advice = (
            f"Containers cannot be on {backing}: set graphroot in storage.conf to a folder on a local disk or volume."
        )
        return Check(name, tried, seen, "warning", advice)
    return Check(name, tried, seen, "ok")


def _disk(store: Info) -> Check:
    root, gib = str(store.get("graphRoot", "?")), 1 << 30
    total, used = int(store.get("graphRootAllocated") or 0), int(store.get("graphRootUsed") or 0)
    if not total:  # Podman before 4.0 does not say
        return Check("disk for images", "podman info", f"at {root}", "note")
    seen = f"{(total - used) / gib:.1f} of {total / gib:.1f} GiB free at {root}"
    if total - used >= 2 * gib:
        return Check("disk for images", "podman info", seen, "ok")
    return Check("disk for images", "podman info", seen, "warning", "Free some: podman image prune --all")


def _locks(free: int) -> Check:
    """Each container takes one, and holds ``cells_per_host`` cells."""
    tried = "count Podman's locks"
    if free >= 100:
        return Check("locks", tried, f"{free} containers more are possible", "ok")
    advice = (
        "Remove what is not used (podman volume prune; podman container prune), or raise num_locks in containers.conf."
    )
    return Check("locks", tried, f"only {free} containers more are possible", "warning", advice)
