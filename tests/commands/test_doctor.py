"""What ``palaestra doctor`` prints and returns."""

from __future__ import annotations

import io
import json
import re

import pytest
from rich.console import Console
from typer.testing import CliRunner

from palaestra.cli import app
from palaestra.commands import doctor
from palaestra.commands.doctor import run_doctor, show_report
from palaestra.envs.sandboxes.doctor import BackendReport, Check, Report

GOOD = Check("seccomp", "make a user namespace", "EPERM", "ok")
WARNING = Check("memory of a cell", "fill it", "all of it was held", "warning", "Delegate [memory] to us.")
BROKEN = Check("network", "connect to 192.0.2.1", "connected", "broken", "Do not run here.")


def report(chosen: str | None, *checks: Check, machine: tuple[Check, ...] = ()) -> Report:
    backends = (
        BackendReport("podman", "podman: there is no podman command", ()),
        BackendReport("bubblewrap", None, checks),
    )
    return Report(chosen, "bubblewrap works", machine, backends)


def shown(shown_report: Report, width: int = 100) -> str:
    text = io.StringIO()
    show_report(shown_report, Console(file=text, width=width))
    return text.getvalue()


def test_a_report_shows_each_check_with_what_was_tried_and_seen() -> None:
    text = shown(report("bubblewrap", GOOD))
    assert re.search(r"seccomp +ok +make a user namespace +EPERM", text)
    assert "podman does not work here:\npodman: there is no podman command" in text
    assert "chosen: bubblewrap, because bubblewrap works" in text
    assert "promises that do not hold" not in text


def test_each_cure_is_told_once_with_what_it_is_for() -> None:
    text = " ".join(shown(report("bubblewrap", GOOD, WARNING, machine=(WARNING,))).split())
    assert text.count("Delegate [memory] to us.") == 1
    assert "memory of a cell (bubblewrap), memory of a cell (machine): Delegate" in text


def test_a_broken_promise_is_said_last_of_all() -> None:
    last = shown(report("bubblewrap", GOOD, BROKEN)).strip().splitlines()[-1]
    assert last == "promises that do not hold here: network (bubblewrap)"


@pytest.mark.parametrize("width", [40, 80, 200])
def test_nothing_is_cut_off_however_narrow_the_terminal(width: int) -> None:
    letters = "".join(shown(report("bubblewrap", Check("x", "tried", "w" * 150, "note")), width).split())
    assert letters.count("w") >= 150
    assert "…" not in letters


@pytest.mark.parametrize(
    ("diagnosis", "code"),
    [
        (report("bubblewrap", GOOD, WARNING), 0),
        (report("bubblewrap", BROKEN), 1),
        (report("bubblewrap", GOOD, machine=(BROKEN,)), 1),
        (report(None), 1),
    ],
    ids=["warnings", "broken in the chosen one", "broken by the machine", "nothing works"],
)
@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
def test_the_exit_code_says_whether_promises_hold(
    diagnosis: Report, code: int, as_json: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def diagnose() -> Report:
        return diagnosis

    monkeypatch.setattr(doctor, "diagnose", diagnose)
    text = io.StringIO()
    assert run_doctor(Console(file=text, width=80), as_json=as_json) == code
    if as_json:
        assert json.loads(text.getvalue()) == diagnosis.as_json()


def test_the_json_of_this_machine_has_the_documented_schema() -> None:
    done = CliRunner().invoke(app, ["doctor", "--json"])
    printed = json.loads(done.stdout)

    assert set(printed) == {"schema", "healthy", "chosen", "reason", "machine", "backends"}
    assert printed["schema"] == 1
    assert done.exit_code == (0 if printed["healthy"] else 1)
    assert [backend["name"] for backend in printed["backends"]] == ["podman", "bubblewrap"]
    assert printed["chosen"] in (None, "podman", "bubblewrap")
    for backend in printed["backends"]:
        assert set(backend) == {"name", "works", "problem", "checks"}
        assert backend["works"] == (backend["problem"] is None)
    checks = [*printed["machine"], *(check for backend in printed["backends"] for check in backend["checks"])]
    for check in checks:
        assert set(check) == {"name", "tried", "seen", "status", "advice"}
        assert check["status"] in ("ok", "note", "warning", "broken")
