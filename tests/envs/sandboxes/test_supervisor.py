"""The program inside: one file, any python3 >= 3.8, and ordinary programs work under it."""

from __future__ import annotations

import ast
import io
import struct
import zipfile
from importlib import resources

import pytest

from palaestra.envs.sandboxes import Python, Sandbox, Shell
from palaestra.envs.sandboxes.bundle import supervisor_zip
from palaestra.envs.sandboxes.pool import Pool
from palaestra.envs.sandboxes.supervisor import seccomp

SOURCES = sorted(
    source.name
    for source in resources.files("palaestra.envs.sandboxes.supervisor").iterdir()
    if source.name.endswith(".py")
)


@pytest.mark.parametrize("name", SOURCES)
def test_the_supervisors_sources_are_python_3_8_and_import_only_the_standard_library_and_each_other(name: str) -> None:
    text = (resources.files("palaestra.envs.sandboxes.supervisor") / name).read_text("utf-8")
    tree = ast.parse(text, feature_version=(3, 8))
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    own = {module for module in imported if module.startswith("palaestra")}
    assert all(module.startswith("palaestra.envs.sandboxes.supervisor") for module in own)


def test_the_bundle_is_reproducible_and_holds_nothing_but_the_supervisor() -> None:
    supervisor_zip.cache_clear()
    first = supervisor_zip()
    supervisor_zip.cache_clear()
    assert supervisor_zip() == first
    with zipfile.ZipFile(io.BytesIO(first)) as archive:
        full = {name for name in archive.namelist() if archive.read(name)}
    assert full == {"__main__.py", *(f"palaestra/envs/sandboxes/supervisor/{name}" for name in SOURCES)}


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_refuses_by_the_numbers_of_its_own_architecture(machine: str) -> None:
    program = seccomp.build(machine)
    assert len(program) % 8 == 0
    assert len(program) // 8 < 4096  # the kernel's limit
    other = seccomp.build("aarch64" if machine == "x86_64" else "x86_64")
    assert program != other
    assert {"unshare", "mount", "ptrace", "bpf", "keyctl", "io_uring_setup"} <= set(seccomp.denied_names())


def decide(program: bytes, architecture: int, number: int, *arguments: int) -> int:
    """What the kernel would return for a call: the few instructions of classic BPF that the filter is made of."""
    data = struct.pack("<IIQ6Q", number, architecture, 0, *(list(arguments) + [0] * 6)[:6])
    code = list(struct.iter_unpack("HBBI", program))
    at = accumulator = 0
    while True:
        kind, if_true, if_false, value = code[at]
        at += 1
        match kind:
            case 0x20:
                (accumulator,) = struct.unpack_from("<I", data, value)
            case 0x06:
                return value
            case 0x15 | 0x35 | 0x45:
                holds = {0x15: accumulator == value, 0x35: accumulator >= value, 0x45: bool(accumulator & value)}[kind]
                at += if_true if holds else if_false
            case _:
                raise AssertionError(f"unknown instruction {kind:#x}")


ALLOWED, REFUSED, UNKNOWN, NO_FAMILY, KILLED = 0x7FFF0000, 0x50001, 0x50026, 0x50061, 0x80000000


@pytest.mark.parametrize(
    ("machine", "architecture", "calls"),
    [
        ("x86_64", 0xC000003E, {"prlimit64": 302, "setpriority": 141, "clone": 56, "clone3": 435, "socket": 41}),
        ("aarch64", 0xC00000B7, {"prlimit64": 261, "setpriority": 140, "clone": 220, "clone3": 435, "socket": 198}),
    ],
)
def test_the_filter_decides_by_number_and_argument(machine: str, architecture: int, calls: dict[str, int]) -> None:
    program = seccomp.build(machine)

    def verdict(name: str, *arguments: int) -> int:
        return decide(program, architecture, calls[name], *arguments)

    column = ["x86_64", "aarch64"].index(machine)
    refused = {numbers[column] for numbers in seccomp._DENIED.values()} - {None}
    special = {numbers[column] for numbers, _ in seccomp._DENIED_FOR.values()} | {calls["clone3"], calls["socket"]}
    plain = [number for number in range(460) if number not in special]
    assert {number for number in plain if decide(program, architecture, number) == REFUSED} == refused
    assert {decide(program, architecture, number) for number in plain} == {ALLOWED, REFUSED}
    assert (verdict("prlimit64", 0), verdict("prlimit64", 1), verdict("prlimit64", 7)) == (ALLOWED, REFUSED, ALLOWED)
    assert verdict("prlimit64", 1 << 32 | 1) == REFUSED
    assert [verdict("setpriority", *which) for which in ((0, 0), (0, 1), (2, 0))] == [ALLOWED, REFUSED, REFUSED]
    assert (verdict("clone", 17), verdict("clone", 0x10000011), verdict("clone3")) == (ALLOWED, REFUSED, UNKNOWN)
    assert (verdict("socket", 1), verdict("socket", 40), verdict("socket", 17)) == (ALLOWED, NO_FAMILY, NO_FAMILY)
    assert decide(program, 0x40000003, 1) == KILLED


