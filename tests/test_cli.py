"""The ``palaestra`` program, run as a user runs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from palaestra.cli import app

ROOT = Path(__file__).parents[1]
HUMANEVAL = Path(os.environ.get("PALAESTRA_DATA", ROOT / "../shared/data")) / "humaneval" / "HumanEval.jsonl.gz"
COMMAND = [sys.executable, "-m", "palaestra.cli"]


def task(task_id: str, reference: str = "def one():\n    return 1\n", **grader: Any) -> dict[str, Any]:
    return {
        "id": task_id,
        "kind": "write",
        "instruction": "Write one().",
        "grader": {"kind": "function", "entry_point": "one", "hidden": [{"args": "()", "expected": "1"}], **grader},
        "reference": {"solution.py": reference},
    }


def write(folder: Path, *tasks: dict[str, Any]) -> str:
    path = folder / "tasks.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in tasks))
    return str(path)


def palaestra(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})


@pytest.mark.skipif(not HUMANEVAL.exists(), reason="HumanEval.jsonl.gz is not here; set PALAESTRA_DATA")
@pytest.mark.parametrize(("agent", "passes"), [("reference", 164), ("empty", 0)])
def test_humaneval_in_sandboxes(agent: str, passes: int) -> None:
    done = palaestra("eval", "--env", "AgentCode-v0", "--tasks", f"humaneval:{HUMANEVAL}", "--agent", agent)

    assert done.exit_code == 0, done.output
    assert f"\n{passes}/164 passed in " in done.output
    assert " tasks/s" in done.output


def test_eval_counts_what_did_not_pass_by_class(tmp_path: Path) -> None:
    path = write(tmp_path, task("good"), task("wrong", "def one():\n    return 2\n"), task("raises", "one = 1 / 0\n"))

    done = palaestra("eval", "--tasks", path, "--agent", "reference", "--concurrency", "2")

    assert done.exit_code == 0, done.output
    assert "1/3 passed" in done.output
    assert "wrong 1" in done.output
    assert "error 1" in done.output


def test_infrastructure_failures_are_counted_apart_and_are_no_success(tmp_path: Path) -> None:
    broken = {"kind": "script", "entry_point": "one", "check": "import nowhere\ndef check(candidate): pass"}
    bad = {**task("bad"), "grader": broken}

    done = palaestra("eval", "--tasks", write(tmp_path, task("good"), bad), "--agent", "reference")

    assert done.exit_code == 1
    assert "1/2 passed" in done.output
    assert "infrastructure failures, not judged: 1" in done.output
    assert "bad: GraderFault" in done.output


def test_a_limit_takes_the_first_tasks(tmp_path: Path) -> None:
    done = palaestra("eval", "--tasks", write(tmp_path, *map(task, "abc")), "--agent", "empty", "--limit", "2")

    assert "0/2 passed" in done.output


def test_listing_and_validating_tasks(tmp_path: Path) -> None:
    path = write(tmp_path, task("good"), {**task("given"), "files": {"solution.py": "def one():\n    return 1\n"}})

    listed = palaestra("tasks", "list", "--tasks", path)
    assert (listed.exit_code, "good" in listed.output, "Write one()." in listed.output) == (0, True, True)

    validated = palaestra("tasks", "validate", "--tasks", path)
    assert validated.exit_code == 1
    assert "given: the untouched state passes" in validated.output
    assert "2 tasks, 1 problems" in validated.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("eval", "--agent", "reference", "--env", "AgentCod-v0"), "did you mean 'AgentCode-v0'"),
        (("eval", "--agent", "refrence"), "the agents are empty, reference"),
        (("eval", "--agent", "empty", "--tasks", "humaneval:nowhere.jsonl"), "no task file 'nowhere.jsonl'"),
        (("eval", "--agent", "empty", "--tasks", "nonsense"), "is not 'builtin'"),
        (("eval", "--agent", "empty", "--backend", "docker"), "'podman', 'bubblewrap'"),
        (("eval", "--agent", "empty", "--limit", "0"), "--limit"),
        (("eval", "--agent"), "--agent"),
        (("eval", "--agnt", "x"), "--agnt"),
        (("evil",), "evil"),
    ],
)
def test_a_request_that_cannot_be_met_is_one_message_and_exit_code_2(arguments: tuple[str, ...], says: str) -> None:
    done = palaestra(*arguments)

    assert done.exit_code == 2
    assert says in done.output


def test_a_malformed_task_file_is_named_by_file_line_and_field(tmp_path: Path) -> None:
    path = write(tmp_path, task("good"), task("bad", entry_point=""), {**task("worse"), "limits": {"turns": 0}})

    done = palaestra("eval", "--tasks", path, "--agent", "reference")

    assert done.exit_code == 2
    assert f"{path}:3: field 'limits.turns'" in done.output


def test_a_backend_that_is_not_there_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PALAESTRA_SANDBOX", "nonsense")

    done = palaestra("eval", "--tasks", write(tmp_path, task("a"), task("b")), "--agent", "empty")

    assert done.exit_code == 2
    assert done.output.count("unknown sandbox backend 'nonsense'") == 1


def test_as_a_program_it_says_what_is_wrong_without_a_traceback() -> None:
    done = subprocess.run([*COMMAND, "eval", "--agent", "refrence"], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: unknown agent 'refrence'; the agents are empty, reference\n"


def test_an_interrupt_leaves_nothing_running_and_exits_with_130(tmp_path: Path) -> None:
    endless = [task(f"endless-{number}", "def one():\n    while True: pass\n") for number in range(4)]
    process = subprocess.Popen(
        ["env", "--default-signal=INT", *COMMAND, "eval", "--tasks", write(tmp_path, *endless), "--agent", "reference"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "PALAESTRA_SANDBOX": "bubblewrap"},  # whose processes are descendants of ours
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while len(children := descendants(process.pid)) < 3 and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(0.5)
    children = descendants(process.pid)

    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)

    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert len(children) >= 3, "nothing was running yet"
    assert not [pid for pid in children if Path(f"/proc/{pid}").exists() and state(pid) != "Z"]


def descendants(pid: int) -> list[int]:
    found: list[int] = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and folder.name != str(pid):
            ancestor = int(folder.name)
            while ancestor > 1 and ancestor != pid:
                ancestor = parent(ancestor)
            if ancestor == pid:
                found.append(int(folder.name))
    return found


def parent(pid: int) -> int:
    return int(stat(pid)[1]) if stat(pid) else 0


def state(pid: int) -> str:
    return stat(pid)[0] if stat(pid) else "Z"


def stat(pid: int) -> list[str]:
    """State, parent, ... of a process; [] when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def test_doctor_names_the_choice_and_what_was_measured() -> None:
    done = palaestra("doctor")

    assert done.exit_code in (0, 1)
    assert "chosen: " in done.output
    assert "memory of a process" in done.output
