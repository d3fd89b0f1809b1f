"""Programs that attack: what each comes to, and that nobody else notices.

Each row is one attack. After it the supervisor answers, the same sandbox once renewed and a new cell run programs, and
another cell, in which a program ran all the while, has come to no harm. What a cell can see, reach or become is in
``test_isolation``, plain limits are in ``test_limits``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from palaestra.envs.sandboxes import ExecResult, Python
from palaestra.envs.sandboxes.supervisor.frames import encode

if TYPE_CHECKING:
    from tests.envs.sandboxes.conftest import Arena

pytestmark = pytest.mark.asyncio(loop_scope="session")

_PRELUDE = """
import ctypes, errno, fcntl, json, os, resource, signal, socket, stat, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def outcome(function, *arguments):
    try: function(*arguments)
    except (OSError, ValueError) as error: return errno.errorcode.get(getattr(error, "errno", 0), "ValueError")
    return "OK"
def call(function, *arguments):
    ctypes.set_errno(0)
    return errno.errorcode[ctypes.get_errno()] if function(*arguments) < 0 else "OK"
def until_refused(function, most=100_000):
    kept = []
    try:
        while len(kept) < most: kept.append(function())
    except (OSError, RuntimeError): pass
    return len(kept)
"""


@dataclass(frozen=True, slots=True)
class Attack:
    """A Python program, and what its result must be: text that it prints, or a test of the whole result."""

    code: str
    seen: str | Callable[[ExecResult], bool] = ""
    timeout_s: float = 60.0


def killed_by(reason: str, **more: Any) -> Callable[[ExecResult], bool]:
    """The supervisor ended it for this reason; other fields of the result have these values."""
    return lambda result: (
        result.killed_by == reason and all(getattr(result, name) == value for name, value in more.items())
    )


def at_most(number: int) -> Callable[[ExecResult], bool]:
    """It ended in order and printed a number, above 0 and no greater."""
    return lambda result: result.ok and 0 < int(result.stdout) <= number


_REPLY = encode(
    {"exit_code": 0, "signal": None, "stdout_dropped": 0, "stderr_dropped": 0, "result_truncated": False, "wall_s": 0.1}
    | {"cpu_s": 0.1, "peak_kib": 1, "killed_by": None, "orphans_killed": 0},
    [b"forged", b"", b""],
)

_THE_FIRST_PROCESS = {
    "every signal to it": Attack("for number in range(1, 65): outcome(os.kill, 1, number)\nprint('alive')", "alive"),
    "signals to it by its pidfd": Attack(
        "fd = os.pidfd_open(1)\nfor number in (9, 19, 17): outcome(signal.pidfd_send_signal, fd, number)\n"
        "print(call(libc.syscall, 438, fd, 0, 0))",
        "EPERM",
    ),
    "a storm of SIGCHLD to it": Attack("while True: os.kill(1, signal.SIGCHLD)", killed_by("deadline"), 0.5),
    "SIGSTOP to everything": Attack(
        "for _ in range(3):\n    if os.fork() == 0: time.sleep(300)\nos.kill(-1, signal.SIGSTOP)\n"
        "os.kill(os.getpid(), signal.SIGSTOP)",
        killed_by("deadline", orphans_killed=3),
        1.0,
    ),
    "SIGKILL to everything": Attack(
        "for _ in range(3):\n    if os.fork() == 0: time.sleep(300)\n"
        "os.kill(-1, signal.SIGKILL)\nfor _ in range(3): os.wait()\nprint(outcome(os.kill, -1, signal.SIGKILL))",
        "ESRCH",
    ),
    "its limits": Attack(
        "names = [n for n in dir(resource) if n.startswith('RLIMIT_')]\n"
        "print({outcome(resource.prlimit, 1, getattr(resource, n), (0, 0)) for n in names})",
        "{'EPERM'}",
    ),
    "its priority": Attack(
        "tries = [(os.setpriority, os.PRIO_PROCESS, 1, 19), (os.setpriority, os.PRIO_USER, 0, 19),\n"
        "    (os.sched_setaffinity, 1, {0}), (os.sched_setscheduler, 1, os.SCHED_IDLE, os.sched_param(0)),\n"
        "    (os.sched_setparam, 1, os.sched_param(0))]\n"
        "print({outcome(*arguments) for arguments in tries})\n"
        "os.nice(1), os.sched_setaffinity(0, os.sched_getaffinity(0)), os.setpriority(os.PRIO_PROCESS, 0, 19)",
        "{'EPERM'}",
    ),
    "a child subreaper keeps its orphans": Attack(
        "libc.prctl(36, 1)\nif os.fork() == 0:\n    os.fork()\n    os.setsid()\n    time.sleep(300)",
        lambda result: result.ok and result.orphans_killed >= 1,
    ),
}
_FRAMES_AND_STREAMS = {
    "forged replies on every descriptor": Attack(
        f"frame = {_REPLY!r}\n"
        "for fd in range(256):\n    outcome(os.write, fd, frame)\n"
        "    for pid in ('self', '1'):\n        path = f'/proc/{pid}/fd/{fd}'\n"
        "        outcome(lambda: os.write(os.open(path, os.O_RDWR | os.O_NONBLOCK), frame))\n"
        "os._exit(5)",
        lambda result: result.exit_code == 5 and b"forged" in result.stdout and result.wall_s != 0.1,
    ),
    "no descriptor but the three": Attack("print(sorted(os.listdir('/proc/self/fd'))[:-1])", "['0', '1', '2']"),
    "ten gigabytes of output": Attack(
        "block = bytes(1 << 20)\nfor number in range(10 << 10): os.write(1 + number % 2, block)",
        lambda result: (
            result.killed_by == "output" and result.stdout_dropped_bytes + result.stderr_dropped_bytes < 80 << 20
        ),
    ),
    "a line of a hundred megabytes": Attack(
        "for _ in range(100): os.write(1, b'x' * (1 << 20))",
        lambda result: (
            result.killed_by == "output"
            and result.stdout == b"x" * (16 << 10)
            and result.stdout_dropped_bytes < 80 << 20
        ),
    ),
    "a line of fifty megabytes": Attack(
        "os.write(1, b'a')\nfor _ in range(50): os.write(1, b'x' * (1 << 20))\nos.write(1, b'z')",
        lambda result: (
            result.ok
            and (result.stdout[:2], result.stdout[-2:], len(result.stdout)) == (b"ax", b"xz", 16 << 10)
            and result.stdout_dropped_bytes == (50 << 20) + 2 - (16 << 10)
        ),
    ),
    "invalid UTF-8": Attack(
        "os.write(1, bytes(range(256)) + 'é'.encode()[:1])",
        lambda result: result.stdout == bytes(range(256)) + b"\xc3" and "\ufffd" in result.stdout_text,
    ),
    "closes its streams and lives on": Attack(
        "for fd in range(3): os.close(fd)\ntime.sleep(0.5)\nos._exit(7 if time.process_time() else 8)",
        lambda result: result.exit_code == 7 and result.wall_s >= 0.5,
    ),
    "closes its streams and never ends": Attack(
        "for fd in range(3): os.close(fd)\ntime.sleep(300)", killed_by("deadline", stdout=b""), 0.5
    ),
    "makes its own streams block the reader": Attack(
        "for fd in (1, 2):\n    mine = os.open(f'/proc/self/fd/{fd}', os.O_RDONLY)\n    os.set_blocking(mine, True)\n"
        "    fcntl.fcntl(mine, 1031, 4096)\n    os.read(mine, 0)\nos.write(2, b'y' * 9000)\nprint('done')",
        lambda result: (result.stdout, result.stderr) == (b"done\n", b"y" * 9000),
    ),
}
_LIMITS = {
    "raises its own limits": Attack(
        "most = {}\nfor name in ('AS', 'NPROC', 'FSIZE', 'NOFILE', 'CPU', 'CORE', 'MEMLOCK', 'MSGQUEUE', 'RTPRIO'):\n"
        "    kind = getattr(resource, f'RLIMIT_{name}')\n    hard = resource.getrlimit(kind)[1]\n"
        "    most[outcome(resource.setrlimit, kind, (hard + 1, hard + 1))] = name\nprint(list(most))",
        "['ValueError']",
    ),
    "real-time and negative niceness": Attack(
        "print({outcome(os.nice, -20), outcome(os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(1)),\n"
        "    outcome(os.sched_setscheduler, 0, os.SCHED_RR, os.sched_param(1))})",
        "{'EPERM'}",
    ),
    "ignores SIGXCPU": Attack(
        "signal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass",
        lambda result: result.signal == 9 and not result.timed_out and result.cpu_s < 10,
        120.0,
    ),
    "sets clocks and timers": Attack(
        "print({outcome(time.clock_settime, time.CLOCK_REALTIME, 0), call(libc.settimeofday, bytes(16), None),\n"
        "    call(libc.adjtimex, b'\\x01' + bytes(207)), call(libc.unshare, 0x80)})\n"
        "signal.setitimer(signal.ITIMER_REAL, 1e9, 1e-6)\nsignal.setitimer(signal.ITIMER_PROF, 1e9)",
        "{'EPERM'}",
    ),
    "thousands of timers": Attack(
        "def make():\n    if libc.timer_create(1, None, ctypes.byref(ctypes.c_void_p())) < 0: raise OSError\n"
        "print(until_refused(make))",
        at_most(1024),
    ),
    "locks and hidden memory": Attack(
        "libc.memfd_create.restype = ctypes.c_int\n"
        "print({call(libc.memfd_create, b'x', 0), call(libc.syscall, 447, 0)}, call(libc.mlockall, 3) != 'OK')",
        "{'EPERM'} True",
    ),
    "contexts of asynchronous files": Attack(
        "number = 206 if os.uname().machine == 'x86_64' else 0\n"
        "print(call(libc.syscall, number, 1000, ctypes.byref(ctypes.c_ulong(0))))",
        "EPERM",
    ),
    "inotify instances": Attack(
        "def make():\n    fd = libc.inotify_init()\n    if fd < 0: raise OSError\n    return fd\n"
        "print(until_refused(make))",
        at_most(32),
    ),
    "terminals": Attack("print(until_refused(os.openpty))", at_most(16)),
    "a thread bomb": Attack(
        "stop = threading.Event()\ndef make(): threading.Thread(target=stop.wait).start()\n"
        "made = until_refused(make)\nstop.set()\nprint(made)",
        at_most(15),
    ),
    "a vfork bomb": Attack(
        "print(until_refused(lambda: os.posix_spawn('/bin/sleep', ['sleep', '300'], {})))",
        lambda result: result.stdout == b"15\n" and result.orphans_killed == 15,
    ),
    "memory by many processes": Attack(
        # Each holds what it gets, until no more comes or, in a control group, the kernel ends it.
        "ends = []\nfor _ in range(6):\n    ready, full = os.pipe()\n    if os.fork() == 0:\n        held = []\n"
        "        try:\n            while True: held.append(b'x' * (4 << 20))\n"
        "        except MemoryError: os.write(full, b'.')\n        time.sleep(300)\n"
        "    os.close(full)\n    ends.append(ready)\n"
        "for ready in ends: os.read(ready, 1)\nprint('none gets more')",
        lambda result: (
            result.stdout == b"none gets more\n"
            and result.orphans_killed + result.oom_kills == 6
            and result.peak_memory_mib < 97
        ),
    ),
    "record locks": Attack(
        "f = open('locked', 'w')\n"
        "def lock(n): fcntl.lockf(f, fcntl.LOCK_EX, 1, 2 * n)\nfor n in range(3000): lock(n)\nprint('locked')",
        "locked",
    ),
    "its place in a shortage of memory": Attack(
        # The one promise that cannot be kept: a program may take back that it goes first. See docs/sandboxes.md.
        "path = '/proc/self/oom_score_adj'\ndef set_to(value): os.write(os.open(path, os.O_WRONLY), b'%d' % value)\n"
        "print(open(path).read().strip(), outcome(set_to, 0), outcome(set_to, -1000))",
        "1000 OK EACCES",
    ),
}
_DISK = {
    "files without a name": Attack(
        "def make(): os.write(os.open('.', os.O_TMPFILE | os.O_RDWR), bytes(1 << 20))\nprint(until_refused(make))",
        at_most(16),
    ),
    "device nodes": Attack(
        "kinds = stat.S_IFCHR, stat.S_IFBLK\n"
        "print({outcome(os.mknod, 'node', kind | 0o666, os.makedev(1, 1)) for kind in kinds})",
        "{'EPERM'}",
    ),
}
ATTACKS = _THE_FIRST_PROCESS | _FRAMES_AND_STREAMS | _LIMITS | _DISK


@pytest.mark.parametrize("name", ATTACKS)
async def test_an_attack_is_contained(arena: Arena, name: str) -> None:
    attack = ATTACKS[name]
    result = await arena.sandbox.run(Python(_PRELUDE + attack.code, "fork"), timeout_s=attack.timeout_s)
    if callable(attack.seen):
        assert attack.seen(result), result
    else:
        assert (result.stdout_text, result.stderr_text) == (f"{attack.seen}\n", "")
    await arena.assert_all_well()


async def test_nothing_of_a_living_cell_is_reached_from_another(arena: Arena) -> None:
    code = """
