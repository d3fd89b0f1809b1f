"""One command of a cell: start it, feed it, collect what it says, stop it in time, and leave no process behind."""

from __future__ import annotations

import os
import resource
import select
import signal
import socket
import sys
import time
from typing import NoReturn

from palaestra.envs.sandboxes.supervisor import kernel, program
from palaestra.envs.sandboxes.supervisor.frames import Header

FLOOD_BYTES = 64 << 20
"""A program that writes more than this to stdout and stderr together is stopped."""
_PIPE_CHUNK = 1 << 16
_RESULT_FD = 3
_HANGUP = select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0x2000)


class OwnerGone(Exception):
    """The connection of the cell closed while a command ran."""


class Capture:
    """The first and the last half of a stream, and how much lay between."""

    def __init__(self, limit_bytes: int) -> None:
        self.half = max(limit_bytes // 2, 1)
        self.head, self.tail = bytearray(), bytearray()
        self.total = 0

    def add(self, data: bytes) -> None:
        self.total += len(data)
        room = self.half - len(self.head)
        if room > 0:
            self.head += data[:room]
            data = data[room:]
        if data:
            self.tail += data
            if len(self.tail) > 4 * self.half + _PIPE_CHUNK:
                del self.tail[: -self.half]

    def finish(self) -> tuple[bytes, int]:
        """What is kept, and the number of bytes that are missing in its middle."""
        del self.tail[: -self.half]
        kept = bytes(self.head + self.tail)
        return kept, self.total - len(kept)


class Prefix:
    """The first ``limit_bytes`` of a stream."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit, self.data, self.total = limit_bytes, bytearray(), 0

    def add(self, data: bytes) -> None:
        self.total += len(data)
        self.data += data[: max(self.limit - len(self.data), 0)]


class Step:
    """The life of one command in the process that is PID 1 of the cell."""

    def __init__(self, request: Header, blobs: list[bytes], limits: Header, owner: socket.socket) -> None:
        self.request, self.limits, self.owner = request, limits, owner
        self.source, self.stdin = blobs
        self.streams: dict[int, Capture | Prefix] = {}
        self.killed_by: str | None = None
        self.stdin_fd = -1

    def run(self) -> tuple[Header, list[bytes]]:
        """The reply. Whatever it raises (``OwnerGone``, OSError), no process of the command is left."""
        try:
            return self._run()
        except BaseException:
            kill_everything()
            raise
        finally:
            for descriptor in (*self.streams, *([self.stdin_fd] if self.stdin_fd >= 0 else [])):
                os.close(descriptor)

    def _run(self) -> tuple[Header, list[bytes]]:
        started = time.monotonic()
        stdout, stderr = (Capture(self.limits["output_bytes"]) for _ in range(2))
        result = Prefix(self.request["result_bytes"])
        pid = self._start(stdout, stderr, result)
        process = kernel.pidfd_open(pid)
        try:
            self._supervise(process, started + self.request["timeout_s"])
            if self.killed_by:
                os.kill(pid, signal.SIGKILL)
            _, status, usage = os.wait4(pid, 0)
            orphans, orphans_cpu_s = kill_everything()
            self._drain()
        finally:
            os.close(process)
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
            "cpu_s": usage.ru_utime + usage.ru_stime + orphans_cpu_s,
            "peak_kib": usage.ru_maxrss,
            "killed_by": self.killed_by,
            "orphans_killed": orphans,
        }
        return reply, [out, err, bytes(result.data)]

    def _start(self, stdout: Capture, stderr: Capture, result: Prefix) -> int:
        in_read, in_write = os.pipe()
        pipes = [os.pipe(), os.pipe(), *([os.pipe()] if result.limit else [])]
        pid = os.fork()
        if pid == 0:
            start_program(self, [in_read, *(write for _, write in pipes)])
        os.close(in_read)
        sinks: tuple[Capture | Prefix, ...] = (stdout, stderr, result)
        for (read, write), sink in zip(pipes, sinks):  # noqa: B905 - not in Python 3.8
            os.close(write)
            os.set_blocking(read, False)
            self.streams[read] = sink
        os.set_blocking(in_write, False)
        self.stdin_fd = in_write
        self.stdin_left = memoryview(self.stdin)
        self._feed()
        return pid

    def _feed(self) -> None:
        """Write what the stdin pipe takes now; close it after the last byte, or when nobody reads it."""
        try:
            while self.stdin_left:
                self.stdin_left = self.stdin_left[os.write(self.stdin_fd, self.stdin_left) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            pass
        os.close(self.stdin_fd)
        self.stdin_fd = -1

    def _supervise(self, process: int, deadline: float) -> None:
        """Until the process ends, or has to."""
        poll = select.poll()
        poll.register(process, select.POLLIN)
        poll.register(self.owner, _HANGUP)
        for descriptor in self.streams:
            poll.register(descriptor, select.POLLIN)
        if self.stdin_fd >= 0:
            poll.register(self.stdin_fd, select.POLLOUT)
        output_left = FLOOD_BYTES
        while True:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                self.killed_by = "deadline"
                return
            for descriptor, _event in poll.poll(left_s * 1000 + 1):
                if descriptor == process:
                    return
                if descriptor == self.owner.fileno():
                    raise OwnerGone
                if descriptor == self.stdin_fd:
                    self._feed()
                    if self.stdin_fd < 0:
                        poll.unregister(descriptor)
                    continue
                try:
                    data = os.read(descriptor, _PIPE_CHUNK)
                except BlockingIOError:  # the program opened its own pipe and was faster
                    continue
                if not data:
                    poll.unregister(descriptor)
                self.streams[descriptor].add(data)
                output_left -= len(data)
            if output_left < 0:
                self.killed_by = "output"
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


def kill_everything() -> tuple[int, float]:
    """End every other process of the cell: how many were still alive, and their CPU seconds.

    PID 1 of a pid namespace reaches all of it with one kill(-1), which no fork can outrun.
    """
    cpu_s, alive = 0.0, 0
    while _reap(os.WNOHANG) is not None:
        pass
    try:
        os.kill(-1, signal.SIGKILL)
    except ProcessLookupError:
        return 0, 0.0
    while True:
        usage = _reap(0)
        if usage is None:
            return alive, cpu_s
        alive += 1
        cpu_s += usage.ru_utime + usage.ru_stime


def _reap(options: int) -> resource.struct_rusage | None:
    try:
        pid, _, usage = os.wait4(-1, options)
    except ChildProcessError:
        return None
    return usage if pid else None


def start_program(step: Step, descriptors: list[int]) -> NoReturn:
    """In the forked child: give up everything, then become the program. Never returns."""
    status = 126
    try:
        os.setsid()
        _arrange_descriptors(descriptors, step)
        _confine(step.limits)
        os.chdir("/workspace")
        if step.request["env"]:
            os.environ.update(step.request["env"])
        status = program.run_forked(step.source) if step.request["kind"] == "fork" else _execute(step.request)
    except BaseException as error:  # noqa: BLE001 - the last stop of this process; its parent reads the text
        os.write(2, f"could not start the program: {error!r}\n".encode())
    finally:
        os._exit(status)


def _arrange_descriptors(descriptors: list[int], step: Step) -> None:
    """Put them at 0, 1, 2 and 3, the source of a new interpreter at 4, and close all others."""
    wanted = list(enumerate(descriptors))
    if step.request["kind"] == "new":
        source = os.memfd_create("program")
        with open(source, "wb", closefd=False) as file:
            file.write(step.source)
        os.lseek(source, 0, os.SEEK_SET)
        wanted.append((program.SOURCE_FD, source))
    high = [os.dup2(descriptor, 64 + target, inheritable=False) for target, descriptor in wanted]
    os.closerange(0, 64)
    for (target, _), descriptor in zip(wanted, high):  # noqa: B905 - not in Python 3.8
        os.dup2(descriptor, target, inheritable=True)
    os.closerange(64, step.limits["descriptors"])


def _confine(limits: Header) -> None:
    """Resource limits; the cell's init gave up everything else long before."""
    for name, value in limits["rlimits"].items():
        soft, hard = value if isinstance(value, list) else (value, value)
        resource.setrlimit(getattr(resource, name), (soft, hard))
    kernel.set_dumpable(True)  # so that the program can use its own /proc/self; nothing secret is in its memory
    kernel.set_oom_score(1000)


def _execute(request: Header) -> int:
    for name in ("SIGPIPE", "SIGXFSZ"):  # Python ignores them; a fresh program must not inherit that
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    if request["kind"] == "new":
        argv = [sys.executable, "-s", "-B", "-c", program.NEW_INTERPRETER_TEXT]
    else:
        argv = request["argv"]
    try:
        os.execvp(argv[0], argv)
    except (FileNotFoundError, NotADirectoryError):
        os.write(2, f"{argv[0]}: not found\n".encode())
        return 127
    except OSError as error:
        os.write(2, f"{argv[0]}: {error.strerror}\n".encode())
        return 126
