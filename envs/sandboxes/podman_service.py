"""Podman's API service and command line, each call with a deadline.

The service is started when it is needed and ends by itself after a few idle seconds, so a killed owner leaves none.
Steps never pass through it: it creates, inspects and removes the containers that host cells, and no more.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import importlib.util
import os
import queue
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from palaestra.envs.errors import SandboxUnavailable

_IDLE_S = 5
_CALL_S = 60
_START_S = 20
_T = TypeVar("_T")


_KEPT = ("PATH", "HOME", "USER", "XDG_RUNTIME_DIR")
_FOR_REGISTRIES = ("CONTAINERS_REGISTRIES_CONF", "REGISTRY_AUTH_FILE", "DOCKER_CONFIG", "SSL_CERT_FILE", "SSL_CERT_DIR")
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy")


def environment() -> dict[str, str]:
    """What Podman needs of our environment, to reach registries too, and nothing that would change containers."""
    kept = {name: os.environ[name] for name in (*_KEPT, *_FOR_REGISTRIES, *_PROXIES) if name in os.environ}
    return {**kept, "PODMAN_IGNORE_CGROUPSV1_WARNING": "1", "LC_ALL": "C.UTF-8"}


class PodmanService:
    """One user's Podman. Raises ``SandboxUnavailable`` at once where it cannot work."""

    def __init__(self, socket: Path, runtime: str | None = None) -> None:
        if os.getuid() == 0:
            raise SandboxUnavailable(
                "sandboxes use rootless Podman only, and this process is root: run as an ordinary user "
                "(or use backend='bubblewrap', which drops its privileges itself)"
            )
        program = shutil.which("podman")
        if program is None:
            raise SandboxUnavailable("there is no podman command; run: apt-get install podman crun uidmap")
        if importlib.util.find_spec("podman") is None:
            raise SandboxUnavailable("the Python client of Podman is missing; run: pip install 'palaestra[podman]'")
        self._program, self._socket = program, socket
        # The API takes no runtime for a container: it accepts the option and ignores it.
        self._options = () if runtime is None else (f"--runtime={runtime}",)
        self._process: asyncio.subprocess.Process | None = None
        self._starting = asyncio.Lock()
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._caller: threading.Thread | None = None

    async def call(self, function: Callable[[Any], _T]) -> _T:
        """``function(client)`` with a ``podman.PodmanClient``, in a thread, one call after the other.

        A cancelled caller waits for the end of its call, so that nothing is created behind its back.
        """
        await self._ensure_running()
        if self._caller is None:
            # A thread of our own: at the end of the process, when pools are closed, executors take no more work.
            self._caller = threading.Thread(target=self._serve_calls, name="palaestra-podman", daemon=True)
            self._caller.start()
        outcome: concurrent.futures.Future[_T] = concurrent.futures.Future()
        self._calls.put(functools.partial(_settle, outcome, functools.partial(self._with_client, function)))
        work = asyncio.wrap_future(outcome)
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.wait([work])
            raise

    async def close(self) -> None:
        """End the service. Idempotent."""
        if self._caller is not None:
            self._calls.put(None)
            self._caller = None
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()
            try:
                async with asyncio.timeout(5):
                    await self._process.wait()
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
        self._process = None

    def _serve_calls(self) -> None:
        while (call := self._calls.get()) is not None:
            call()

    def _with_client(self, function: Callable[[Any], _T]) -> _T:
        import podman
        import podman.errors
        import requests

        try:
            with podman.PodmanClient(base_url=f"unix://{self._socket}", timeout=_CALL_S) as client:
                return function(client)
        except (podman.errors.PodmanError, podman.errors.APIError, requests.RequestException, OSError) as error:
            raise SandboxUnavailable(f"Podman refused: {error}{cure(str(error))}") from error

    async def _ensure_running(self) -> None:
        async with self._starting:
            if self._process is not None and self._process.returncode is None and await self._accepts():
                return
            self._socket.unlink(missing_ok=True)
            self._process = await self._spawn()
            deadline = time.monotonic() + _START_S
            while not await self._accepts():
                if self._process.returncode is not None or time.monotonic() > deadline:
                    text = self._socket.with_suffix(".log").read_text("utf-8", "replace").strip()
                    await self.close()
                    raise SandboxUnavailable(f"Podman's API service did not start: {text[-500:]}{cure(text)}")
                await asyncio.sleep(0.02)

    async def _spawn(self) -> asyncio.subprocess.Process:
        log = os.open(self._socket.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            return await asyncio.create_subprocess_exec(
                self._program,
                *self._options,
                "system",
                "service",
                f"--time={_IDLE_S}",
                f"unix://{self._socket}",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # an interrupt at the terminal is for us, who then close it in order
                env=environment(),
            )
        finally:
            os.close(log)

    async def _accepts(self) -> bool:
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_unix_connection(str(self._socket))
            writer.close()
            return True
        return False


def _settle(outcome: concurrent.futures.Future[_T], function: Callable[[], _T]) -> None:
    """Run the function and hand over what it returns or raises."""
    if not outcome.set_running_or_notify_cancel():
        return
    try:
        outcome.set_result(function())
    except BaseException as error:  # noqa: BLE001 - the caller raises it
        outcome.set_exception(error)


_HUGETLB = "/sys/fs/cgroup/hugetlb"
_CURES = (
    ("hybrid mode", f"as root run: mkdir -p {_HUGETLB} && mount -t cgroup -o hugetlb cgroup {_HUGETLB}"),
    (
        "write to uid_map failed",
        "see `make podman`: newuidmap is refused here, as in a container without CAP_SYS_ADMIN",
    ),
    ("newuidmap", "install the package uidmap"),
    ("subuid", "as root run: usermod --add-subuids 100000-165535 --add-subgids 100000-165535 USER"),
    ("insufficient UIDs", "give the user more ids in /etc/subuid and /etc/subgid, then run: podman system migrate"),
    ("keyring", "put `keyring = false` under [containers] in ~/.config/containers/containers.conf"),
    ("/dev/net/tun", "no network is needed; is --network=none being overridden in containers.conf?"),
    ("OCI runtime", "install that runtime, or give its path in containers.conf under [engine.runtimes]"),
    ("XDG_RUNTIME_DIR", "set XDG_RUNTIME_DIR to a folder of your own with mode 0700"),
)


def cure(text: str) -> str:
    """What to do about a message of Podman's, where it is a known one."""
    for sign, advice in _CURES:
        if sign in text:
            return f"\n{advice[0].upper()}{advice[1:]}"
    return ""