def connect(family, address): socket.socket(family).connect(address)
print([
    outcome(connect, socket.AF_INET, ("127.0.0.1", 4242)),
    outcome(connect, socket.AF_UNIX, "\\0bystander"),
    outcome(connect, socket.AF_UNIX, "/tmp/bystander.sock"),
    outcome(open, "/workspace/secret"),
    outcome(open, "/dev/shm/bystander"),
    outcome(os.open, "/dev/pts/0", os.O_RDWR),
    [name for name in os.listdir("/proc") if name.isdigit()] == [str(os.getpid())],
    outcome(os.kill, -1, 0),
])
"""
    result = await arena.sandbox.run(Python(_PRELUDE + code, "fork"), timeout_s=30)
    refused = ["ECONNREFUSED", "ECONNREFUSED", "ENOENT", "ENOENT", "ENOENT", "ENOENT", True, "ESRCH"]
    assert result.stdout_text == f"{refused}\n", result
    await arena.assert_all_well()


async def test_the_memory_of_a_forked_interpreter_holds_nothing_of_another_cell_or_of_the_owner(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OWNER_KEY", "key-of-the-owner-" * 1000)
    code = """
kept = b"stdin-of-this-command-" * 1000
wanted = b"of-the-bystander-", b"key-of-the-owner-", b"stdin-of-this-command-"
counts = [0, 0, 0]
with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", buffering=0) as memory:
    for line in maps:
        span, rights, *_ = line.split()
        if rights.startswith("rw") and "[v" not in line:
            start, end = (int(edge, 16) for edge in span.split("-"))
            memory.seek(start)
            data = memory.read(end - start)
            counts = [count + data.count(text) for count, text in zip(counts, wanted)]
print([count >= 500 for count in counts])  # a few are those of the search itself
"""
    result = await arena.sandbox.run(Python(_PRELUDE + code, "fork"), timeout_s=30)
    assert result.stdout == b"[False, False, True]\n", result
    await arena.assert_all_well()
