"""The doctor measures; it does not infer."""

from __future__ import annotations

import pytest

from palaestra.envs.sandboxes import BackendName
from palaestra.envs.sandboxes.doctor import BackendReport, Check, Report, diagnose

BROKEN = Check("network", "connect", "connected", "broken", "do not run here")
WARNING = Check("memory of a cell", "fill it", "all of it was held", "warning", "delegate")


async def test_a_working_backend_is_measured_and_every_promise_holds(
    backend: BackendName, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PALAESTRA_SANDBOX", backend)
    report = await diagnose()

    assert (report.chosen, report.healthy) == (backend, True)
    assert "PALAESTRA_SANDBOX" in report.reason
    (examined,) = [examined for examined in report.backends if examined.name == backend]
    assert examined.works
    checks = {check.name: check for check in examined.checks}
    limits = {"memory of a process", "processes", "CPU seconds", "open files", "file size", "file system size"}
    limits |= {"number of files", "network", "user id", "no_new_privs", "capabilities", "seccomp"}
    limits |= {"processes of others", "left processes"}
    assert {name for name in limits if checks[name].status != "ok"} == set()
    groups = {check.name: check for check in report.machine}["control groups"]
    memory_is_ours = "memory" in groups.seen
    assert checks["memory of a cell"].status == ("ok" if memory_is_ours else "warning")
    assert ("Podman" in checks, "storage driver" in checks) == ((True, True) if backend == "podman" else (False, False))
    everything = [*report.machine, *examined.checks]
    assert [check.name for check in everything if check.status in ("warning", "broken") and not check.advice] == []
    assert [check.name for check in everything if not (check.tried and check.seen)] == []


async def test_a_backend_that_cannot_work_carries_its_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setenv("PALAESTRA_SANDBOX", "podman")
    report = await diagnose()

    assert (report.chosen, report.healthy) == (None, False)
    (podman,) = [examined for examined in report.backends if examined.name == "podman"]
    assert podman.problem is not None
    assert "apt-get install podman" in podman.problem or "ordinary user" in podman.problem
    assert podman.checks == ()


@pytest.mark.parametrize(
    ("checks", "machine", "healthy"),
    [((), (), True), ((WARNING,), (WARNING,), True), ((BROKEN,), (), False), ((), (BROKEN,), False)],
    ids=["all well", "warnings", "a cell's promise is broken", "the machine cannot keep one"],
)
def test_only_a_broken_promise_makes_a_report_unhealthy(
    checks: tuple[Check, ...], machine: tuple[Check, ...], healthy: bool
) -> None:
    chosen = BackendReport("bubblewrap", None, checks)
    assert Report("bubblewrap", "", machine, (chosen,)).healthy == healthy


def test_a_promise_that_only_another_backend_breaks_does_not_count() -> None:
    backends = (BackendReport("podman", None, (BROKEN,)), BackendReport("bubblewrap", None, ()))
    assert Report("bubblewrap", "", (), backends).healthy
    assert not Report("podman", "", (), backends).healthy


def test_no_backend_is_unhealthy() -> None:
    assert not Report(None, "", (), (BackendReport("bubblewrap", "no bwrap", ()),)).healthy
