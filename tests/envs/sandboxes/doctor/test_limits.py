"""A limit that does not hold is told from one that does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from palaestra.envs.sandboxes import ExecResult, Python, SandboxSpec, open_pool
from palaestra.envs.sandboxes.cgroups import Delegation
from palaestra.envs.sandboxes.doctor.limits import PROBES, SPEC, judge_cell_memory, judge_daemon
from palaestra.envs.sandboxes.protocol import KilledBy

OURS = Delegation(1, {"memory": Path("/sys/fs/cgroup/memory/palaestra-1000")}, None, "")
NOT_OURS = Delegation(1, {}, "memory: no", "As root run: mkdir ...")
GENEROUS = SandboxSpec(
    memory_mib=2048, pids=200, file_mib=64, workspace_mib=64, inodes=20_000, open_files=300, cpu_s=60
)


def ended(stdout: bytes = b"", *, killed_by: KilledBy | None = None, orphans_killed: int = 0) -> ExecResult:
    exit_code = None if killed_by else 0
    return ExecResult(exit_code, None, stdout, b"", 0, 0, b"", False, 0.1, 0.1, 1.0, False, killed_by, orphans_killed)


async def test_every_limit_that_a_cell_does_not_have_is_seen_to_be_missing() -> None:
    lacking = {"memory of a process", "processes", "open files", "file size", "file system size", "number of files"}
    async with await open_pool(GENEROUS, backend="bubblewrap") as pool:
        sandbox = await pool.acquire()
        for probe in PROBES:
            if probe.name in lacking:
                await sandbox.renew()
                check = probe.judge(await sandbox.run(Python(probe.code, "fork"), timeout_s=30))
                assert (check.name, check.status, bool(check.advice)) == (probe.name, "broken", True)
        await sandbox.close()


@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: probe.name)
def test_a_probe_that_was_killed_or_saw_something_else_broke_a_promise(probe: object) -> None:
    judge = probe.judge  # type: ignore[attr-defined]
    assert judge(ended(b"something else\n")).status == "broken"
    assert "killed by deadline" in judge(ended(killed_by="deadline")).seen
    assert judge(ended(f"{probe.expected[0]}\n".encode())).status == "ok"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("result", "delegation", "status"),
    [
        (ended(b"384 MiB\n"), NOT_OURS, "warning"),
        (ended(b"384 MiB\n"), OURS, "broken"),
        (ended(b"240 MiB\n"), OURS, "ok"),
        (ended(killed_by="memory"), OURS, "ok"),
        (replace(ended(b"384 MiB\n"), killed_by="memory"), OURS, "ok"),
    ],
    ids=["no group", "a group that does not hold", "children were killed", "the program was killed", "killed late"],
)
def test_the_memory_of_a_cell_is_a_promise_only_where_a_group_is_ours(
    result: ExecResult, delegation: Delegation, status: str
) -> None:
    check = judge_cell_memory(result, delegation)
    assert check.status == status
    assert bool(check.advice) == (status != "ok")
    assert str(SPEC.memory_mib) in check.tried


def test_a_daemon_that_lives_on_is_a_broken_promise() -> None:
    assert judge_daemon(ended(orphans_killed=1)).status == "ok"
    assert judge_daemon(ended()).status == "broken"
