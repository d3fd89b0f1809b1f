"""What a program in a cell cannot see, reach or become."""

from __future__ import annotations

import asyncio
import json

import pytest

from palaestra.envs.sandboxes import Python, Sandbox, Shell
from palaestra.envs.sandboxes.pool import Pool

pytestmark = pytest.mark.asyncio(loop_scope="session")

_ATTACK = """
import ctypes, errno, json, os, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
def call(function, *arguments):
    ctypes.set_errno(0)
    return errno.errorcode.get(ctypes.get_errno(), "OK") if function(*arguments) < 0 else "OK"
def attempt(function):
    try:
        return "OK: " + repr(function())[:200]
    except OSError as error:
        return errno.errorcode[error.errno]
outcome = {}
"""


async def attack(sandbox: Sandbox, body: str) -> dict[str, str]:
    """Run the body, which fills ``outcome`` with what each attempt came to."""
    result = await sandbox.run(Python(_ATTACK + body + "\nprint(json.dumps(outcome))", "fork"), timeout_s=20)
    assert result.exit_code == 0, result
    outcome: dict[str, str] = json.loads(result.stdout)
    return outcome


async def test_a_program_has_no_privilege_of_any_kind(sandbox: Sandbox) -> None:
    status = (await sandbox.run(Shell("cat /proc/self/status"), timeout_s=5)).stdout_text
    fields = {line.partition(":")[0]: line.partition(":")[2].split() for line in status.splitlines()}
    assert fields["Uid"] == ["1000"] * 4
    for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert int(fields[name][0], 16) == 0, name
    assert (fields["NoNewPrivs"], fields["Seccomp"]) == (["1"], ["2"])


async def test_there_is_no_network_but_an_own_loopback(sandbox: Sandbox) -> None:
    outcome = await attack(
        sandbox,
        """
outcome["outside"] = attempt(lambda: socket.create_connection(("192.0.2.1", 80), 2))
outcome["vsock"] = attempt(lambda: socket.socket(40, socket.SOCK_STREAM))
outcome["packet"] = attempt(lambda: socket.socket(17, socket.SOCK_RAW))
outcome["interfaces"] = [name for _, name in socket.if_nameindex()]
server = socket.create_server(("127.0.0.1", 0))
socket.create_connection(server.getsockname(), 2)
""",
    )
    assert outcome == {
        "outside": "ENETUNREACH",
        "vsock": "EAFNOSUPPORT",
        "packet": "EAFNOSUPPORT",
        "interfaces": ["lo"],
    }


async def test_a_server_of_one_cell_is_not_reached_from_another(pool: Pool, sandbox: Sandbox) -> None:
    other = await pool.acquire()
    try:
        code = "import socket\ns = socket.create_server(('127.0.0.1', 4242))\nprint(s.accept())"
        server = Python(code, "fork")
        client = Python("import socket\nsocket.create_connection(('127.0.0.1', 4242), 2)", "fork")
        served, refused = await asyncio.gather(other.run(server, timeout_s=1.5), sandbox.run(client, timeout_s=5))
    finally:
        await other.close()
    assert served.timed_out
    assert "ConnectionRefusedError" in refused.stderr_text


async def test_namespaces_mounts_and_kernel_interfaces_are_refused(sandbox: Sandbox) -> None:
    outcome = await attack(
        sandbox,
        """
for name, flags in dict(user=0x10000000, mount=0x20000, pid=0x20000000, net=0x40000000).items():
    outcome["unshare " + name] = call(libc.unshare, flags)
outcome["mount"] = call(libc.mount, b"none", b"/tmp", b"tmpfs", 0, None)
outcome["umount"] = call(libc.umount2, b"/proc", 2)
outcome["chroot"] = attempt(lambda: os.chroot("/tmp"))
outcome["setuid"] = attempt(lambda: os.setuid(0))
outcome["setns"] = call(libc.setns, os.open("/proc/self/ns/net", 0), 0)
outcome["sethostname"] = attempt(lambda: socket.sethostname("x"))
if os.uname().machine == "x86_64":
    for name, number in dict(keyctl=250, bpf=321, io_uring_setup=425, perf_event_open=298, userfaultfd=323,
                             open_by_handle_at=304, kexec_load=246, init_module=175, shmget=29).items():
        outcome[name] = call(libc.syscall, number, 0, 0, 0, 0, 0)
    outcome["clone newuser"] = call(libc.syscall, 56, 0x10000000 | 17, 0, 0, 0, 0)
    clone3 = call(libc.syscall, 435, 0, 0)
    assert clone3 == "ENOSYS", clone3
""",
    )
    assert outcome.pop("setuid") == "EINVAL"  # no other user exists in here
    assert set(outcome.values()) == {"EPERM"}, outcome


