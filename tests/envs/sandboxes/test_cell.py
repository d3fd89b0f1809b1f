"""The owner's end of a cell when the other end, or our own event loop, does not do its part."""

from __future__ import annotations

import asyncio
import io
import sys
import time
import zipfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from palaestra.envs.errors import SandboxDied, UsageError
from palaestra.envs.sandboxes import BackendName, Python, Sandbox, SandboxSpec, Shell, bubblewrap, cell
from palaestra.envs.sandboxes.backends import open_pool
from palaestra.envs.sandboxes.bundle import supervisor_zip
from palaestra.envs.sandboxes.cell import Cell, open_cell
from palaestra.envs.sandboxes.podman import backend as podman
from palaestra.envs.sandboxes.supervisor.frames import PREFIX, decode_prefix, encode

pytestmark = pytest.mark.asyncio(loop_scope="session")


class RefusingHost:
    """Serves cells whose every command fails in the supervisor itself."""

    def __init__(self, socket: Path, alive: bool) -> None:
        self.socket, self.alive = socket, alive
        self.groups = None

    async def healthy(self) -> bool:
        return self.alive

    async def close(self) -> None:
        """The server is closed by whoever opened it."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        replies = [{"ok": True}, {"error": "os", "errno": 11, "text": "Resource temporarily unavailable"}]
        try:
            for reply in replies:
                await reader.readexactly(sum(decode_prefix(await reader.readexactly(PREFIX.size))))
                writer.write(encode(reply))
            await reader.read()
        except asyncio.IncompleteReadError:  # the cell was closed
            pass
        finally:
            writer.close()


@asynccontextmanager
async def refusing_cell(folder: Path, *, alive: bool) -> AsyncIterator[Cell]:
    host = RefusingHost(folder / "s", alive)
    async with await asyncio.start_unix_server(host.serve, host.socket):
        sandbox = Cell(host, SandboxSpec(), await open_cell(host, SandboxSpec()))
        yield sandbox
        await sandbox.close()


async def test_a_cell_that_cannot_serve_a_command_is_broken(tmp_path: Path) -> None:
    async with refusing_cell(tmp_path, alive=True) as sandbox:
        assert not sandbox.broken
        result = await sandbox.run(Shell("true"), timeout_s=5)
        assert (result.killed_by, result.ok, sandbox.broken) == ("cell", False, True)
        await sandbox.renew()
        assert not sandbox.broken


async def test_a_command_that_a_dying_host_could_not_serve_is_not_the_agents_doing(tmp_path: Path) -> None:
    async with refusing_cell(tmp_path, alive=False) as sandbox:
        with pytest.raises(SandboxDied, match="Resource temporarily unavailable"):
            await sandbox.run(Shell("true"), timeout_s=5)
        for _ in range(2):  # and it stays so, whatever is asked of it next
            with pytest.raises(SandboxDied, match="host has ended"):
                await sandbox.run(Shell("true"), timeout_s=5)
            with pytest.raises(SandboxDied, match="host has ended"):
                await sandbox.read("file")


@pytest.mark.parametrize("result_kib", [1, 1024], ids=["small reply", "large reply"])
async def test_a_command_that_ended_while_our_event_loop_stood_still_keeps_its_result(
    sandbox: Sandbox, result_kib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cell, "GRACE_S", 0.0)
    code = f"import os\nleft = {result_kib} << 10\nwhile left: left -= os.write(3, bytes(left))\nprint('ended')"
    running = asyncio.create_task(sandbox.run(Python(code, "fork"), timeout_s=2, result_kib=result_kib))
    for _ in range(3):  # until the request is on its way
        await asyncio.sleep(0)
    time.sleep(2.5)  # noqa: ASYNC251 - the fault that is tested
    result = await running
    assert (result.stdout, len(result.result), result.timed_out) == (b"ended\n", result_kib << 10, False)


def failing_supervisor_zip() -> bytes:
    """The supervisor with a fault in the middle of every command that asks for it."""
    fault = "        if self.request['env'].get('FAULT'):\n            raise OSError(11, 'injected')\n"
    place = "        output_left = FLOOD_BYTES\n"
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(supervisor_zip())) as intact, zipfile.ZipFile(buffer, "w") as broken:
        for name in intact.namelist():
            text = intact.read(name).decode()
            assert not name.endswith("/step.py") or place in text
            broken.writestr(name, text.replace(place, fault + place))
    return buffer.getvalue()


async def test_a_fault_of_the_supervisor_in_a_command_leaves_none_of_its_processes(
    backend: BackendName, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (bubblewrap, podman):
        monkeypatch.setattr(module, "supervisor_zip", failing_supervisor_zip)
    request = {"op": "run", "kind": "argv", "timeout_s": 60, "env": {}, "result_bytes": 0, "stdin_bytes": 0}
    sleepers = {**request, "argv": ["/bin/sh", "-c", "sleep 300 & sleep 300"], "env": {"FAULT": "1"}}
    count = {**request, "argv": ["/bin/sh", "-c", "set -- /proc/[0-9]*; echo $#"]}
    async with await open_pool(backend=backend) as pool:
        connection = await open_cell(pool.hosts[0], pool.spec)
        failed, _ = await connection.request(sleepers, (b"",), timeout_s=30)
        assert (failed["error"], failed["errno"]) == ("os", 11)
        _, (stdout, *_) = await connection.request(count, (b"",), timeout_s=30)
        assert stdout == b"1\n"  # the shell itself; the first process of the cell is hidden
        connection.close()


async def test_a_cell_closed_while_it_is_renewed_keeps_no_connection(tmp_path: Path) -> None:
    async with refusing_cell(tmp_path, alive=True) as sandbox:
        renewing = asyncio.create_task(sandbox.renew())
        await asyncio.sleep(0)  # until it waits for the new cell
        await sandbox.close()
        with pytest.raises(UsageError, match="is closed"):
            await renewing
        assert sandbox.broken


async def test_whoever_waits_to_map_a_cells_ids_ends_with_a_cell_that_could_not_enter_its_namespaces() -> None:
    code = (
        "import os, signal\n"
        "from palaestra.envs.sandboxes.supervisor import cell, kernel\n"
        "def refuse(flags): raise OSError(28, 'no namespace is left')\n"
        "kernel.unshare = refuse\n"
        "read, write = os.pipe()\n"  # held by every process of the failed attempt, as its connection would be
        "if os.fork() == 0:\n"
        "    try: cell._unshare_as(os.getuid() + 1)\n"
        "    finally: os._exit(0)\n"
        "os.close(write)\n"
        "signal.alarm(20)\n"
        "print(os.read(read, 1))\n"
    )
    run = asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
    stdout, _ = await asyncio.wait_for((await run).communicate(), 60)
    assert stdout == b"b''\n"


async def test_the_owner_is_told_why_a_cell_could_not_enter_its_namespaces() -> None:
    code = (
        "import os, socket\n"
        "from palaestra.envs.sandboxes.supervisor import cell, frames, kernel\n"
        "def refuse(flags): raise OSError(28, 'no namespace is left')\n"
        "kernel.unshare = refuse\n"
        "owner, connection = socket.socketpair()\n"
        "if os.fork() == 0:\n"
        "    try: cell.start(connection, {}, '', os.getuid(), b'')\n"
        "    finally: os._exit(0)\n"
        "owner.settimeout(20)\n"
        "print(frames.receive(owner)[0])\n"
    )
    run = asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
    stdout, _ = await asyncio.wait_for((await run).communicate(), 60)
    assert stdout == b"{'error': 'setup', 'text': '[Errno 28] no namespace is left'}\n"
