"""One command of a cell: start it, feed it, collect what it says, stop it in time, and leave no process behind."""

from __future__ import annotations

import os
import resource
import select
import signal
import socket
import sys
import time
from typing import Any, NoReturn

from palaestra.envs.sandboxes.supervisor import kernel, program, session
from palaestra.envs.sandboxes.supervisor.capture import Capture, Prefix
from palaestra.envs.sandboxes.supervisor.frames import Header

FLOOD_BYTES = 64 << 20
"""A program that writes more than this to stdout and stderr together is stopped."""
_PIPE_CHUNK = 1 << 16
_STDIN_CHUNK = 1 << 20
_REAPED_AT_ONCE = 256
_RESULT_FD = 3
_HANGUP = select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0x2000)


class OwnerGone(Exception):
    """The connection of the cell closed while a command ran."""


class Usage:
    """What the processes of a command took, of those that have been waited for."""

    def __init__(self) -> None:
        self.cpu_s, self.peak_kib = 0.0, 0

    def add(self, usage: resource.struct_rusage) -> None:
        """Count one process and the children that it waited for itself."""
        self.cpu_s += usage.ru_utime + usage.ru_stime
        self.peak_kib = max(self.peak_kib, usage.ru_maxrss)


class Step:
    """The life of one command in the process that is PID 1 of the cell.

    The bytes of its stdin follow the request on the owner's connection, outside of any frame, and are taken as the
    command reads them: no amount of them is held here.
    """

    def __init__(
        self, request: Header, blobs: list[bytes], limits: Header, owner: socket.socket, sessions: session.Sessions
    ) -> None:
        self.request, self.limits, self.owner = request, limits, owner
        (self.source,) = blobs
        self.session = sessions.get(request["session"]) if request["kind"] == "session" else None
        self.streams: dict[int, Capture | Prefix] = {}
        self.usage = Usage()
        self.killed_by: str | None = None
        self.pid = 0
        self.poll = select.poll()
        self.stdin_fd = -1
        self.stdin_owed: int = request["stdin_bytes"]
        self.stdin_held = memoryview(b"")

    def run(self) -> tuple[Header, list[bytes]]:
        """The reply. Whatever it raises (``OwnerGone``, OSError), no process of the command is left."""
        try:
            return self._run()
        except BaseException:
            kill_everything(self.usage)
            raise
        finally:
            for descriptor in (*self.streams, *([self.stdin_fd] if self.stdin_fd >= 0 else [])):
                os.close(descriptor)

    def _run(self) -> tuple[Header, list[bytes]]:
        started = time.monotonic()
        stdout, stderr = (Capture(self.limits["output_bytes"]) for _ in range(2))
        result, state = Prefix(self.request["result_bytes"]), Prefix(session.MAX_STATE_BYTES)
        self._start(stdout, stderr, result, state)
        process = kernel.pidfd_open(self.pid)
        try:
            signal.signal(signal.SIGCHLD, self._reap_orphans)
            try:
                self._supervise(process, started + self.request["timeout_s"])
            finally:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            if self.killed_by:
                os.kill(self.pid, signal.SIGKILL)
            _, status, usage = os.wait4(self.pid, 0)
            self.usage.add(usage)
            orphans = kill_everything(self.usage)
            self._drain()
        finally:
            os.close(process)
        if self.session is not None and not self.killed_by:
            stderr.add(self.session.keep(bytes(state.data), state.total).encode())
        out, out_dropped = stdout.finish()
        err, err_dropped = stderr.finish()
        signalled = os.WIFSIGNALED(status)
        reply = {
            "exit_code": None if signalled else os.WEXITSTATUS(status),
            "signal": os.WTERMSIG(status) if signalled else None,
            "stdout_dropped": out_dropped,
            "stderr_dropped": err_dropped,
            "result_truncated": result.total > len(result.data),
            "wall_s": time.monotonic() - started,
            "cpu_s": self.usage.cpu_s,
            "peak_kib": self.usage.peak_kib,
            "killed_by": self.killed_by,
            "orphans_killed": orphans,
        }
        self._pass_over_stdin()
        return reply, [out, err, bytes(result.data)]

    def _start(self, stdout: Capture, stderr: Capture, result: Prefix, state: Prefix) -> None:
        """Fork the program; its streams are then ours to read."""
        sinks: dict[int, Capture | Prefix] = {1: stdout, 2: stderr}
        if result.limit:
            sinks[3] = result
        if self.session is not None:
            sinks[session.STATE_TO_FD] = state
        in_read, in_write = os.pipe()
        pipes = {target: os.pipe() for target in sinks}
        self.pid = os.fork()
        if self.pid == 0:
            start_program(self, {0: in_read, **{target: write for target, (_, write) in pipes.items()}})
        os.close(in_read)
        for target, (read, write) in pipes.items():
            os.close(write)
            os.set_blocking(read, False)
            self.streams[read] = sinks[target]
        os.set_blocking(in_write, False)
        self.stdin_fd = in_write
        self._watch_stdin()
        if not self.stdin_owed:
            self._close_stdin()

    def _feed(self) -> None:
        """Pass on what there is and the program takes now; close its stdin after the last byte."""
        try:
            while self.stdin_held:
                self.stdin_held = self.stdin_held[os.write(self.stdin_fd, self.stdin_held) :]
        except BlockingIOError:
            return
        except BrokenPipeError:  # nobody reads it any more
            self._close_stdin()
            return
        if not self.stdin_owed:
            self._close_stdin()

    def _take_stdin(self) -> None:
        data = self.owner.recv(min(self.stdin_owed, _STDIN_CHUNK))
        if not data:
            raise OwnerGone
        self.stdin_owed -= len(data)
        self.stdin_held = memoryview(data)

    def _pass_over_stdin(self) -> None:
        """Take what the command left unread, so that the next request is what comes next on the connection."""
        while self.stdin_owed:
            self._take_stdin()

    def _close_stdin(self) -> None:
        self.poll.unregister(self.stdin_fd)
        os.close(self.stdin_fd)
        self.stdin_fd = -1

    def _watch_stdin(self) -> None:
        """Wait for more from the owner, or else for room in the pipe; in any case for the end of either."""
        wanted = self.stdin_fd >= 0 and not self.stdin_held
        self.poll.register(self.owner, _HANGUP | (select.POLLIN if wanted else 0))
        if self.stdin_fd >= 0:
            self.poll.register(self.stdin_fd, 0 if wanted else select.POLLOUT)

    def _supervise(self, process: int, deadline: float) -> None:
        """Until the process ends, or has to."""
        self.poll.register(process, select.POLLIN)
        for descriptor in self.streams:
            self.poll.register(descriptor, select.POLLIN)
        output_left = FLOOD_BYTES
        while True:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                self.killed_by = "deadline"
                return
            for descriptor, event in self.poll.poll(left_s * 1000 + 1):
                if descriptor == process:
                    return
                if descriptor not in self.streams:
                    self._move_stdin(descriptor == self.owner.fileno(), event)
                    continue
                try:
                    data = os.read(descriptor, _PIPE_CHUNK)
                except BlockingIOError:  # the program opened its own pipe and was faster
                    continue
                if not data:
                    self.poll.unregister(descriptor)
                self.streams[descriptor].add(data)
                output_left -= len(data)
            if output_left < 0:
                self.killed_by = "output"
                return

    def _move_stdin(self, from_owner: bool, event: int) -> None:
        """An event of the owner's connection or of the stdin pipe, which may have been closed in the same round."""
        if from_owner and event & _HANGUP:
            raise OwnerGone
        if self.stdin_fd >= 0:
            if from_owner:
                self._take_stdin()
            if event & select.POLLERR:
                self._close_stdin()
            else:
                self._feed()
        self._watch_stdin()

    def _reap_orphans(self, *_signal: Any) -> None:
        """Wait for what ended and has no parent left but us: as zombies they would use up the cell's processes."""
        for _ in range(_REAPED_AT_ONCE):
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if ended is None or ended.si_pid == self.pid:  # the command itself ended, and soon the others will
                    return
                self.usage.add(os.wait4(ended.si_pid, 0)[2])
            except ChildProcessError:  # all are waited for, or the next signal came in between and its handler did it
                return

    def _drain(self) -> None:
        """Take what the dead left in the pipes."""
        for descriptor, sink in self.streams.items():
            try:
                while True:
                    data = os.read(descriptor, _PIPE_CHUNK)
                    if not data:
                        break
                    sink.add(data)
            except BlockingIOError:
                continue


