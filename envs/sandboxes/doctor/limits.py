"""Programs that try to go beyond the limits of the cell that they run in."""

from __future__ import annotations

from dataclasses import dataclass

from palaestra.envs.sandboxes.cgroups import Delegation
from palaestra.envs.sandboxes.doctor.report import Check
from palaestra.envs.sandboxes.protocol import ExecResult, Python, Sandbox, SandboxSpec, Shell

SPEC = SandboxSpec(memory_mib=256, pids=16, file_mib=2, workspace_mib=8, inodes=500, open_files=64, cpu_s=2)
"""Limits that a program reaches at once."""
_TIMEOUT_S = 120.0
"""Far more than any probe takes, so that a busy machine breaks no promise."""


@dataclass(frozen=True, slots=True)
class Probe:
    """A program that prints what it came to; its limit holds if that is one of ``expected``."""

    name: str
    tried: str
    code: str
    expected: tuple[str, ...]
    advice: str

    def judge(self, result: ExecResult) -> Check:
        seen = _words(result)
        held = seen in self.expected
        return Check(self.name, self.tried, seen, "ok" if held else "broken", "" if held else self.advice)


async def measure_limits(sandbox: Sandbox, delegation: Delegation) -> tuple[Check, ...]:
    """Every probe in a fresh cell of a pool of ``SPEC``."""
    checks = []
    for probe in PROBES:
        await sandbox.renew()
        checks.append(probe.judge(await sandbox.run(Python(probe.code, "fork"), timeout_s=_TIMEOUT_S)))
    await sandbox.renew()
    checks.append(judge_daemon(await sandbox.run(Shell("(setsid sleep 300 &); echo"), timeout_s=_TIMEOUT_S)))
    await sandbox.renew()
    result = await sandbox.run(Python(_FILL_CELL, "fork"), timeout_s=_TIMEOUT_S)
    checks.append(judge_cell_memory(result, delegation))
    return tuple(checks)


def judge_daemon(result: ExecResult) -> Check:
    """What became of a process that left the session of its command."""
    seen = f"{result.orphans_killed} killed with its command"
    held = result.orphans_killed == 1
    tried = "start a daemon and return"
    return Check("left processes", tried, seen, "ok" if held else "broken", "" if held else _REPORT)


def judge_cell_memory(result: ExecResult, delegation: Delegation) -> Check:
    """The memory of all processes of a cell together, which only a control group bounds.

    Cells work without one, so its lack is a warning; a group that is ours and does not bound them is a broken promise.
    """
    name = "memory of a cell"
    tried = f"hold {_TOGETHER_MIB} MiB in {_CHILDREN} processes of a cell of {SPEC.memory_mib} MiB"
    if result.killed_by == "memory" or _words(result) != f"{_TOGETHER_MIB} MiB":
        return Check(name, tried, f"stopped: {_words(result)}", "ok")
    if "memory" in delegation.controllers:
        return Check(name, tried, "all of it was held, in spite of a control group", "broken", _REPORT)
    advice = (
        "No memory control group is ours (see the machine's control groups). Until one is, keep SandboxSpec.pids × "
        "address_space_mib within what the machine has, or run palaestra as a whole in a group with a limit: "
        "systemd-run --user --scope -p MemoryMax=16G …"
    )
    return Check(name, tried, "all of it was held", "warning", advice)


def _words(result: ExecResult) -> str:
    """What the program printed, else how it ended."""
    if text := result.stdout_text.strip():
        return text
    how = f"killed by {result.killed_by}" if result.killed_by else f"exit code {result.exit_code}"
    how = f"signal {result.signal}" if result.signal and not result.killed_by else how
    return f"{how} {result.stderr_text.strip()[-200:]}".strip()


_CHILDREN, _EACH_MIB = 8, 48
_TOGETHER_MIB = _CHILDREN * _EACH_MIB
_FILL_CELL = f"""
import os, signal, socket
ends = []
for _ in range({_CHILDREN}):
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        held = b"x" * ({_EACH_MIB} << 20)
        theirs.send(b".")
        theirs.recv(1)
        theirs.send(b".")
        signal.pause()
    theirs.close()
    ends.append(ours)
for end in ends:
    end.recv(1)  # by now it holds its share, or is dead
alive = 0
for end in ends:
    try:
        end.send(b"?")
        alive += len(end.recv(1))
    except OSError:
        pass
print(alive * {_EACH_MIB}, "MiB")
"""

