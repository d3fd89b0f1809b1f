"""Hosts in rootless Podman: one long-lived container each, with no network, a read-only root and its own ids.

The container keeps SYS_ADMIN, SETUID and SETGID inside its user namespace, because that is what makes Podman's own
seccomp profile permit the namespaces and mounts of cells, and what maps each cell to a user id of its own. No cell
keeps any of it. What was asked of Podman is checked against what it made, and a difference is an error: its API
ignores options that it does not know.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
from pathlib import Path
from typing import Any

from palaestra.envs.errors import SandboxUnavailable
from palaestra.envs.sandboxes.bundle import supervisor_zip
from palaestra.envs.sandboxes.cell_groups import HostGroups, open_groups
from palaestra.envs.sandboxes.connection import Connection
from palaestra.envs.sandboxes.host import answers, connect_lifeline
from palaestra.envs.sandboxes.images.own_python import OwnPython, own_python
from palaestra.envs.sandboxes.images.resolve import Image, default_image, named_image
from palaestra.envs.sandboxes.leases import Lease
from palaestra.envs.sandboxes.podman.container import CONTROL, Wanted, differences, limits_processes, status_differences
from palaestra.envs.sandboxes.podman.service import PodmanService
from palaestra.envs.sandboxes.protocol import SandboxSpec
from palaestra.envs.sandboxes.reap import reap, remove_container
from palaestra.envs.sandboxes.supervisor.interpreter import OWN_PREFIX
from palaestra.envs.sandboxes.supervisor.main import SOCKET_NAME

FIRST_CELL_ID = 10_000
"""Cells get the container's ids from here on, each its own."""
_KIND = "podman"
_HOSTS = "127.0.0.1 localhost cell\n::1 localhost\n"
"""/etc/hosts of a container: Podman's own would hold the names that this machine knows."""
_log = logging.getLogger(__name__)


class PodmanBackend:
    """Starts containers for one user, from one image, with one OCI runtime."""

    name = "podman"

    def __init__(self, spec: SandboxSpec) -> None:
        self._spec = spec
        self.service = PodmanService(spec.runtime)
        self._image: Image | None = None
        self._own: OwnPython | None = None
        self._python: str | None = None
        self._lift_pids = False
        self._preparing = asyncio.Lock()

    @property
    def image_digest(self) -> str | None:
        """``sha256:…`` of the image that hosts start from; None before the first one."""
        return None if self._image is None else self._image.digest

    async def start_host(self) -> PodmanHost:
        async with self._preparing:
            image = await self._prepare()
        host = PodmanHost(self.service, Lease(_KIND), self._spec.runtime)
        try:
            await self._start(host, image)
            host.groups = await open_groups(host.name, self._spec)
        except BaseException:
            await asyncio.shield(host.close())
            raise
        return host

    async def _start(self, host: PodmanHost, image: Image) -> None:
        """Start it, and see that its programs get the same Python as those of the hosts before."""
        python = await host.start(image, self._own, self._spec.preload, lift_pids=self._lift_pids)
        if self._python is None:
            _log.info("programs in %s run %s", image.name, python)
            self._python = python
        elif python != self._python:
            raise SandboxUnavailable(
                f"the python3 of {image.name} did not start in time, or did before: a new host would run {python}, "
                f"and others run {self._python}; is the machine overloaded?"
            )

    async def close(self) -> None:
        try:
            await self.service.close()
        finally:
            for held in (self._image, self._own):
                if held is not None:
                    held.claim.release()

    async def _prepare(self) -> Image:
        """Once a backend: what hosts start from."""
        if self._image is None:
            await reap(self.service)
            self._lift_pids = limits_processes(await self.service.call(lambda client: client.info(), repeatable=True))
            if self._spec.image is None:
                self._image = await default_image(self.service)
            else:
                self._own = self._own or await asyncio.to_thread(own_python)
                self._image = await named_image(self.service, self._spec.image, self._spec.pull)
        return self._image


