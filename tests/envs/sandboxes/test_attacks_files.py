"""Workspaces that an agent made to trip up whoever reads, writes, packs or removes its files."""

from __future__ import annotations

import io
import zipfile
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from palaestra.envs.errors import CellFull
from palaestra.envs.sandboxes import Python, Sandbox, Shell

if TYPE_CHECKING:
    from tests.envs.sandboxes.conftest import Arena

pytestmark = pytest.mark.asyncio(loop_scope="session")


@dataclass(frozen=True, slots=True)
class Trap:
    """A program that prepares the workspace, and what then comes of reading, of writing ``out``, and of a snapshot:
    the content, or the name of the error."""

    code: str
    read: str
    write: str = "written"
    snapshot: str = "taken"


TRAPS = {
    "a fifo": Trap("os.mkfifo('out')", "FileNotFoundError"),
    "a socket": Trap("import socket\nsocket.socket(socket.AF_UNIX).bind('out')", "FileNotFoundError"),
    "a link to an endless device": Trap("os.symlink('/dev/zero', 'out')", "FileNotFoundError"),
    "a link to a terminal": Trap("os.symlink('/dev/ptmx', 'out')", "FileNotFoundError"),
    "a link out of the workspace": Trap("os.symlink('/etc/passwd', 'out')", "FileNotFoundError"),
    "a link to itself": Trap("os.symlink('out', 'out')", "FileNotFoundError"),
    "a link to a process's memory": Trap("os.symlink('/proc/1/mem', 'out')", "FileNotFoundError"),
    "a folder": Trap("os.makedirs('out/full')", "FileNotFoundError", "CellFull"),
    "a file that nobody may read": Trap(
        "for name in ('out', 'other'):\n    open(name, 'w').write('x')\n    os.chmod(name, 0)",
        "FileNotFoundError",
        snapshot="CellFull",
    ),
    "a workspace that nobody may enter": Trap("os.chmod('.', 0)", "FileNotFoundError", "CellFull", "CellFull"),
    "a workspace that nobody may write": Trap("open('out', 'w').write('x')\nos.chmod('.', 0o500)", "x", "CellFull"),
    "a full disk": Trap(
        "open('out', 'w').write('x')\nn = 0\ntry:\n    while True:\n        n += 1\n"
        "        with open(f'f{n}', 'wb', buffering=0) as f:\n            while f.write(bytes(65536)) == 65536 and "
        "f.tell() < 8 << 20: pass\nexcept OSError: pass",
        "x",
        "written",  # what it replaces made room
    ),
    "no inode left": Trap(
        "open('out', 'w').write('x')\nn = 0\ntry:\n    while True:\n        n += 1\n        os.mkdir(f'd{n}')\n"
        "except OSError: pass",
        "x",
    ),
    "files with holes, larger than any memory": Trap(
        "open('out', 'w').write('x')\nfor n in range(2_000):\n    with open(f's{n}', 'wb') as f: f.truncate(8 << 20)",
        "x",
        snapshot="CellFull",
    ),
    "folders ten thousand deep": Trap(
        "open('out', 'w').write('x')\nfor _ in range(10_000):\n    os.mkdir('d')\n    os.chdir('d')",
        "x",
        snapshot="CellFull",
    ),
    "folders deeper than Python recurses": Trap(
        "open('out', 'w').write('x')\nfor _ in range(1100):\n    os.mkdir('d')\n    os.chdir('d')", "x"
    ),
    "names that are not text": Trap(
        "open('out', 'w').write('x')\nfor name in (b'\\xff\\xfe', b'a\\nb', b'-rf *', b'\\\\', b'\\x01\\x1b[2J'):\n"
        "    os.mkdir(name)\n    open(name + b'/' + name, 'w').write('y')",
        "x",
    ),
    "hard links": Trap(
        "open('out', 'w').write('x')\nos.mkdir('d')\nfor n in range(300): os.link('out', f'd/{n}')", "x"
    ),
    "times before and after all clocks": Trap("open('out', 'w').write('x')\nos.utime('out', (-1, 2 ** 40))", "x"),
}


async def _read(sandbox: Sandbox) -> str:
    try:
        return (await sandbox.read("out")).decode()
    except (FileNotFoundError, CellFull) as error:
        return type(error).__name__


async def _write(sandbox: Sandbox) -> str:
    try:
        await sandbox.write({"out": b"new"})
    except CellFull:
        return "CellFull"
    assert await sandbox.read("out") == b"new"
    return "written"


_LIST = Shell(
    "find . -mindepth 1 | LC_ALL=C sort | md5sum; find . -type f -print0 | LC_ALL=C sort -z | xargs -0 cat | md5sum"
)


async def _snapshot(sandbox: Sandbox) -> str:
    """Taken means that a new cell shows the same files."""
    try:
        snapshot = await sandbox.snapshot()
    except CellFull:
        return "CellFull"
    before = await sandbox.run(_LIST, timeout_s=30)
    await sandbox.renew(snapshot)
    after = await sandbox.run(_LIST, timeout_s=30)
    assert (before.stdout, before.exit_code) == (after.stdout, after.exit_code)
    return "taken"


@pytest.mark.parametrize("name", TRAPS)
async def test_a_workspace_full_of_traps_harms_nobody(arena: Arena, name: str) -> None:
    trap, sandbox = TRAPS[name], arena.sandbox
    prepared = await sandbox.run(Python(f"import os\n{trap.code}", "fork"), timeout_s=60)
    assert prepared.ok, prepared
    assert await _read(sandbox) == trap.read
    assert await _write(sandbox) == trap.write
    assert await _snapshot(sandbox) == trap.snapshot
    assert not sandbox.broken
    await arena.assert_all_well()


async def test_a_zip_bomb_that_the_owner_wrote_fills_its_own_cell_and_no_more(arena: Arena) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("large", bytes(64 << 20))
        for number in range(64):
            archive.writestr(f"file{number}", bytes(1 << 20))
    await arena.sandbox.write({"bomb.zip": buffer.getvalue()})
    code = (
        "import zipfile\nfor name in zipfile.ZipFile('bomb.zip').namelist():\n"
        "    try: zipfile.ZipFile('bomb.zip').extract(name)\n    except OSError as error: print(error.strerror)"
    )
    result = await arena.sandbox.run(Python(code, "fork"), timeout_s=60)
    assert set(result.stdout_text.splitlines()) == {"File too large", "No space left on device"}, result
    await arena.assert_all_well()
