"""``scripts/setup-podman``, as far as it can be run without changing the machine. CI begins by running all of it."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts/setup-podman"
ORDINARY = next((user.pw_name for user in pwd.getpwall() if user.pw_uid >= 1000 and user.pw_name != "nobody"), None)
needs_a_user = pytest.mark.skipif(ORDINARY is None, reason="this machine has no ordinary user")


def setup(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"}
    return subprocess.run(
        [SCRIPT, *arguments],
        capture_output=True,
        text=True,
        env=environment,
        stdin=subprocess.DEVNULL,
        timeout=120,
        check=False,
    )


@needs_a_user
def test_a_dry_run_says_line_by_line_what_would_be_done_and_changes_nothing() -> None:
    assert ORDINARY is not None
    watched = [Path("/etc/subuid"), Path("/etc/subgid"), Path(f"~{ORDINARY}/.config").expanduser()]
    watched.append(Path(f"/run/user/{pwd.getpwnam(ORDINARY).pw_uid}"))
    before = [(path.exists(), os.access(path, os.R_OK) and path.stat().st_mtime_ns) for path in watched]
    done = setup("--dry-run", "--user", ORDINARY)

    assert done.returncode in (0, 1), done.stderr
    lines = [line for line in done.stdout.partition("\n\n")[0].splitlines() if not line.startswith(" ")]
    assert {line[:14].strip() for line in lines} <= {"already", "would change", "cannot"}
    for subject in ("packages", "/etc/subuid", "/etc/subgid", "storage.conf", "containers.conf", "cgroup", "mount"):
        assert subject in done.stdout or subject.replace("cgroup", "control groups") in done.stdout
    after = [(path.exists(), os.access(path, os.R_OK) and path.stat().st_mtime_ns) for path in watched]
    assert after == before


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--user", "root", "--dry-run"), "not for root"),
        (("--user", "no-such-user", "--dry-run"), "useradd --create-home no-such-user"),
        (("--usr", "x"), "unknown argument '--usr'"),
        (("--user",), "--user needs a name"),
    ],
)
def test_a_wrong_request_is_one_message_and_exit_code_2(arguments: tuple[str, ...], says: str) -> None:
    done = setup(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr


@needs_a_user
@pytest.mark.skipif(os.getuid() == 0, reason="root may")
def test_without_root_it_says_how_to_run_it() -> None:
    assert ORDINARY is not None
    done = setup("--user", ORDINARY)
    assert done.returncode == 2
    assert "sudo" in done.stderr
    assert "--dry-run" in done.stderr


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_the_scripts_are_clean_shell() -> None:
    done = subprocess.run(
        ["shellcheck", SCRIPT, ROOT / ".ci/run"], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout == ""