def kill_everything(usage: Usage) -> int:
    """End every other process of the cell and add them to ``usage``: how many were still alive.

    PID 1 of a pid namespace reaches all of it with one kill(-1), which no fork can outrun.
    """
    while _reap(usage, os.WNOHANG):
        pass
    try:
        os.kill(-1, signal.SIGKILL)
    except ProcessLookupError:
        return 0
    alive = 0
    while _reap(usage, 0):
        alive += 1
    return alive


def _reap(usage: Usage, options: int) -> bool:
    try:
        pid, _, used = os.wait4(-1, options)
    except ChildProcessError:
        return False
    if pid:
        usage.add(used)
    return pid != 0


def start_program(step: Step, descriptors: dict[int, int]) -> NoReturn:
    """In the forked child: give up everything, then become the program, which finds each descriptor at the number
    that is its key. Never returns."""
    status = 126
    try:
        os.setsid()
        text, target = step.source, program.SOURCE_FD
        if step.session is not None:
            text = step.session.start_file(step.request["env"], _kept_descriptor(step.limits))
            target = session.STATE_FROM_FD
        if step.request["kind"] in ("new", "session"):
            descriptors[target] = _in_memory(step.limits["source_fd"], text)
        _arrange_descriptors(descriptors, step.limits["descriptors"])
        _confine(step.limits)
        os.chdir("/workspace")
        if step.request["env"] and step.session is None:
            os.environ.update(step.request["env"])
        status = program.run_forked(step.source) if step.request["kind"] == "fork" else _execute(step)
    except BaseException as error:  # noqa: BLE001 - the last stop of this process; its parent reads the text
        os.write(2, f"could not start the program: {error!r}\n".encode())
    finally:
        os._exit(status)


