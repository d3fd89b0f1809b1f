"""Ending processes that this one started, or that a process that is gone left behind."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

_PROC = Path("/proc")
_PROGRAMS = ("bwrap", "podman")
"""What uses the folder of a lease before it has it mounted, or without."""


def kill_with_children(pid: int) -> None:
    """Kill a process and those that it started, also where it is killed before they are tied to its life.

    A stopped process starts no other, so the list of its children is complete. The caller still has to wait for it.
    """
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
    for child in children(pid):
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it ended, or its id is another's by now
            os.kill(child, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def children(pid: int) -> list[int]:
    """Processes whose parent is ``pid``. Complete where that one is stopped."""
    try:
        lists = [task.joinpath("children").read_text() for task in (_PROC / str(pid) / "task").iterdir()]
    except FileNotFoundError:  # it ended, or this kernel has no such file
        return [other for other in _pids() if f"\nPPid:\t{pid}\n" in _text(other, "status")]
    return [int(child) for text in lists for child in text.split()]


def users_of(names: set[str]) -> Iterator[int]:
    """A pidfd for each process that uses the folder of a lease, given the leases' names.

    Through it the kernel knows whether the process is still the one that was looked at. It is closed by the next step.
    """
    for pid in _pids():
        try:
            handle = os.pidfd_open(pid)
        except OSError:  # it ended
            continue
        try:
            if pid != os.getpid() and _uses(pid, names):
                yield handle
        finally:
            os.close(handle)


def _uses(pid: int, names: set[str]) -> bool:
    """Whether one of the names is in the process's list of mounts, or it is a program that was given one."""
    seen = _text(pid, "mountinfo")
    program, _, arguments = _text(pid, "cmdline").partition("\0")
    if os.path.basename(program) in _PROGRAMS:
        seen += arguments
    return any(name in seen for name in names)


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir(_PROC) if name.isdigit())


def _text(pid: int, name: str) -> str:
    """A file about a process; empty when it ended, or is not ours to look at."""
    try:
        return (_PROC / str(pid) / name).read_text("utf-8", "replace")
    except OSError:
        return ""


def send(handle: int, number: int) -> bool:
    """Signal a process through its pidfd; False if it has ended, or is not ours. 0 only asks."""
    try:
        signal.pidfd_send_signal(handle, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True
