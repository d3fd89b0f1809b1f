"""Files of a cell, seen from outside."""

from __future__ import annotations

import pytest

from palaestra.envs.errors import CellFull, UsageError
from palaestra.envs.sandboxes import Python, Sandbox, Shell

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_what_is_written_is_read_back_byte_for_byte(sandbox: Sandbox) -> None:
    files = {"a.txt": b"one", "deep/er/b.bin": bytes(range(256)), "empty": b""}
    await sandbox.write(files)
    assert {path: await sandbox.read(path) for path in files} == files
    await sandbox.write({"a.txt": b"shorter"})
    assert await sandbox.read("a.txt") == b"shorter"


async def test_programs_own_the_files_that_are_written_for_them(sandbox: Sandbox) -> None:
    await sandbox.write({"folder/file": b"1"})
    result = await sandbox.run(Shell("echo 2 >> folder/file && rm -r folder && ls -A"), timeout_s=5)
    assert (result.exit_code, result.stdout) == (0, b"")


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../../x", "", "a//b", "./a", "a\0b", "a/"])
async def test_paths_that_leave_the_workspace_are_refused(sandbox: Sandbox, path: str) -> None:
    with pytest.raises(UsageError, match="relative to /workspace"):
        await sandbox.write({path: b"x"})
    with pytest.raises(UsageError, match="relative to /workspace"):
        await sandbox.read(path)


async def test_symbolic_links_are_never_followed(sandbox: Sandbox) -> None:
    plant = "ln -s /etc/passwd leaf; ln -s /tmp folder; echo secret > /tmp/secret; mkdir kept; ln -s /tmp kept/inner"
    await sandbox.run(Shell(plant), timeout_s=5)
    for path in ("leaf", "folder/secret", "kept/inner/secret"):
        with pytest.raises(FileNotFoundError):
            await sandbox.read(path)
    with pytest.raises(CellFull):
        await sandbox.write({"folder/new": b"x"})
    await sandbox.write({"leaf": b"replaced"})
    assert await sandbox.read("leaf") == b"replaced"
    result = await sandbox.run(Shell("ls /tmp; head -c 4 /etc/passwd"), timeout_s=5)
    assert result.stdout == b"secret\nroot"


async def test_only_regular_files_are_read(sandbox: Sandbox) -> None:
    await sandbox.run(Shell("mkfifo pipe; mkdir folder; ln -s /dev/zero zero"), timeout_s=5)
    for path in ("pipe", "folder", "zero", "missing", "missing/deeper"):
        with pytest.raises(FileNotFoundError):
            await sandbox.read(path)


async def test_a_file_larger_than_asked_for_is_not_cut_silently(sandbox: Sandbox) -> None:
    await sandbox.write({"big": b"x" * 2000})
    with pytest.raises(CellFull, match="2000 bytes"):
        await sandbox.read("big", max_bytes=1999)
    assert len(await sandbox.read("big", max_bytes=2000)) == 2000


async def test_files_that_do_not_fit_are_the_agents_doing(sandbox: Sandbox) -> None:
    with pytest.raises(CellFull, match="do not fit"):
        await sandbox.write({"huge": b"x" * (17 << 20)})
    await sandbox.run(Python("[open(f'f{i}', 'wb').write(b'x' * (3 << 20)) for i in range(5)]", "fork"), timeout_s=5)
    with pytest.raises(CellFull, match="No space left"):
        await sandbox.write({"more": b"x" * (4 << 20)})
    with pytest.raises(FileNotFoundError):
        await sandbox.read("more")


async def test_a_folder_in_the_place_of_a_file_is_the_agents_doing(sandbox: Sandbox) -> None:
    await sandbox.run(Shell("mkdir -p solution.py/x"), timeout_s=5)
    with pytest.raises(CellFull):
        await sandbox.write({"solution.py": b"x"})


async def test_a_snapshot_brings_back_files_folders_links_modes_and_nothing_else(sandbox: Sandbox) -> None:
    make = (
        "mkdir -p a/empty; printf hello > a/file; chmod 750 a/file; ln -s file a/link; ln a/file hard; mkfifo pipe; "
        "touch /tmp/elsewhere; (sleep 100 &)"
    )
    await sandbox.run(Shell(make), timeout_s=5)
    listing = Shell("find . -not -name pipe -printf '%P %M %l %n\\n' | sort; cat a/file; ls /tmp")
    before = await sandbox.run(listing, timeout_s=5)
    snapshot = await sandbox.snapshot()
    await sandbox.run(Shell("rm -rf a; echo other > new"), timeout_s=5)
    await sandbox.renew(snapshot)
    after = await sandbox.run(listing, timeout_s=5)
    assert before.stdout.replace(b"elsewhere\n", b"") == after.stdout
    assert b"pipe" not in (await sandbox.run(Shell("ls"), timeout_s=5)).stdout


async def test_a_snapshot_of_what_the_agent_made_unreadable_is_the_agents_doing(sandbox: Sandbox) -> None:
    await sandbox.run(Shell("mkdir locked; chmod 0 locked"), timeout_s=5)
    with pytest.raises(CellFull, match="cannot be read"):
        await sandbox.snapshot()


async def test_a_closed_sandbox_says_so(sandbox: Sandbox) -> None:
    await sandbox.close()
    await sandbox.close()
    with pytest.raises(UsageError, match="closed"):
        await sandbox.run(Shell("true"), timeout_s=1)
    with pytest.raises(UsageError, match="closed"):
        await sandbox.renew()
