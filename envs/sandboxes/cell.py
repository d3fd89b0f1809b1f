"""The owner's end of a cell: ``Sandbox`` over one connection to a supervisor."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import Iterator, Mapping
from typing import Any

from palaestra.envs.errors import CellFull, SandboxDied, UsageError
from palaestra.envs.sandboxes.connection import Connection, Reply
from palaestra.envs.sandboxes.egress.allow_list import AllowList
from palaestra.envs.sandboxes.egress.handover import serve_proxy
from palaestra.envs.sandboxes.handshake import begin
from palaestra.envs.sandboxes.host import Host, check_own_descriptors
from palaestra.envs.sandboxes.protocol import Argv, Command, ExecResult, KilledBy, Python, SandboxSpec, Shell, Snapshot
from palaestra.envs.sandboxes.supervisor.frames import MalformedFrame
from palaestra.envs.sandboxes.supervisor.session import MAX_SESSIONS

GRACE_S = 5.0
"""How long past a command's own deadline the owner waits for the supervisor before it gives the cell up."""
MAX_TIMEOUT_S = 86_400.0
_FILES_S = 30.0
_CHUNK_BYTES = 4 << 20
"""A frame takes twice its size of the cell's memory while it is written to files."""
_FILES_A_FRAME = 1000
_SESSION_NAME_CHARS = 64
_MIB = 1 << 20
_CANNOT_EXECUTE = 126
"""A shell's exit code for a command that it cannot start."""
_SHELL_SIGKILL = 128 + signal.SIGKILL
"""A shell's exit code when its last command was killed."""


def opening(spec: SandboxSpec) -> dict[str, Any]:
    """The first frame of a cell: its limits."""
    return {
        "op": "open",
        "address_space_bytes": (spec.address_space_mib or spec.memory_mib) * _MIB,
        "pids": spec.pids,
        "file_bytes": spec.file_mib * _MIB,
        "workspace_bytes": spec.workspace_mib * _MIB,
        "inodes": spec.inodes,
        "open_files": spec.open_files,
        "cpu_s": spec.cpu_s,
        "output_bytes": spec.output_kib * 1024,
        "network": spec.network,
        "proxy": bool(spec.egress),
    }


async def open_cell(host: Host, spec: SandboxSpec) -> Connection:
    """Make a cell in the host. Raises ``SandboxDied`` when the host cannot, ``SandboxBusy`` when we cannot."""
    try:
        group = None if host.groups is None else host.groups.make()
        try:
            with contextlib.nullcontext(()) if group is None else group.join_files() as join_files:
                connection, answer, received = await begin(
                    host.socket, opening(spec), timeout_s=_FILES_S, descriptors=join_files
                )
        except BaseException:
            if group is not None:
                group.retire()
            raise
        if group is not None:
            connection.group = group
            connection.at_end(group.retire)
        if "error" in answer or not spec.egress:
            for descriptor in received:
                os.close(descriptor)
        if "error" in answer:
            connection.close()
            raise SandboxDied(f"no cell could be made: {answer['text']}")
        if spec.egress:
            await serve_proxy(connection, received, AllowList(spec.egress))
    except OSError as error:
        check_own_descriptors(error)
        raise SandboxDied(f"no cell could be made: {error or 'the supervisor did not answer in time'}") from error
    return connection