_STATUS = "print([l.split()[1] for l in open('/proc/self/status') if l.startswith('{}:')][0])"
_REPORT = "Do not run untrusted code here, and report this: the kernel does not enforce what Palaestra asked of it."
PROBES = (
    Probe(
        "memory of a process",
        f"map 512 MiB in a process of {SPEC.memory_mib} MiB",
        "import errno, mmap\nx = []\ntry:\n  for i in range(64): x.append(mmap.mmap(-1, 8 << 20))\n"
        "  print('512 MiB mapped')\nexcept OSError as e: print(errno.errorcode[e.errno])",
        ("ENOMEM",),
        _REPORT,
    ),
    Probe(
        "processes",
        f"start 100 processes where {SPEC.pids} are allowed",
        "import os, time\nn = 1\ntry:\n  while n < 100:\n    if os.fork() == 0: time.sleep(30)\n    n += 1\n"
        "except OSError: pass\nprint(n, 'processes')",
        (f"{SPEC.pids} processes",),
        "RLIMIT_NPROC does not hold for this user: run as an ordinary user, not as root.",
    ),
    Probe(
        "CPU seconds",
        f"compute for longer than {SPEC.cpu_s} CPU seconds",
        "while True: pass",
        ("signal 24", "signal 9"),  # SIGXCPU at the limit, SIGKILL a second later
        _REPORT,
    ),
    Probe(
        "open files",
        f"open 200 files where {SPEC.open_files} are allowed",
        "import errno\nf = []\ntry:\n  for i in range(200): f.append(open('/dev/null'))\n  print('200 opened')\n"
        "except OSError as e: print(errno.errorcode[e.errno])",
        ("EMFILE",),
        _REPORT,
    ),
    Probe(
        "file size",
        f"write 4 MiB to a file of at most {SPEC.file_mib}",
        "f = open('f', 'wb', buffering=0)\nn = 0\ntry:\n  for i in range(64): n += f.write(bytes(1 << 16))\n"
        "except OSError: pass\nprint(n >> 20, 'MiB')",
        (f"{SPEC.file_mib} MiB",),
        _REPORT,
    ),
    Probe(
        "file system size",
        f"write 16 MiB into a workspace of {SPEC.workspace_mib}",
        "n = 0\ntry:\n  for i in range(16):\n"
        "    with open(f'f{i}', 'wb', buffering=0) as f: n += f.write(bytes(1 << 20))\n"
        "except OSError: pass\nprint(-(-n >> 20), 'MiB')",
        (f"{SPEC.workspace_mib} MiB", f"{SPEC.workspace_mib - 1} MiB"),
        _REPORT,
    ),
    Probe(
        "number of files",
        f"make 2000 files where {SPEC.inodes} are allowed",
        f"n = 0\ntry:\n  for i in range(2000): open(f'/tmp/{{i}}', 'w').close(); n += 1\nexcept OSError: pass\n"
        f"print('no more than allowed' if n <= {SPEC.inodes} else n)",
        ("no more than allowed",),
        _REPORT,
    ),
    Probe(
        "network",
        "connect to 192.0.2.1 port 80",
        "import errno, socket\ntry:\n  socket.create_connection(('192.0.2.1', 80), 2); print('connected')\n"
        "except OSError as e: print(errno.errorcode.get(e.errno, e))",
        ("ENETUNREACH",),
        _REPORT,
    ),
    Probe(
        "user id",
        "read one's own ids",
        "import os\nprint(*os.getresuid(), *os.getresgid())",
        ("1000 1000 1000 1000 1000 1000",),
        _REPORT,
    ),
    Probe("no_new_privs", "read /proc/self/status", _STATUS.format("NoNewPrivs"), ("1",), _REPORT),
    Probe("capabilities", "read the bounding set", _STATUS.format("CapBnd"), ("0" * 16,), _REPORT),
    Probe(
        "seccomp",
        "make a user namespace",
        "import ctypes, errno\nc = ctypes.CDLL(None, use_errno=True)\nc.unshare(0x10000000)\n"
        "print(errno.errorcode.get(ctypes.get_errno(), 'unshare succeeded'))",
        ("EPERM",),
        "The kernel was built without CONFIG_SECCOMP_FILTER; use one that has it.",
    ),
    Probe(
        "processes of others",
        "list /proc",
        "import os\nprint(sum(name.isdigit() for name in os.listdir('/proc')), 'to be seen')",
        ("1 to be seen",),
        _REPORT,
    ),
)
