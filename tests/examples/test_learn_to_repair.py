"""The demo's short profile runs to its end through every part, and says what it must say."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPT = ROOT / "examples" / "learn_to_repair.py"


@pytest.mark.timeout(600)
def test_the_smoke_profile_ends_with_its_summary_and_leaves_the_run_folder(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, "--profile", "smoke", "--seed", "3", "--runs", tmp_path],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    summary = json.loads(done.stdout.splitlines()[-1])
    assert set(summary) == {
        *("pass_before", "pass_after", "greedy_after", "turn1_after", "seconds", "sandbox_steps", "seed")
    }
    assert summary["seed"] == 3
    assert summary["sandbox_steps"] > 1000
    (folder,) = tmp_path.iterdir()
    names = {path.name for path in folder.iterdir()}
    assert {"settings.json", "summary.json", "metrics.jsonl", "episodes.jsonl", "curve.png", "model"} <= names
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    updates = [record for record in records if record["phase"] == "reinforcement"]
    assert max(record["learner/k3"] for record in updates) < 1e-9
    assert "turn 1" in done.stderr


def test_a_wrong_backend_or_a_run_folder_that_cannot_be_made_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = subprocess.run(
        [sys.executable, SCRIPT, "--profile", "smoke", "--runs", tmp_path / "file"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: cannot make the run folder")
    assert "Traceback" not in done.stderr


def test_an_interrupt_ends_with_130_and_leaves_no_process(tmp_path: Path) -> None:
    run = subprocess.Popen(
        ["env", "--default-signal=INT", sys.executable, SCRIPT, "--profile", "smoke", "--runs", tmp_path],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert run.stderr is not None
    for line in run.stderr:
        if "sandbox_steps" in line:
            break
    run.send_signal(signal.SIGINT)
    _, errors = run.communicate(timeout=60)
    assert run.returncode == 130, errors[-2000:]
    assert "interrupted" in errors
    deadline = time.monotonic() + 10
    while (left := processes_of_session(run.pid)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left


def processes_of_session(session: int) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if os.getsid(int(entry.name)) == session:
                    found.append((entry / "cmdline").read_text().replace("\0", " "))
            except (ProcessLookupError, FileNotFoundError):
                continue
    return found
