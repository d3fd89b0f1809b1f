"""Which sandboxes work on this machine, which one is chosen and why, and which limits are really enforced.

Nothing is inferred from settings: a cell with small limits is made on each backend, and programs in it try to go
beyond them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from palaestra.envs.errors import SandboxDied, SandboxUnavailable
from palaestra.envs.sandboxes.backends import ENVIRONMENT_VARIABLE, BackendName, candidates, open_pool
from palaestra.envs.sandboxes.protocol import Python, Sandbox, SandboxSpec

_SPEC = SandboxSpec(memory_mib=256, pids=16, file_mib=2, workspace_mib=8, inodes=500)
_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Limit:
    """One limit: whether it held when a program in a cell tried to go beyond it, what was seen, and what to do."""

    name: str
    enforced: bool
    seen: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class BackendReport:
    """One backend. ``problem`` is None when it works; then ``limits`` is what was measured in a cell of it."""

    name: str
    problem: str | None
    limits: tuple[Limit, ...]

    @property
    def works(self) -> bool:
        return self.problem is None


@dataclass(frozen=True, slots=True)
class Report:
    """``chosen`` is what ``open_pool()`` takes here, None where nothing works; ``reason`` says why."""

    chosen: str | None
    reason: str
    backends: tuple[BackendReport, ...]

    @property
    def healthy(self) -> bool:
        """A backend works, and in the one that is chosen every limit but the whole cell's memory holds."""
        limits = [limit for backend in self.backends if backend.name == self.chosen for limit in backend.limits]
        return self.chosen is not None and all(limit.enforced for limit in limits if limit.name != "memory of a cell")


async def diagnose() -> Report:
    """Try every backend of this machine; takes a few seconds."""
    names: tuple[BackendName, ...] = ("podman", "bubblewrap")
    backends = tuple([await _examine(name) for name in names])
    working = {backend.name for backend in backends if backend.works}
    order = candidates("auto")
    chosen = next((name for name in order if name in working), None)
    if len(order) == 1:
        reason = f"the environment variable {ENVIRONMENT_VARIABLE} names {order[0]}"
        reason += "" if chosen else ", which does not work here"
    elif chosen == "podman":
        reason = "rootless Podman works here, and comes first"
    elif chosen:
        reason = "rootless Podman does not work here (see its problem), and bubblewrap does"
    else:
        reason = "no backend works here; each one's problem says what to do"
    return Report(chosen, reason, backends)


async def _examine(name: BackendName) -> BackendReport:
    try:
        async with await open_pool(_SPEC, backend=name) as pool:
            sandbox = await pool.acquire()
            try:
                return BackendReport(name, None, await _measure(sandbox))
            finally:
                await sandbox.close()
    except (SandboxUnavailable, SandboxDied) as error:
        return BackendReport(name, str(error).partition("\n")[2] or str(error), ())


async def _measure(sandbox: Sandbox) -> tuple[Limit, ...]:
    """Every probe is a program that prints what it came to; the limit holds if that is what it should be."""
    limits = []
    for name, code, expected, advice in _PROBES:
        await sandbox.renew()
        result = await sandbox.run(Python(code, "fork"), timeout_s=_TIMEOUT_S)
        seen = result.stdout_text.strip() or f"exit code {result.exit_code}, killed by {result.killed_by}"
        limits.append(Limit(name, seen in expected, seen, "" if seen in expected else advice))
    return (*limits, _cell_memory())


def _cell_memory() -> Limit:
    """The memory of all processes of a cell together, which only a control group can bound."""
    mib = f"{_SPEC.pids} processes of {_SPEC.memory_mib} MiB each"
    where = "version 2" if Path("/sys/fs/cgroup/cgroup.controllers").exists() else "version 1"
    return Limit(
        "memory of a cell",
        False,
        f"a cell may hold {mib}: cells join no control group (this machine has {where})",
        "keep SandboxSpec.pids × memory_mib within what the machine has, or run palaestra itself in a control group "
        "with a memory limit (systemd-run --user --scope -p MemoryMax=16G …)",
    )


_STATUS = "print([l.split()[1] for l in open('/proc/self/status') if l.startswith('{}:')][0])"
_REPORT = "report what `palaestra doctor` says: this kernel does not enforce it, and untrusted code must not run here"
_PROBES: tuple[tuple[str, str, tuple[str, ...], str], ...] = (
    (
        "memory of a process",
        "x = []\ntry:\n  for i in range(64): x.append(bytearray(8 << 20))\n  print('512 MiB allocated')\n"
        "except MemoryError: print('MemoryError')",
        ("MemoryError",),
        _REPORT,
    ),
    (
        "processes",
        "import os, time\nn = 1\ntry:\n  while n < 100:\n    if os.fork() == 0: time.sleep(30)\n    n += 1\n"
        "except OSError: pass\nprint(n)",
        (str(_SPEC.pids),),
        "RLIMIT_NPROC does not hold for this user; run as an ordinary user instead of root",
    ),
    (
        "file size",
        "f = open('f', 'wb', buffering=0)\nn = 0\ntry:\n  for i in range(64): n += f.write(bytes(1 << 16))\n"
        "except OSError: pass\nprint(n >> 20, 'MiB')",
        (f"{_SPEC.file_mib} MiB",),
        _REPORT,
    ),
    (
        "file system size",
        "n = 0\ntry:\n  for i in range(16):\n"
        "    with open(f'f{i}', 'wb', buffering=0) as f: n += f.write(bytes(1 << 20))\n"
        "except OSError: pass\nprint(-(-n >> 20), 'MiB')",
        (f"{_SPEC.workspace_mib} MiB", f"{_SPEC.workspace_mib - 1} MiB"),
        _REPORT,
    ),
    (
        "number of files",
        f"n = 0\ntry:\n  for i in range(2000): open(f'/tmp/{{i}}', 'w').close(); n += 1\nexcept OSError: pass\n"
        f"print('held' if n <= {_SPEC.inodes} else n)",
        ("held",),
        _REPORT,
    ),
    (
        "network",
        "import errno, socket\ntry:\n  socket.create_connection(('192.0.2.1', 80), 2); print('connected')\n"
        "except OSError as e: print(errno.errorcode.get(e.errno, e))",
        ("ENETUNREACH",),
        _REPORT,
    ),
    ("user id", "import os\nprint(os.getresuid())", ("(1000, 1000, 1000)",), _REPORT),
    ("no_new_privs", _STATUS.format("NoNewPrivs"), ("1",), _REPORT),
    ("capabilities", _STATUS.format("CapBnd"), ("0" * 16,), _REPORT),
    (
        "seccomp",
        "import ctypes, errno\nc = ctypes.CDLL(None, use_errno=True)\nc.unshare(0x10000000)\n"
        "print(errno.errorcode.get(ctypes.get_errno(), 'unshare succeeded'))",
        ("EPERM",),
        "the kernel was built without CONFIG_SECCOMP_FILTER; use one that has it",
    ),
)
