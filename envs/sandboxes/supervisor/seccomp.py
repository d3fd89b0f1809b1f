"""The system calls that no program in a cell may make, as a classic-BPF filter built by name and architecture.

Why each group is refused: a new user namespace, or a new mount, would hand out capabilities and kernel code that an
agent has no use for; keyrings, bpf, io_uring, userfaultfd and perf are the usual ways into the kernel; ptrace and its
kin look into other processes; System V IPC and memfd hold memory that no limit of a process counts, and the contexts
of io_setup are few for the whole machine; AF_VSOCK leaves a virtual machine without passing any network namespace.

A process may change limits and priority of any other one of its user, so of its cell's first process too, which keeps
the deadlines. Calls that name that one (process 1), or all of a user, are refused.
"""

from __future__ import annotations

import errno
import platform
import struct

ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}

# name: (x86-64, aarch64), numbers from Linux's syscall tables; None where the architecture has no such call.
_DENIED: dict[str, tuple[int | None, int | None]] = {
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "acct": (163, 89),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "syslog": (103, 116),
    "vhangup": (153, 58),
    "personality": (135, 92),
    "lookup_dcookie": (212, 18),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
    "uselib": (134, None),
    "ustat": (136, None),
    "sysfs": (139, None),
    "mbind": (237, 235),
    "set_mempolicy": (238, 237),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "memfd_create": (319, 279),
    "io_setup": (206, 0),
}
# (x86-64, aarch64), and which values of which arguments are refused.
_DENIED_FOR: dict[str, tuple[tuple[int, int], dict[int, int]]] = {
    "prlimit64": ((302, 261), {0: 1}),
    "sched_setparam": ((142, 118), {0: 1}),
    "sched_setscheduler": ((144, 119), {0: 1}),
    "sched_setattr": ((314, 274), {0: 1}),
    "sched_setaffinity": ((203, 122), {0: 1}),
    "setpriority": ((141, 140), {0: 2, 1: 1}),  # PRIO_USER
    "ioprio_set": ((251, 30), {0: 3, 1: 1}),  # IOPRIO_WHO_USER
}
_CLONE, _CLONE3, _SOCKET = (56, 220), (435, 435), (41, 198)
_NAMESPACE_FLAGS = 0x7E020000  # every CLONE_NEW* that clone knows
_SOCKET_FAMILIES = (1, 2, 10, 16)  # unix, inet, inet6, netlink

_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL_PROCESS, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_OFFSET_NUMBER, _OFFSET_ARCHITECTURE, _OFFSET_ARGUMENT_0, _ARGUMENT_BYTES = 0, 4, 16, 8


def denied_names() -> tuple[str, ...]:
    """The names of the calls that are refused whatever their arguments."""
    return tuple(_DENIED)


def build(machine: str | None = None) -> bytes:
    """The filter program for this machine (or ``machine``, as in ``uname -m``)."""
    machine = machine or platform.machine()
    if machine not in ARCHITECTURES:
        raise OSError(errno.ENOTSUP, f"no system-call table for {machine}; cells run on {sorted(ARCHITECTURES)}")
    audit_arch, column = ARCHITECTURES[machine]
    code = [
        _op(_LOAD, 0, 0, _OFFSET_ARCHITECTURE),
        _op(_JUMP_EQUAL, 1, 0, audit_arch),
        _op(_RETURN, 0, 0, _KILL_PROCESS),
        _op(_LOAD, 0, 0, _OFFSET_NUMBER),
    ]
    if machine == "x86_64":  # the x32 calls have the same effects under other numbers
        code += [_op(_JUMP_AT_LEAST, 0, 1, 0x40000000), _refuse(errno.EPERM)]
    # glibc falls back from clone3, whose flags a filter cannot see, to clone.
    code += [_op(_JUMP_EQUAL, 0, 1, _CLONE3[column]), _refuse(errno.ENOSYS)]
    code += [
        _op(_JUMP_EQUAL, 0, 4, _CLONE[column]),
        _op(_LOAD, 0, 0, _OFFSET_ARGUMENT_0),
        _op(_JUMP_ANY_BIT, 0, 1, _NAMESPACE_FLAGS),
        _refuse(errno.EPERM),
        _op(_RETURN, 0, 0, _ALLOW),
    ]
    families = len(_SOCKET_FAMILIES)
    code += [_op(_JUMP_EQUAL, 0, families + 3, _SOCKET[column]), _op(_LOAD, 0, 0, _OFFSET_ARGUMENT_0)]
    code += [_op(_JUMP_EQUAL, families - i, 0, family) for i, family in enumerate(_SOCKET_FAMILIES)]
    code += [_refuse(errno.EAFNOSUPPORT), _op(_RETURN, 0, 0, _ALLOW)]
    for numbers, refused in _DENIED_FOR.values():
        body: list[bytes] = []
        for argument, value in refused.items():  # the low half of an argument is all that the kernel takes as an int
            body += [_op(_LOAD, 0, 0, _OFFSET_ARGUMENT_0 + _ARGUMENT_BYTES * argument), _op(_JUMP_EQUAL, 0, 1, value)]
            body.append(_refuse(errno.EPERM))
        body.append(_op(_RETURN, 0, 0, _ALLOW))
        code += [_op(_JUMP_EQUAL, 0, len(body), numbers[column]), *body]
    every = [numbers[column] for numbers in _DENIED.values()]
    denied = sorted(number for number in every if number is not None)
    ranges: list[list[int]] = []
    for number in denied:
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return b"".join(code + _search(ranges))


def _search(ranges: list[list[int]]) -> list[bytes]:
    """Refuse the numbers within these sorted ranges, and allow all others. A binary search, because the kernel runs
    the filter for every system call that exists when it is installed, once a cell."""
    if len(ranges) == 1:
        first, last = ranges[0]
        leaf = [_op(_JUMP_AT_LEAST, 0, 2, first), _op(_JUMP_AT_LEAST, 1, 0, last + 1)]
        return [*leaf, _refuse(errno.EPERM), _op(_RETURN, 0, 0, _ALLOW)]
    middle = len(ranges) // 2
    low, high = _search(ranges[:middle]), _search(ranges[middle:])
    return [_op(_JUMP_AT_LEAST, len(low), 0, ranges[middle][0]), *low, *high]


def _op(code: int, if_true: int, if_false: int, value: int) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)


def _refuse(code: int) -> bytes:
    return _op(_RETURN, 0, 0, _ERRNO | code)