async def test_the_first_process_of_the_cell_cannot_be_looked_into_or_signalled(sandbox: Sandbox) -> None:
    outcome = await attack(
        sandbox,
        """
for name in ("mem", "maps", "environ", "fd", "root", "cwd", "stack", "syscall", "auxv"):
    path = "/proc/1/" + name
    outcome[name] = attempt(lambda: os.listdir(path) if name in ("fd", "root", "cwd") else open(path, "rb").read(64))
outcome["pids"] = ",".join(p for p in os.listdir("/proc") if p.isdigit() and int(p) != os.getpid())
outcome["ptrace"] = call(libc.ptrace, 16, 1, 0, 0)
libc.process_vm_readv.restype = ctypes.c_long
outcome["process_vm_readv"] = call(libc.process_vm_readv, 1, 0, 0, 0, 0, 0)
for signal in (9, 19, 15, 2):
    try: os.kill(1, signal)
    except PermissionError: pass
""",
    )
    assert outcome.pop("pids") == ""
    assert set(outcome.values()) <= {"EPERM", "EACCES", "ENOENT"}, outcome
    assert (await sandbox.run(Shell("echo alive"), timeout_s=5)).stdout == b"alive\n"


async def test_the_supervisors_socket_is_hidden(sandbox: Sandbox) -> None:
    outcome = await attack(
        sandbox,
        """
outcome["list"] = attempt(lambda: os.listdir("/run/palaestra"))
outcome["connect"] = attempt(lambda: socket.socket(socket.AF_UNIX).connect("/run/palaestra/supervisor.sock"))
outcome["replace"] = attempt(lambda: open("/run/palaestra.zip", "r+b"))
""",
    )
    assert set(outcome) == {"list", "connect", "replace"}
    assert set(outcome.values()) <= {"EACCES", "EROFS", "EPERM", "ENOENT"}, outcome


async def test_no_file_outside_the_three_scratch_folders_can_be_written(sandbox: Sandbox) -> None:
    outcome = await attack(
        sandbox,
        """
writable = []
for folder, folders, _ in os.walk("/"):
    if folder in ("/proc", "/sys", "/workspace", "/tmp", "/dev/shm"):
        folders[:] = []
        continue
    try:
        path = os.path.join(folder, "probe")
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
        writable.append(folder)
    except OSError:
        pass
outcome["writable"] = writable
settings = []
for folder, _, names in os.walk("/proc/sys"):
    for name in names:
        try:
            with open(os.path.join(folder, name), "r+") as file:
                value = file.read()
                file.seek(0)
                file.write(value)
            settings.append(file.name)
        except (OSError, ValueError):
            pass
outcome["settings"] = settings
""",
    )
    assert outcome == {"writable": [], "settings": []}


async def test_nothing_of_the_owners_home_or_secrets_is_visible(sandbox: Sandbox) -> None:
    outcome = await attack(
        sandbox,
        """
outcome["shadow"] = attempt(lambda: open("/etc/shadow").read())
outcome["root"] = attempt(lambda: os.listdir("/root"))
outcome["home"] = attempt(lambda: [n for n in os.listdir("/home")] or os.stat("/nothing"))
outcome["kcore"] = attempt(lambda: open("/proc/kcore", "rb").read(4))
outcome["mem"] = attempt(lambda: open("/dev/mem", "rb").read(4))
outcome["kmsg"] = attempt(lambda: open("/dev/kmsg").read(4))
""",
    )
    assert set(outcome.values()) <= {"ENOENT", "EACCES", "EPERM"}, outcome


async def test_no_installed_package_is_visible_least_of_all_ours(sandbox: Sandbox) -> None:
    code = """
import glob, importlib, os, site, sys
folders = [*site.getsitepackages(), *glob.glob("/usr/local/lib*/python3*/*-packages")]
folders += glob.glob("/usr/lib*/python3*/*-packages") + [p for p in sys.path if p.endswith("-packages")]
print({f: os.listdir(f) for f in folders if os.path.isdir(f) and os.listdir(f)})
try: importlib.import_module("palaestra")
except ModuleNotFoundError: print("no palaestra")
"""
    result = await sandbox.run(Python(code), timeout_s=20)
    assert (result.stdout_text, result.stderr_text) == ("{}\nno palaestra\n", "")


@pytest.mark.parametrize("how", ["another cell", "renewed"])
async def test_a_fresh_cell_sees_nothing_of_earlier_ones(pool: Pool, sandbox: Sandbox, how: str) -> None:
    leave = """
import ctypes, os
for folder in ("/workspace", "/tmp", "/dev/shm"):
    os.makedirs(folder + "/a/b"); open(folder + "/a/b/c", "w").write("1"); os.chmod(folder + "/a", 0)
import socket
s = socket.socket(socket.AF_UNIX); s.bind("\\0abstract")
try: socket.sethostname("mine")
except PermissionError: pass
"""
    assert (await sandbox.run(Python(leave, "fork"), timeout_s=5)).exit_code == 0
    if how == "renewed":
        await sandbox.renew()
        fresh = sandbox
    else:
        fresh = await pool.acquire()
    look = (
        "find /workspace /tmp /dev/shm -mindepth 1; [ -d /dev/mqueue ] && ls /dev/mqueue 2>/dev/null; "
        "cat /proc/net/unix; uname -n"
    )
    seen = (await fresh.run(Shell(look), timeout_s=5)).stdout_text.splitlines()
    if fresh is not sandbox:
        await fresh.close()
    assert len(seen) == 2, seen  # the table's heading and the host name
    assert seen[1] == "cell"
