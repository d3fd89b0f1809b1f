"""Podman's API service and command line, each call with a deadline.

The service is started when it is needed and ends by itself after a few idle seconds, so a killed owner leaves none.
Steps never pass through it: it creates, inspects and removes the containers that host cells, and no more. One that
died, or is silent (it waits for a lock, has no file descriptor left, was stopped), is replaced before the next call;
ending it is also what frees the thread of a call that hangs.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import importlib.util
import logging
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from palaestra.envs.errors import SandboxBusy, SandboxUnavailable
from palaestra.envs.sandboxes.host import HOST_STARTS, check_own_descriptors
from palaestra.envs.sandboxes.leases import Lease
from palaestra.envs.sandboxes.processes import kill_with_children
from palaestra.envs.sandboxes.waiting import back_off, to_the_end

SERVICE_KIND = "service"
"""What the leases of services are called; all others are those of hosts."""
_IDLE_S = 5
_CALL_S = 60.0
_START_S = 20.0
_PING_S = 10.0
_END_S = 5.0
_REPEATS = 3
_BACK_OFF_S = 0.1
_T = TypeVar("_T")
_log = logging.getLogger(__name__)


_KEPT = ("PATH", "HOME", "USER", "XDG_RUNTIME_DIR")
_FOR_REGISTRIES = ("CONTAINERS_REGISTRIES_CONF", "REGISTRY_AUTH_FILE", "DOCKER_CONFIG", "SSL_CERT_FILE", "SSL_CERT_DIR")
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy")


def environment() -> dict[str, str]:
    """What Podman needs of our environment, to reach registries too, and nothing that would change containers."""
    kept = {name: os.environ[name] for name in (*_KEPT, *_FOR_REGISTRIES, *_PROXIES) if name in os.environ}
    return {**kept, "PODMAN_IGNORE_CGROUPSV1_WARNING": "1", "LC_ALL": "C.UTF-8"}


class PodmanService:
    """One user's Podman, with a socket of its own. Raises ``SandboxUnavailable`` at once where it cannot work."""

    def __init__(self, runtime: str | None = None) -> None:
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
        self._program = program
        self._lease = Lease(SERVICE_KIND)
        self._socket = self._lease.folder / "api.sock"
        # The API takes no runtime for a container: it accepts the option and ignores it.
        self._options = () if runtime is None else (f"--runtime={runtime}",)
        self._process: asyncio.subprocess.Process | None = None
        self._starting = asyncio.Lock()
        self._free = asyncio.Semaphore(HOST_STARTS)
        self._threads = _Threads(HOST_STARTS)

    async def call(self, function: Callable[[Any], _T], *, repeatable: bool = False, timeout_s: float = _CALL_S) -> _T:
        """``function(client)`` with a ``podman.PodmanClient``, in a thread; a few such calls at a time.

        Raises ``SandboxBusy`` when the service died, was locked or was silent for ``timeout_s``, after a few attempts
        where the function is ``repeatable`` (doing it twice is as good as once), else ``SandboxUnavailable``. A
        cancelled caller waits for the end of its call, so that nothing is created behind its back.
        """
        for attempt in range(_REPEATS):
            try:
                async with self._free:
                    return await to_the_end(asyncio.create_task(self._call(function, timeout_s)))
            except SandboxBusy as error:
                if not repeatable or attempt == _REPEATS - 1:
                    raise
                _log.info("a call of Podman's is repeated: %s", error)
            await back_off(attempt, base_s=_BACK_OFF_S)
        raise AssertionError("unreachable")

    async def close(self) -> None:
        """End the service. Idempotent."""
        self._threads.close()
        process, self._process = self._process, None
        try:
            if process is not None and process.returncode is None:
                process.terminate()
                await asyncio.wait([asyncio.ensure_future(process.wait())], timeout=_END_S)
                await end_process(process)
        finally:
            self._lease.release()

    async def _call(self, function: Callable[[Any], _T], timeout_s: float) -> _T:
        if "podman" not in sys.modules:
            await asyncio.wrap_future(self._threads.submit(self._import_client))
        process = await self._ensure_running()
        work = asyncio.wrap_future(self._threads.submit(functools.partial(self._with_client, function, timeout_s)))
        if not (await asyncio.wait([work], timeout=timeout_s))[0]:
            _log.warning("Podman's API service is silent and is ended")
            await end_process(process)
            await asyncio.wait([work], timeout=_END_S)
            if not work.done():
                work.cancel()
                raise SandboxBusy(f"Podman did not answer within {timeout_s:.0f} s, and its service was ended")
        return work.result()

    def _import_client(self) -> None:
        import podman.errors  # noqa: F401 - takes seconds on a busy machine, in which an idle service would end

    def _with_client(self, function: Callable[[Any], _T], timeout_s: float) -> _T:
        import podman
        import podman.errors
        import requests

        try:
            with podman.PodmanClient(base_url=f"unix://{self._socket}", timeout=timeout_s + _END_S) as client:
                return function(client)
        except (podman.errors.PodmanError, podman.errors.APIError) as error:
            if isinstance(error.__cause__, OSError):  # as the client reports a connection that failed
                raise SandboxBusy(f"Podman's API service ended or did not answer: {error.__cause__}") from error
            kind = SandboxBusy if any(sign in str(error) for sign in _BUSY) else SandboxUnavailable
            raise kind(f"Podman refused: {error}{cure(str(error))}") from error
        except (requests.RequestException, OSError) as error:
            raise SandboxBusy(f"Podman's API service ended or did not answer: {error}") from error

    async def _ensure_running(self) -> asyncio.subprocess.Process:
        """The process of a service that answers."""
        async with self._starting:
            process = self._process
            if process is not None:
                if process.returncode is None and await self._answers():
                    return process
                await end_process(process)
            self._socket.unlink(missing_ok=True)
            process = self._process = await self._spawn()
            deadline = time.monotonic() + _START_S
            while not await self._answers():
                if process.returncode is not None or time.monotonic() > deadline:
                    text = self._socket.with_suffix(".log").read_text("utf-8", "replace").strip()
                    await end_process(process)
                    raise SandboxUnavailable(f"Podman's API service did not start: {text[-500:]}{cure(text)}")
                await asyncio.sleep(0.02)
            return process

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

    async def _answers(self) -> bool:
        """Whether the service replies to a ping. Accepting is not enough: a stopped process does that, too."""
        try:
            async with asyncio.timeout(_PING_S):
                reader, writer = await asyncio.open_unix_connection(str(self._socket))
                try:
                    writer.write(b"GET /_ping HTTP/1.0\r\nHost: podman\r\n\r\n")
                    return (await reader.read(64)).startswith(b"HTTP/1.")
                finally:
                    writer.close()
        except OSError as error:  # a TimeoutError is one
            check_own_descriptors(error)
            return False