def test_a_machine_without_a_table_is_named() -> None:
    with pytest.raises(OSError, match="riscv64"):
        seccomp.build("riscv64")


_ORDINARY = {
    "subprocess": "import subprocess\nprint(subprocess.run(['echo', 'ok'], capture_output=True, text=True).stdout)",
    "threads": "import threading\nt = threading.Thread(target=print, args=('ok',))\nt.start(); t.join()",
    "processes": "import multiprocessing as m\nq = m.get_context('fork').Queue()\n"
    "p = m.get_context('fork').Process(target=q.put, args=('ok',))\np.start(); print(q.get()); p.join()",
    "asyncio": "import asyncio\nasync def main():\n"
    "    server = await asyncio.start_server(lambda r, w: (w.write(b'ok'), w.close()), '127.0.0.1', 0)\n"
    "    r, w = await asyncio.open_connection(*server.sockets[0].getsockname())\n"
    "    print((await r.read()).decode()); w.close()\nasyncio.run(main())",
    "sqlite": "import sqlite3\nc = sqlite3.connect('data.db')\nc.execute('create table t (x)')\nprint('ok')",
    "tempfile": "import tempfile\nwith tempfile.NamedTemporaryFile() as f: f.write(b'x')\nprint('ok')",
    "shared memory": "from multiprocessing.shared_memory import SharedMemory\n"
    "m = SharedMemory(create=True, size=4096)\nm.buf[:2] = b'ok'\nprint(bytes(m.buf[:2]).decode())\n"
    "m.close(); m.unlink()",
    "random": "import random, secrets, uuid\nrandom.random(); secrets.token_hex(); uuid.uuid4()\nprint('ok')",
    "interrupt": "import os, signal\ntry: os.kill(os.getpid(), signal.SIGINT)\nexcept KeyboardInterrupt: print('ok')",
    "class": "import dataclasses, pickle\n@dataclasses.dataclass\nclass P:\n    x: int\n"
    "assert pickle.loads(pickle.dumps(P(1))) == P(1)\nprint('ok')",
}


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("interpreter", ["new", "fork"])
@pytest.mark.parametrize("program", _ORDINARY)
async def test_ordinary_programs_work(sandbox: Sandbox, program: str, interpreter: str) -> None:
    result = await sandbox.run(Python(_ORDINARY[program], interpreter), timeout_s=20)  # type: ignore[arg-type]
    assert (result.stdout_text.strip(), result.stderr_text, result.exit_code) == ("ok", "", 0)


@pytest.mark.asyncio(loop_scope="session")
async def test_shell_tools_are_there(sandbox: Sandbox) -> None:
    command = (
        "printf 'b\\na\\n' | sort | grep -c . && find /workspace -maxdepth 0 && echo x | sed s/x/y/ | awk '{print $1}'"
    )
    result = await sandbox.run(Shell(command), timeout_s=10)
    assert result.stdout == b"2\n/workspace\ny\n"


@pytest.mark.soak
@pytest.mark.asyncio(loop_scope="session")
async def test_many_episodes_leave_nothing_behind_in_their_host(pool: Pool, soak_factor: int) -> None:
    async def descriptors_and_processes() -> str:
        sandbox = await pool.acquire()
        code = "import os\nprint(len(os.listdir('/proc/self/fd')), sum(n.isdigit() for n in os.listdir('/proc')))"
        seen = (await sandbox.run(Python(code, "fork"), timeout_s=10)).stdout_text
        await sandbox.close()
        return seen

    before = await descriptors_and_processes()
    for number in range(100 * soak_factor):
        sandbox = await pool.acquire()
        await sandbox.write({"f": b"x"})
        await sandbox.run(Shell("sleep 100 & exit 0") if number % 3 else Python("print(1)", "fork"), timeout_s=10)
        await sandbox.close()
    assert await descriptors_and_processes() == before
    assert pool.live_cells == 0
