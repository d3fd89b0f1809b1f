"""The doctor measures; it does not infer."""

from __future__ import annotations

import pytest

from palaestra.envs.sandboxes import BackendName
from palaestra.envs.sandboxes.doctor import BackendReport, Limit, Report, diagnose


async def test_a_working_backend_is_measured_and_every_limit_but_one_holds(
    backend: BackendName, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PALAESTRA_SANDBOX", backend)
    report = await diagnose()
    assert (report.chosen, report.healthy) == (backend, True)
    assert "PALAESTRA_SANDBOX" in report.reason
    (examined,) = [examined for examined in report.backends if examined.name == backend]
    assert examined.works
    assert [limit.name for limit in examined.limits if not limit.enforced] == ["memory of a cell"]
    assert all(limit.advice for limit in examined.limits if not limit.enforced)
    assert len(examined.limits) == 11


async def test_a_backend_that_cannot_work_carries_its_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setenv("PALAESTRA_SANDBOX", "podman")
    report = await diagnose()
    assert (report.chosen, report.healthy) == (None, False)
    (podman,) = [examined for examined in report.backends if examined.name == "podman"]
    assert podman.problem is not None
    assert "apt-get install podman" in podman.problem or "ordinary user" in podman.problem


def test_a_limit_that_does_not_hold_makes_the_report_unhealthy() -> None:
    broken = BackendReport("bubblewrap", None, (Limit("network", False, "connected", "do not run here"),))
    assert not Report("bubblewrap", "", (broken,)).healthy
    assert Report("bubblewrap", "", (BackendReport("bubblewrap", None, ()),)).healthy