class _Threads:
    """A few threads of our own: at the end of the process, when pools are closed, executors take no more work."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def submit(self, function: Callable[[], _T]) -> concurrent.futures.Future[_T]:
        if len(self._threads) < self._most:
            thread = threading.Thread(target=self._serve, name="palaestra-podman", daemon=True)
            try:
                thread.start()
                self._threads.append(thread)
            except RuntimeError:  # no more threads, as at the end of the process; the ones that there are will do
                if not self._threads:
                    raise
        outcome: concurrent.futures.Future[_T] = concurrent.futures.Future()
        self._calls.put(functools.partial(_settle, outcome, function))
        return outcome

    def close(self) -> None:
        for _ in self._threads:
            self._calls.put(None)
        self._threads.clear()

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            call()


async def end_process(process: asyncio.subprocess.Process) -> None:
    """Kill a process of Podman's, with what it started, and wait for it, not for ever."""
    if process.returncode is None:
        kill_with_children(process.pid)
        if not (await asyncio.wait([asyncio.ensure_future(process.wait())], timeout=_END_S))[0]:
            _log.warning("process %d of Podman's was killed and does not end", process.pid)


def _settle(outcome: concurrent.futures.Future[_T], function: Callable[[], _T]) -> None:
    """Run the function and hand over what it returns or raises."""
    if not outcome.set_running_or_notify_cancel():
        return
    try:
        outcome.set_result(function())
    except BaseException as error:  # noqa: BLE001 - the caller raises it
        outcome.set_exception(error)


_BUSY = ("database is locked", "resource temporarily unavailable", "Resource temporarily unavailable")
"""Messages of a Podman that works otherwise: other calls of the same user were in its way."""
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
