"""Hosts in rootless Podman: one long-lived container each, with no network, a read-only root and its own ids.

The container keeps SYS_ADMIN, SETUID and SETGID inside its user namespace, because that is what makes Podman's own
seccomp profile permit the namespaces and mounts of cells, and what maps each cell to a user id of its own. No cell
keeps any of it. What was asked of Podman is checked against what it made, and a difference is an error: its API
ignores options that it does not know.
"""

from __future__ import annotations

import asyncio
import functools
import tempfile
import time
from pathlib import Path
from typing import Any

from palaestra.envs.errors import SandboxUnavailable
from palaestra.envs.sandboxes.bundle import supervisor_zip
from palaestra.envs.sandboxes.cell_groups import HostGroups, open_groups
from palaestra.envs.sandboxes.connection import Connection
from palaestra.envs.sandboxes.host import answers, connect_lifeline
from palaestra.envs.sandboxes.image import HostImage, host_image
from palaestra.envs.sandboxes.leases import Lease, abandoned, is_abandoned
from palaestra.envs.sandboxes.podman_service import PodmanService
from palaestra.envs.sandboxes.protocol import SandboxSpec
from palaestra.envs.sandboxes.supervisor.main import SOCKET_NAME

CONTROL = "/run/palaestra"
LABEL = "palaestra.lease"
"""A container's label: the absolute path of its owner's lease file. Podman lists the containers of all processes of a
user, whose runtime folders may differ."""
FIRST_CELL_ID = 10_000
"""Cells get the container's ids from here on, each its own."""
_KIND = "podman"
_CAPABILITIES = ("SYS_ADMIN", "SETUID", "SETGID")
_REMOVE_S = 15.0


class PodmanBackend:
    """Starts containers for one user."""

    name = "podman"

    def __init__(self, spec: SandboxSpec) -> None:
        self._spec, self._preload = spec, spec.preload
        self._lease = Lease("service")
        try:
            self.service = PodmanService(self._lease.folder / "api.sock")
        except SandboxUnavailable:
            self._lease.release()
            raise
        self._prepared: HostImage | None = None
        self._preparing = asyncio.Lock()

    async def start_host(self) -> PodmanHost:
        async with self._preparing:
            if self._prepared is None:
                await self._remove_abandoned()
                self._prepared = await ensure_image(self.service)
        host = PodmanHost(self.service, Lease(_KIND))
        try:
            await host.start(self._prepared, self._preload)
            host.groups = await open_groups(host.name, self._spec)
        except BaseException:
            await asyncio.shield(host.close())
            raise
        return host

    async def close(self) -> None:
        try:
            await self.service.close()
        finally:
            self._lease.release()

    async def _remove_abandoned(self) -> None:
        """Containers whose owner died without closing them."""
        for _ in abandoned("service"):
            pass
        labelled = await self.service.call(
            lambda client: [
                (item.name, item.labels.get(LABEL, ""))
                for item in client.containers.list(all=True, filters={"label": LABEL})
            ]
        )
        for name, lease in labelled:
            if is_abandoned(Path(lease)):
                await self.service.call(functools.partial(_remove, name=name))
        for _ in abandoned(_KIND):
            pass


class PodmanHost:
    """One container with its supervisor as PID 1."""

    def __init__(self, service: PodmanService, lease: Lease) -> None:
        self._service, self._lease = service, lease
        self._lifeline: Connection | None = None
        self._closed = False
        self.groups: HostGroups | None = None

    @property
    def name(self) -> str:
        """The container's name, known before it exists: whatever happens, it can be removed."""
        return f"palaestra-{self._lease.name}"

    @property
    def socket(self) -> Path:
        return self._lease.folder / "control" / SOCKET_NAME

    async def start(self, image: HostImage, preload: tuple[str, ...]) -> None:
        folder = self._lease.folder
        (folder / "control").mkdir(mode=0o700)
        (folder / "supervisor.zip").write_bytes(supervisor_zip())
        wanted = _options(self.name, self._lease.file, folder)
        command = [image.interpreter, "-I", "-S", f"{CONTROL}.zip", CONTROL, str(FIRST_CELL_ID), *preload]
        made = await self._service.call(lambda client: _create(client, image.tag, command, wanted))
        if problems := differences(wanted, made):
            raise SandboxUnavailable("Podman made another container than it was asked for: " + "; ".join(problems))
        self._lifeline = await connect_lifeline(self.socket, lambda: None)
        status = await supervisor_status(self.socket)
        if status["NoNewPrivs"] != "1" or status["Seccomp"] != "2":
            raise SandboxUnavailable(f"the container runs without no_new_privs or without Podman's seccomp: {status}")

    async def healthy(self) -> bool:
        return not self._closed and await answers(self.socket)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            if self._lifeline is not None:
                self._lifeline.close()  # the supervisor, and so the container, ends at once
            await self._service.call(lambda client: _remove(client, self.name))
        finally:
            try:
                if self.groups is not None:
                    await self.groups.close()
            finally:
                self._lease.release()