def _kept_descriptor(limits: Header) -> int:
    """Where a session's shell keeps the way out for its state: the highest number that it may use."""
    return int(min(limits["rlimits"]["RLIMIT_NOFILE"], limits["descriptors"])) - 1


def _in_memory(descriptor: int, text: bytes) -> int:
    """Make the text all that the file holds, to be read from its start."""
    os.ftruncate(descriptor, 0)
    os.lseek(descriptor, 0, os.SEEK_SET)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(text)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _arrange_descriptors(descriptors: dict[int, int], most: int) -> None:
    """Put each at the number that is its key, and close all others."""
    high = {target: os.dup2(descriptor, 64 + target, inheritable=False) for target, descriptor in descriptors.items()}
    os.closerange(0, 64)
    for target, descriptor in high.items():
        os.dup2(descriptor, target, inheritable=True)
    os.closerange(64, most)


def _confine(limits: Header) -> None:
    """Resource limits; the cell's init gave up everything else long before."""
    for name, value in limits["rlimits"].items():
        soft, hard = value if isinstance(value, list) else (value, value)
        resource.setrlimit(getattr(resource, name), (soft, hard))
    kernel.set_dumpable(True)  # so that the program can use its own /proc/self; nothing secret is in its memory
    kernel.set_oom_score(1000)


def _execute(step: Step) -> int:
    """Become another program; the exit code that a shell would give where there is none."""
    for name in ("SIGPIPE", "SIGXFSZ"):  # Python ignores them; a fresh program must not inherit that
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    environment: Any = os.environ
    if step.session is not None:
        path, argv, environment = step.session.program(step.request["command"], step.request["env"])
    elif step.request["kind"] == "new":
        path = sys.executable
        argv = [path, "-s", "-B", "-c", program.NEW_INTERPRETER_TEXT]
    else:
        argv = step.request["argv"]
        path = str(argv[0])
    try:
        os.execvpe(path, argv, environment)
    except (FileNotFoundError, NotADirectoryError):
        os.write(2, f"{path}: not found\n".encode())
        return 127
    except OSError as error:
        os.write(2, f"{path}: {error.strerror}\n".encode())
        return 126
