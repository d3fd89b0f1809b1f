"""What the machine's own files say, read from a made-up root."""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping
from pathlib import Path

import pytest

from palaestra.envs.sandboxes.cgroups import Delegation
from palaestra.envs.sandboxes.doctor import Check, machine
from palaestra.envs.sandboxes.doctor.machine import examine_machine

OURS = Delegation(2, {"memory": Path("/g"), "pids": Path("/g"), "cpu": Path("/g")}, None, "")
GOOD = {
    "proc/sys/kernel/seccomp/actions_avail": "kill_process kill_thread trap errno user_notif trace log allow",
    "proc/sys/kernel/pid_max": "4194304",
    "proc/sys/user/max_user_namespaces": "96363",
    "proc/version": "Linux version 6.1.0-18-amd64 (debian-kernel@lists.debian.org)",
    "proc/self/cgroup": "0::/user.slice\n",
}


def examine(
    folder: Path,
    files: Mapping[str, str] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    delegation: Delegation = OURS,
    architecture: str | None = None,
) -> dict[str, Check]:
    for name, text in {**GOOD, **(files or {})}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    checks = examine_machine(delegation, root=folder, environ=environ or {}, architecture=architecture)
    assert len({check.name for check in checks}) == len(checks)
    assert all(check.advice for check in checks if check.status in ("warning", "broken"))
    return {check.name: check for check in checks}


def test_a_good_machine_has_nothing_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    environ = {"XDG_RUNTIME_DIR": str(tmp_path)} if len(str(tmp_path)) < 60 else {}
    checks = examine(tmp_path, environ=environ)
    judged = {name: check.status for name, check in checks.items() if name != "runtime folder"}
    assert set(judged.values()) == {"ok"}, judged
    assert "AppArmor" not in checks


@pytest.mark.parametrize(
    ("files", "name", "status", "says"),
    [
        ({"proc/sys/user/max_user_namespaces": "0"}, "user namespaces", "broken", "max_user_namespaces=20000"),
        ({"proc/sys/user/max_user_namespaces": "100"}, "user namespaces", "warning", "max_user_namespaces=20000"),
        ({"proc/sys/kernel/unprivileged_userns_clone": "0"}, "user namespaces", "broken", "userns_clone=1"),
        ({"proc/sys/kernel/unprivileged_userns_clone": "1"}, "user namespaces", "ok", ""),
        ({"proc/sys/kernel/seccomp/actions_avail": "kill_thread trap"}, "seccomp filters", "broken", "4.14"),
        ({"proc/sys/kernel/seccomp/actions_avail": ""}, "seccomp filters", "broken", "CONFIG_SECCOMP_FILTER"),
        ({"proc/sys/kernel/apparmor_restrict_unprivileged_userns": "1"}, "AppArmor", "warning", "make podman"),
        ({"proc/sys/kernel/pid_max": "1000"}, "processes of this user", "warning", "kernel.pid_max"),
        (
            {"proc/self/cgroup": "4:pids:/user\n", "sys/fs/cgroup/pids/user/pids.max": "512"},
            "processes of this user",
            "warning",
            "pids.max of /user",
        ),
        (
            {"proc/self/cgroup": "0::/user\n", "sys/fs/cgroup/user/pids.max": "513"},
            "processes of this user",
            "warning",
            "pids.max of /user",
        ),
        ({"proc/version": "Linux version 6.6-microsoft-standard-WSL2"}, "surroundings", "note", "sandbox-setup"),
        ({".dockerenv": ""}, "surroundings", "note", "sandbox-setup"),
        ({"run/.containerenv": ""}, "surroundings", "note", "sandbox-setup"),
    ],
)
def test_what_a_machine_lacks_is_named_with_its_cure(
    tmp_path: Path, files: dict[str, str], name: str, status: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine.resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    check = examine(tmp_path, files)[name]
    assert (check.status, says in check.advice) == (status, True), check


def test_apparmor_is_content_where_each_program_has_a_profile(tmp_path: Path) -> None:
    files = {"proc/sys/kernel/apparmor_restrict_unprivileged_userns": "1"}
    profiles = {
        f"etc/apparmor.d/{name}": f"profile {name} /usr/bin/{name} {{}}" for name in ("podman", "crun", "bwrap")
    }
    assert examine(tmp_path, files | profiles)["AppArmor"].status == "ok"


@pytest.mark.parametrize(
    ("files", "environ", "says"),
    [
        ({"proc/version": "microsoft", "run/systemd/system/x": ""}, {}, "WSL"),
        ({"proc/version": "microsoft", ".dockerenv": ""}, {}, "a Docker container in WSL without systemd"),
        ({".dockerenv": ""}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "a Kubernetes pod"),
    ],
)
def test_it_says_where_it_runs(tmp_path: Path, files: dict[str, str], environ: dict[str, str], says: str) -> None:
    assert examine(tmp_path, files, environ=environ)["surroundings"].seen == says


def test_an_unknown_architecture_cannot_keep_promises(tmp_path: Path) -> None:
    assert examine(tmp_path, architecture="riscv64")["architecture"].status == "broken"
    assert examine(tmp_path, architecture="aarch64")["architecture"].status == "ok"


@pytest.mark.skipif(os.getuid() == 0, reason="root has no runtime folder")
def test_a_runtime_folder_must_be_ours_and_short(tmp_path: Path) -> None:
    def judged(folder: str) -> tuple[str, str]:
        check = examine(tmp_path, environ={"XDG_RUNTIME_DIR": folder} if folder else {})["runtime folder"]
        return check.status, check.seen

    long = tmp_path / ("x" * 100)
    long.mkdir()
    assert judged("")[0] == "warning"
    assert "not set" in judged("")[1]
    assert "does not" in judged("/proc/1")[1] or "not a folder" in judged("/proc/1")[1]
    assert "too long" in judged(str(long))[1]


@pytest.mark.parametrize(("soft", "status"), [(1024, "warning"), (65_536, "ok"), (resource.RLIM_INFINITY, "ok")])
def test_descriptors_bound_the_number_of_cells(
    tmp_path: Path, soft: int, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine.resource, "getrlimit", lambda _: (soft, resource.RLIM_INFINITY))
    check = examine(tmp_path)["open files of this process"]
    assert check.status == status
    assert ("924 cells" in check.seen) == (soft == 1024)


def test_control_groups_that_are_not_ours_are_a_warning_with_the_cure(tmp_path: Path) -> None:
    none = Delegation(1, {}, "memory: cannot make a group", "As root run: mkdir -p X")
    check = examine(tmp_path, delegation=none)["control groups"]
    assert (check.status, "mkdir -p X" in check.advice, "nothing" in check.seen) == ("warning", True, True)
    assert examine(tmp_path)["control groups"].seen == "version 2; ours to use: cpu, memory, pids"