async def ensure_image(service: PodmanService) -> HostImage:
    """The image of this machine's Python in the user's storage, made when it is not there yet."""
    image = await asyncio.to_thread(host_image)
    if not await service.call(lambda client: client.images.exists(image.tag)):
        with tempfile.TemporaryDirectory(prefix="palaestra-image-") as folder:
            archive = Path(folder, "root.tar")
            await asyncio.to_thread(image.write, archive)
            await service.command("import", "--quiet", str(archive), image.tag, timeout_s=300)
    return image


async def supervisor_status(socket: Path) -> dict[str, str]:
    """Lines of /proc/1/status as the supervisor reads them."""
    connection = await Connection.open(socket)
    try:
        header, _ = await connection.request({"op": "ping"}, timeout_s=10)
    finally:
        connection.close()
    status: dict[str, str] = header["status"]
    return status


def _options(name: str, lease: Path, folder: Path) -> dict[str, Any]:
    return {
        "name": name,
        "labels": {LABEL: str(lease)},
        "cap_drop": ["ALL"],
        "cap_add": list(_CAPABILITIES),
        "no_new_privileges": True,
        "unmasked_paths": ["ALL"],  # a cell may mount its own /proc only where this one is whole; cells mask theirs
        "network_mode": "none",
        "read_only": True,
        "read_write_tmpfs": False,
        "remove": True,
        "sdnotifyMode": "ignore",
        "log_config": {"Type": "none"},
        "shm_size": 1 << 20,
        "stop_timeout": 0,
        "ulimits": [{"Name": "core", "Soft": 0, "Hard": 0}, {"Name": "nofile", "Soft": 1024, "Hard": 1024}],
        "volumes": {
            str(folder / "control"): {"bind": CONTROL, "mode": "rw"},
            str(folder / "supervisor.zip"): {"bind": f"{CONTROL}.zip", "mode": "ro"},
        },
    }


def _create(client: Any, image: str, command: list[str], wanted: dict[str, Any]) -> dict[str, Any]:
    """Create, start and inspect."""
    container = client.containers.create(image, command, **wanted)
    container.start()
    container.reload()
    made: dict[str, Any] = container.attrs
    return made


def differences(wanted: dict[str, Any], made: dict[str, Any]) -> list[str]:
    """Where an inspected container is weaker than what was asked for."""
    host = made["HostConfig"]
    checks = [
        ("network", "none", host.get("NetworkMode")),
        ("read-only root", True, host.get("ReadonlyRootfs")),
        ("privileged", False, host.get("Privileged")),
        ("capabilities", {f"CAP_{name}" for name in wanted["cap_add"]}, set(made.get("BoundingCaps") or ())),
        ("label", wanted["labels"][LABEL], made["Config"]["Labels"].get(LABEL)),
        (
            "mounts",
            {(source, mount["bind"], mount["mode"] == "rw") for source, mount in wanted["volumes"].items()},
            {(mount["Source"], mount["Destination"], mount["RW"]) for mount in made["Mounts"]},
        ),
    ]
    return [f"{what}: asked {asked!r}, got {got!r}" for what, asked, got in checks if asked != got]


def _remove(client: Any, name: str) -> None:
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