class Cell:
    """One cell. See ``Sandbox`` for what the methods promise.

    A cell that its own program broke (its init process ended while the host is healthy) stays broken: ``run`` answers
    ``killed_by="cell"`` and files cannot be used, until ``renew``. Once the host is found dead, everything raises
    ``SandboxDied``.
    """

    def __init__(self, host: Host, spec: SandboxSpec, connection: Connection) -> None:
        self.host, self._spec, self._connection = host, spec, connection
        self._broken = False
        self._host_ended = False
        self._closed = False
        self._sessions: set[str] = set()

    @property
    def broken(self) -> bool:
        return self._broken or self._connection.lost

    async def run(
        self,
        command: Command,
        *,
        timeout_s: float,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        result_kib: int = 0,
    ) -> ExecResult:
        if not 0 < timeout_s <= MAX_TIMEOUT_S:  # NaN as well
            raise UsageError(f"timeout_s must be above 0 and at most {MAX_TIMEOUT_S:,.0f} (one day); got {timeout_s}")
        if result_kib < 0:
            raise UsageError(f"result_kib must not be negative; got {result_kib}")
        self._check_open()
        if self._broken:
            return _killed("cell", timed_out=False, wall_s=0.0, oom_kills=0)
        header, source = _describe(command)
        if isinstance(command, Shell) and command.session is not None:
            self._check_session(command.session)
        header |= {"op": "run", "timeout_s": timeout_s, "env": dict(env or {}), "result_bytes": result_kib * 1024}
        header["stdin_bytes"] = len(stdin)
        most = 2 * self._spec.output_kib * 1024 + header["result_bytes"] + _MIB
        started = time.monotonic()
        try:
            reply, blobs = await self._connection.request(
                header, (source,), timeout_s=timeout_s + GRACE_S, max_reply_bytes=most, trailer=stdin
            )
            if "error" in reply:  # the command could not be started or watched; nothing is known of what it did
                raise SandboxDied(f"the cell could not serve the command: {reply['text']}")
        except MalformedFrame as error:  # nothing was sent; far less is too long for execve(2) as well
            return _not_started(f"the command and its environment are too long: {error}")
        except (SandboxDied, TimeoutError) as error:
            timed_out = isinstance(error, TimeoutError)
            wall_s = time.monotonic() - started
            oom_kills = await self._attribute(error)
            killed_by: KilledBy = "deadline" if timed_out else "memory" if oom_kills else "cell"
            return _killed(killed_by, timed_out=timed_out, wall_s=wall_s, oom_kills=oom_kills)
        return _with_oom_kills(_result(reply, blobs), self._oom_kills())

    async def write(self, files: Mapping[str, bytes]) -> None:
        for path in files:
            _check_path(path)
        if sum(map(len, files.values())) > self._spec.workspace_mib * _MIB:
            raise CellFull(f"the files do not fit in {self._spec.workspace_mib} MiB; raise SandboxSpec.workspace_mib")
        for paths, blobs, append in _frames(files):
            header = {"op": "write", "paths": paths, "append": append}
            reply, _ = await self._file_request(header, blobs)
            if "error" in reply:
                raise CellFull(f"cannot write into the cell: {reply['text']}")

    async def read(self, path: str, *, max_bytes: int = 1 << 20) -> bytes:
        _check_path(path)
        header = {"op": "read", "path": path, "max_bytes": max_bytes}
        reply, blobs = await self._file_request(header, max_reply_bytes=max_bytes + _MIB)
        if "error" in reply:
            raise FileNotFoundError(reply["errno"], f"no readable regular file in the cell: {reply['text']}", path)
        if reply["size"] > max_bytes:
            raise CellFull(f"{path} has {reply['size']} bytes, more than max_bytes={max_bytes}")
        return blobs[0]

    async def renew(self, snapshot: Snapshot | None = None) -> None:
        self._check_not_closed()
        fresh = await open_cell(self.host, self._spec)
        try:
            self._check_not_closed()  # it may have been meanwhile
        except UsageError:
            fresh.close()
            raise
        self._connection.close()
        self._connection, self._broken, self._host_ended = fresh, False, False
        self._sessions.clear()
        if snapshot is not None:
            reply, _ = await self._file_request({"op": "unpack"}, (snapshot.tar,))
            if "error" in reply:
                raise CellFull(f"the snapshot does not fit in the cell: {reply['text']}")

    async def snapshot(self) -> Snapshot:
        most = 2 * self._spec.workspace_mib * _MIB + 4096 * self._spec.inodes
        reply, blobs = await self._file_request({"op": "pack", "max_bytes": most - _MIB}, max_reply_bytes=most)
        if "error" in reply:
            raise CellFull(f"the workspace cannot be read: {reply['text']}")
        return Snapshot(blobs[0])

    async def close(self) -> None:
        self._closed = True
        self._connection.close()

    def _check_not_closed(self) -> None:
        if self._closed:
            raise UsageError("the sandbox is closed; acquire another one from the pool")

    def _check_open(self) -> None:
        self._check_not_closed()
        if self._host_ended:
            raise SandboxDied("the sandbox host has ended; acquire another sandbox from the pool")

    def _check_session(self, name: str) -> None:
        if not 0 < len(name) <= _SESSION_NAME_CHARS:
            raise UsageError(f"a session's name has 1 to {_SESSION_NAME_CHARS} characters; got {name[:80]!r}")
        if name not in self._sessions and len(self._sessions) == MAX_SESSIONS:
            raise UsageError(f"a cell keeps at most {MAX_SESSIONS} sessions; renew it, or go on with one of them")
        self._sessions.add(name)

    async def _file_request(
        self, header: dict[str, Any], blobs: tuple[bytes, ...] = (), max_reply_bytes: int = 1 << 16
    ) -> Reply:
        self._check_open()
        if self._broken:
            raise CellFull("the program broke its cell; its files are gone until the sandbox is renewed")
        try:
            return await self._connection.request(header, blobs, timeout_s=_FILES_S, max_reply_bytes=max_reply_bytes)
        except MalformedFrame as error:  # nothing was sent
            raise CellFull(f"the names or contents of the files are too long: {error}") from None
        except (SandboxDied, TimeoutError) as error:
            if await self._attribute(error):
                problem = f"the cell ran out of memory and broke; raise SandboxSpec.memory_mib={self._spec.memory_mib}"
                raise CellFull(problem) from error
            raise CellFull(f"the program broke its cell: {error}") from error

    async def _attribute(self, error: Exception) -> int:
        """The cell is lost: it is the program's doing if the host is healthy, else ``SandboxDied``.

        How many of its processes were killed for the memory of the cell.
        """
        self._broken = True
        self._connection.close()
        if self._connection.broke_protocol:
            self._host_ended = True
            raise SandboxDied(f"the sandbox host is at fault: {error}") from error
        oom_kills = self._oom_kills()
        if not await self.host.healthy():
            self._host_ended = True
            raise SandboxDied(f"the sandbox host ended: {error}") from error
        return oom_kills

    def _oom_kills(self) -> int:
        """Since the last request. Raises ``SandboxDied`` when it was not the cell's own memory that was short."""
        try:
            return 0 if self._connection.group is None else self._connection.group.new_oom_kills()
        except OSError as error:
            check_own_descriptors(error)
            raise SandboxDied(f"the cell's control group cannot be read: {error}") from error