class PodmanHost:
    """One container with its supervisor as PID 1."""

    def __init__(self, service: PodmanService, lease: Lease, runtime: str | None) -> None:
        self._service, self._lease, self._runtime = service, lease, runtime
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

    async def start(
        self, image: Image, own: OwnPython | None, preload: tuple[str, ...], *, lift_pids: bool = False
    ) -> str:
        """Create the container, compare it with what was asked, and wait for its supervisor; returns the path of the
        Python that it runs.

        ``own`` is the interpreter that is bound beside the image's files, where the image needs one.
        """
        folder = self._lease.folder
        (folder / "control").mkdir(mode=0o700)
        (folder / "supervisor.zip").write_bytes(supervisor_zip())
        (folder / "hosts").write_text(_HOSTS)
        (folder / "empty").mkdir(mode=0o755)
        binds = {
            # Cells mount their own file systems there, so the folders must exist, whatever the image has.
            "/workspace": (folder / "empty", False),
            "/tmp": (folder / "empty", False),
            CONTROL: (folder / "control", True),
            f"{CONTROL}.zip": (folder / "supervisor.zip", False),
            "/etc/hosts": (folder / "hosts", False),
        }
        if own is not None:
            binds[OWN_PREFIX] = (own.folder, False)
        command = (image.interpreter, "-I", "-S", f"{CONTROL}.zip", CONTROL, str(FIRST_CELL_ID), *preload)
        wanted = Wanted(self.name, self._lease.file, image.image_id, command, binds, self._runtime, lift_pids)
        try:
            made = await self._service.call(lambda client: _create(client, wanted))
        except SandboxUnavailable as error:
            if self._runtime is None:
                raise
            raise SandboxUnavailable(f"with the OCI runtime {self._runtime!r}: {error}") from error
        _check(differences(wanted, made, _runtime_config(made)))
        process = Path("/proc", str(made["State"]["Pid"]))
        self._lifeline = await connect_lifeline(self.socket, lambda: _why_it_ended(process, image))
        status, python = await supervisor_status(self.socket)
        _check(status_differences(status))
        return python

    @property
    def ended(self) -> bool:
        return self._closed or (self._lifeline is not None and self._lifeline.lost)

    async def healthy(self) -> bool:
        return not self.ended and await answers(self.socket)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            if self._lifeline is not None:
                self._lifeline.close()  # the supervisor, and so the container, ends at once
            await self._service.call(functools.partial(remove_container, name=self.name), repeatable=True)
        finally:
            try:
                if self.groups is not None:
                    await self.groups.close()
            finally:
                self._lease.release()


async def supervisor_status(socket: Path) -> tuple[dict[str, str], str]:
    """Lines of /proc/1/status as the supervisor reads them, and the path of its interpreter."""
    connection = await Connection.open(socket)
    try:
        header, _ = await connection.request({"op": "ping"}, timeout_s=10)
    finally:
        connection.close()
    return header["status"], header["python"]


def _create(client: Any, wanted: Wanted) -> dict[str, Any]:
    """Create, start and inspect."""
    container = client.containers.create(wanted.image_id, list(wanted.command[1:]), **wanted.options())
    container.start()
    container.reload()
    made: dict[str, Any] = container.attrs
    return made


def _runtime_config(made: dict[str, Any]) -> dict[str, Any]:
    """What Podman handed to the OCI runtime."""
    file = made.get("OCIConfigPath", "")
    try:
        config: dict[str, Any] = json.loads(Path(file).read_text())
    except (OSError, ValueError) as error:
        raise SandboxUnavailable(f"cannot read what Podman gave to its runtime ({file!r}): {error}") from error
    return config


def _check(problems: list[str]) -> None:
    if problems:
        raise SandboxUnavailable("Podman made another container than it was asked for: " + "; ".join(problems))


def _why_it_ended(process: Path, image: Image) -> str | None:
    if process.exists():
        return None
    return f"the first process of a container from {image.name} ended at once; can the image run on this machine?"
