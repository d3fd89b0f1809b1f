"""What a sandbox promises, whatever backs it.

A **host** (one long-lived container or bubblewrap process with the supervisor as PID 1) holds many **cells**. A
``Sandbox`` is one cell: what an episode gets. It has its own pid, mount, ipc, network and uts namespaces, fresh
size-limited tmpfs on ``/workspace``, ``/tmp`` and ``/dev/shm``, rlimits, a seccomp filter and no capabilities.

Guarantees
----------
* ``run`` returns no later than ``timeout_s`` plus a small grace, with every process of the cell that the command
  started dead, whatever the command did.
* What the program did to its own cell (deadline, memory, pids, disk, output) comes back as an ``ExecResult``.
  Only failures that are not its doing raise, as ``InfrastructureError``.
* A cell lives as long as its connection: when the owner dies, even by SIGKILL, its cells die with it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, Protocol, Self, get_args

from palaestra.envs.errors import UsageError
from palaestra.envs.sandboxes.egress.allow_list import parse_target
from palaestra.envs.sandboxes.images.names import full_image_name

KilledBy = Literal["deadline", "output", "memory", "cell"]
PullPolicy = Literal["missing", "always", "newer", "never"]
_RUNTIME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*|/[^\0]+")


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """What a cell is made of and limited to. Limits are the kernel's; ``palaestra doctor`` says which ones hold here.

    A value that cannot be raises ``UsageError``.
    """

    memory_mib: int = 512
    """Memory of the whole cell, its files in tmpfs included, where a control group is delegated to us; and everywhere
    the address space of each of its processes, unless ``address_space_mib`` says otherwise."""
    address_space_mib: int | None = None
    """Address space of one process (RLIMIT_AS); None: ``memory_mib``. Some runtimes (node, the JVM) reserve far more
    than they use."""
    cpus: float | None = None
    """CPU time of the whole cell, in cores, where a control group is delegated to us. None: no bound."""
    pids: int = 64
    """Processes and threads of the cell."""
    file_mib: int = 32
    """Largest file a program may write (RLIMIT_FSIZE)."""
    workspace_mib: int = 64
    """Size of ``/workspace`` and of ``/tmp``, each."""
    inodes: int = 20_000
    """Files and folders in ``/workspace`` and in ``/tmp``, each."""
    open_files: int = 128
    """Open file descriptors of one process."""
    cpu_s: int = 60
    """CPU seconds of one process."""
    output_kib: int = 64
    """Kept of each of stdout and stderr (first and last half); the rest is counted and dropped."""
    preload: tuple[str, ...] = ()
    """Standard-library modules that a forked interpreter finds already imported."""
    network: Literal["loopback", "none"] = "loopback"
    """``"loopback"``: 127.0.0.1 and ::1 of the cell's own; ``"none"``: not even these."""
    egress: tuple[str, ...] = ()
    """``"host:port"`` of what the cell may reach through Palaestra's proxy; empty, the default: nothing."""
    image: str | None = None
    """A container image by its whole name (``docker.io/library/python:3.12-slim``), for Podman; None: this machine's
    Python."""
    pull: PullPolicy = "missing"
    """When ``image`` is fetched from its registry: if it is not here; always; always, but going on with what is here if
    the registry does not answer; never."""
    runtime: str | None = None
    """The OCI runtime of Podman's containers: a name (``crun``, ``runc``, ``runsc``, ``krun``, ``kata``) or an absolute
    path; None: Podman's own choice."""

    def __post_init__(self) -> None:
        least_values = {"memory_mib": 16, "pids": 1, "file_mib": 1, "workspace_mib": 1, "inodes": 16}
        least_values |= {"open_files": 16, "cpu_s": 1, "output_kib": 1}
        for name, least in least_values.items():
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise UsageError(f"SandboxSpec.{name} must be an int of at least {least}, got {value!r}")
        if self.address_space_mib is not None and self.address_space_mib < 16:
            raise UsageError(f"SandboxSpec.address_space_mib must be at least 16, got {self.address_space_mib!r}")
        if self.cpus is not None and not 0.01 <= self.cpus <= 4096:
            raise UsageError(f"SandboxSpec.cpus must be from 0.01 to 4096 cores, got {self.cpus!r}")
        for name, choices in (("network", ("loopback", "none")), ("pull", get_args(PullPolicy))):
            if getattr(self, name) not in choices:
                raise UsageError(f"SandboxSpec.{name}={getattr(self, name)!r} is not one of {', '.join(choices)}")
        if self.image is not None:
            full_image_name(self.image)
        if self.runtime is not None and not _RUNTIME.fullmatch(self.runtime):
            raise UsageError(f"SandboxSpec.runtime={self.runtime!r} is neither a name like 'crun' nor an absolute path")
        if self.egress and self.network == "none":
            raise UsageError("SandboxSpec.egress needs network='loopback': the proxy is reached over it")
        if not isinstance(self.egress, tuple):
            raise UsageError(f"SandboxSpec.egress must be a tuple of 'host:port', got {self.egress!r}")
        for target in self.egress:
            try:
                parse_target(target)
            except UsageError as error:
                raise UsageError(f"SandboxSpec.egress: {error}") from None