def _check_path(path: str) -> None:
    parts = path.split("/")
    if not path or path.startswith("/") or "\0" in path or any(part in ("", ".", "..") for part in parts):
        raise UsageError(f"path {path!r} must be relative to /workspace, without '..', '.' or empty parts")


def _describe(command: Command) -> tuple[dict[str, Any], bytes]:
    match command:
        case Python(code, interpreter):
            return {"kind": interpreter}, code.encode("utf-8", "surrogatepass")
        case Shell(text, None):
            return {"kind": "argv", "argv": ["/bin/sh", "-c", text]}, b""
        case Shell(text, session):
            return {"kind": "session", "session": session, "command": text}, b""
        case Argv(argv):
            if not argv:
                raise UsageError("a command needs at least a program name")
            return {"kind": "argv", "argv": [os.fsdecode(part) for part in argv]}, b""


def _frames(files: Mapping[str, bytes]) -> Iterator[tuple[list[str], tuple[bytes, ...], bool]]:
    """Group small files and split large ones, so that no frame is much larger than a chunk."""
    paths: list[str] = []
    blobs: list[bytes] = []
    for path, data in files.items():
        paths.append(path)
        blobs.append(data[:_CHUNK_BYTES])
        if len(data) > _CHUNK_BYTES or len(paths) == _FILES_A_FRAME or sum(map(len, blobs)) > _CHUNK_BYTES:
            yield paths, tuple(blobs), False
            paths, blobs = [], []
            for start in range(_CHUNK_BYTES, len(data), _CHUNK_BYTES):
                yield [path], (data[start : start + _CHUNK_BYTES],), True
    if paths:
        yield paths, tuple(blobs), False


def _result(reply: dict[str, Any], blobs: list[bytes]) -> ExecResult:
    killed_by: KilledBy | None = reply["killed_by"]
    return ExecResult(
        exit_code=None if killed_by else reply["exit_code"],
        signal=reply["signal"],
        stdout=blobs[0],
        stderr=blobs[1],
        stdout_dropped_bytes=reply["stdout_dropped"],
        stderr_dropped_bytes=reply["stderr_dropped"],
        result=blobs[2],
        result_truncated=reply["result_truncated"],
        wall_s=reply["wall_s"],
        cpu_s=reply["cpu_s"],
        peak_memory_mib=reply["peak_kib"] / 1024,
        timed_out=killed_by == "deadline",
        killed_by=killed_by,
        orphans_killed=reply["orphans_killed"],
    )


def _with_oom_kills(result: ExecResult, oom_kills: int) -> ExecResult:
    """``result`` with what the owner read from the control group; the supervisor cannot see it."""
    if not oom_kills:
        return result
    ended_by_it = result.killed_by is None and (result.signal == signal.SIGKILL or result.exit_code == _SHELL_SIGKILL)
    if not ended_by_it:
        return dataclasses.replace(result, oom_kills=oom_kills)
    return dataclasses.replace(result, oom_kills=oom_kills, killed_by="memory", exit_code=None)


def _killed(by: KilledBy, *, timed_out: bool, wall_s: float, oom_kills: int) -> ExecResult:
    """What is known of a command whose cell was lost."""
    return ExecResult(None, None, b"", b"", 0, 0, b"", False, wall_s, 0.0, 0.0, timed_out, by, 0, oom_kills)


def _not_started(problem: str) -> ExecResult:
    """What a shell says of a command that cannot be started."""
    text = f"{problem}\n".encode()
    return ExecResult(_CANNOT_EXECUTE, None, b"", text, 0, 0, b"", False, 0.0, 0.0, 0.0, False, None, 0)
