"""The few system calls that Python 3.8's ``os`` has no name for."""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC, MS_PRIVATE = 0x1, 0x2, 0x4, 0x8, 0x4000, 0x40000

_PR_SET_DUMPABLE, _PR_SET_KEEPCAPS, _PR_SET_NO_NEW_PRIVS = 4, 8, 38
_PR_CAPBSET_READ, _PR_CAPBSET_DROP, _PR_CAP_AMBIENT = 23, 24, 47
_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2
_PR_CAP_AMBIENT_CLEAR_ALL, _LINUX_CAPABILITY_VERSION_3 = 4, 0x20080522
_NR_PIDFD_OPEN = 434
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 0x1

_libc = ctypes.CDLL(None, use_errno=True)
_CAPABILITIES = range(next(n for n in range(64) if _libc.prctl(_PR_CAPBSET_READ, n, 0, 0, 0) < 0))
"""All that this kernel knows."""


def _check(status: int, what: str) -> int:
    if status < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return status


def resolve() -> None:
    """Look up every function once, for all processes that are forked later."""
    for name in ("unshare", "mount", "prctl", "capget", "capset", "syscall"):
        getattr(_libc, name)


def unshare(flags: int) -> None:
    """Leave the namespaces in ``flags`` for fresh ones."""
    _check(_libc.unshare(flags), "unshare")


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    """mount(2)."""
    arguments = source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode() or None
    _check(_libc.mount(*arguments), f"mount {kind} on {target}")


def set_dumpable(dumpable: bool) -> None:
    """Whether processes of the same uid may look into this one (ptrace, /proc/PID/mem, fd, environ)."""
    _check(_libc.prctl(_PR_SET_DUMPABLE, int(dumpable), 0, 0, 0), "PR_SET_DUMPABLE")


def set_oom_score(score: int) -> None:
    """How early this process, and what it makes, is killed when memory is short: 0 (as any other) to 1000 (first)."""
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write(str(score))


def set_no_new_privs() -> None:
    """No exec of this process or its children gains privileges, ever again."""
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "PR_SET_NO_NEW_PRIVS")


def keep_capabilities_over_setuid() -> None:
    """Let the permitted set outlive a change from one user id to another."""
    _check(_libc.prctl(_PR_SET_KEEPCAPS, 1, 0, 0, 0), "PR_SET_KEEPCAPS")


def raise_capabilities() -> None:
    """Make every permitted capability effective."""
    header = ctypes.create_string_buffer(struct.pack("II", _LINUX_CAPABILITY_VERSION_3, 0))
    sets = ctypes.create_string_buffer(24)
    _check(_libc.capget(header, sets), "capget")
    _, low, inheritable_low, _, high, inheritable_high = struct.unpack("6I", sets.raw)
    sets.raw = struct.pack("6I", low, low, inheritable_low, high, high, inheritable_high)
    _check(_libc.capset(header, sets), "capset")


def set_system_call_filter(program: bytes) -> None:
    """Bind this process, and every process it makes from now on, to a BPF program. Needs no_new_privs."""
    address = ctypes.cast(ctypes.c_char_p(program), ctypes.c_void_p).value
    header = struct.pack("HP", len(program) // 8, address)
    _check(_libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, header, 0, 0), "PR_SET_SECCOMP")


def drop_capabilities() -> None:
    """Empty every set, the bounding set included."""
    for capability in _CAPABILITIES:
        _check(_libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0), "PR_CAPBSET_DROP")
    _libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    header = ctypes.create_string_buffer(struct.pack("II", _LINUX_CAPABILITY_VERSION_3, 0))
    _check(_libc.capset(header, ctypes.create_string_buffer(24)), "capset")


def pidfd_open(pid: int) -> int:
    """A descriptor that becomes readable when the process ends."""
    return _check(_libc.syscall(_NR_PIDFD_OPEN, pid, 0), "pidfd_open")


def bring_up_loopback() -> None:
    """127.0.0.1 in a fresh network namespace, where nothing else exists."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack("16sh22x", b"lo", 0)
        (flags,) = struct.unpack_from("h", fcntl.ioctl(control, _SIOCGIFFLAGS, request), 16)
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", flags | _IFF_UP))