@dataclass(frozen=True, slots=True)
class ExecResult:
    """What one command did. Bytes as the program wrote them; ``stdout_text`` and ``stderr_text`` decode them."""

    exit_code: int | None
    """None when a signal ended it, or when the supervisor killed it."""
    signal: int | None
    stdout: bytes
    stderr: bytes
    stdout_dropped_bytes: int
    """Bytes cut out of the middle of stdout; 0 when it is complete."""
    stderr_dropped_bytes: int
    result: bytes
    """What the program wrote to file descriptor 3 (the result channel), at most ``result_kib``."""
    result_truncated: bool
    wall_s: float
    cpu_s: float
    """Of all its processes, those that had no parent left included."""
    peak_memory_mib: float
    """Largest resident set of any one of its processes; the start-up of each takes about 10 MiB."""
    timed_out: bool
    killed_by: KilledBy | None
    """Why it did not end by itself: deadline, output flood, the cell itself broke, or ``"memory"``: the kernel killed
    it, or the last command of its shell (which then says 137), because the memory of the whole cell was used up."""
    orphans_killed: int
    """Processes that were still alive when the command had ended, or was ended."""
    oom_kills: int = 0
    """Processes that the kernel killed because the memory of the whole cell was used up. Where some were and
    ``killed_by`` is None, the command went on without them. Always 0 where no control group is delegated to us."""

    @property
    def ok(self) -> bool:
        """Ended by itself with exit code 0."""
        return self.exit_code == 0 and not self.timed_out and self.killed_by is None

    @property
    def stdout_text(self) -> str:
        return _text(self.stdout, self.stdout_dropped_bytes)

    @property
    def stderr_text(self) -> str:
        return _text(self.stderr, self.stderr_dropped_bytes)


def _text(data: bytes, dropped_bytes: int) -> str:
    """Decode as UTF-8 with replacement; where bytes were dropped from the middle, say so there."""
    if not dropped_bytes:
        return data.decode("utf-8", "replace")
    half = len(data) // 2
    head, tail = data[:half].decode("utf-8", "replace"), data[half:].decode("utf-8", "replace")
    return f"{head}\n[... {dropped_bytes} bytes not shown ...]\n{tail}"


@dataclass(frozen=True, slots=True)
class Argv:
    """A program with its arguments, found on the cell's PATH."""

    argv: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Shell:
    """A command line for ``/bin/sh``; in a session, for bash where the cell has it.

    Commands of one ``session`` go on where the one before ended: working directory, variables, functions, aliases,
    shell options and umask, kept by name for as long as the cell lives. Without bash, ``/bin/sh`` keeps working
    directory and exported variables. Processes, traps and open files are not kept. A command that is killed (deadline,
    limits, ``kill -9 $$``), or whose shell is replaced (``exec``), leaves the session as it was before.

    A name has 1 to 64 characters, and a cell keeps 16 sessions, else ``UsageError``. One whose state would exceed
    1 MiB stays as it was, and the command's stderr says so.
    """

    command: str
    session: str | None = None


@dataclass(frozen=True, slots=True)
class Python:
    """Python source, run as ``__main__``.

    ``interpreter="new"`` starts the cell's python3 afresh. ``"fork"`` forks the supervisor's pre-imported one, which
    saves the start-up; nothing secret may ever have entered it. Both see ``/workspace`` as working directory.
    """

    code: str
    interpreter: Literal["new", "fork"] = "new"


Command = Argv | Shell | Python


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The files of a cell's ``/workspace`` at one moment: an uncompressed tar, made by ``Sandbox.snapshot``."""

    tar: bytes = field(repr=False)


class Sandbox(Protocol):
    """One cell. Every method may raise ``SandboxDied``; none is safe to call twice at once on one cell."""

    @property
    def broken(self) -> bool:
        """The cell no longer answers: its connection was lost, or a request broke it. ``renew`` makes it whole.

        Until then ``run`` answers ``killed_by="cell"`` and the files of the cell are gone.
        """

    async def run(
        self,
        command: Command,
        *,
        timeout_s: float,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        result_kib: int = 0,
    ) -> ExecResult:
        """Run one command to its end, then kill whatever it left behind.

        ``timeout_s`` is at most a day (86,400), else ``UsageError``. ``stdin`` may be of any size: it is passed on as
        the command reads it. ``result_kib`` > 0 opens file descriptor 3 for writing and returns up to that much of
        what it carried. The host keeps a deadline of its own behind the supervisor's.
        """

    async def write(self, files: Mapping[str, bytes]) -> None:
        """Write files, paths relative to ``/workspace``; folders are made; ``..`` and absolute paths are refused.

        A file that does not fit in the cell raises ``CellFull``.
        """

    async def read(self, path: str, *, max_bytes: int = 1 << 20) -> bytes:
        """One regular file of ``/workspace``; symbolic links are not followed.

        Raises FileNotFoundError where there is none that can be read, ``CellFull`` when it exceeds ``max_bytes``.
        """

    async def renew(self, snapshot: Snapshot | None = None) -> None:
        """Replace the cell by a fresh one in the same host, with the snapshot's files in it when one is given."""

    async def snapshot(self) -> Snapshot:
        """The files of ``/workspace``, and nothing else, for ``renew``."""

    async def close(self) -> None:
        """Give the cell back. Idempotent; after it the cell's processes and files no longer exist."""


class SandboxPool(Protocol):
    """Hands out cells of one spec; warm ones where it can."""

    async def acquire(self) -> Sandbox:
        """A fresh, healthy cell. Raises ``SandboxUnavailable`` when no host can be started."""

    async def close(self) -> None:
        """Close every cell and host. Each stage runs even when an earlier one raises."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None: ...
