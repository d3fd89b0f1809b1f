"""What Podman says of itself, in the shapes of the two versions that Debian has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from palaestra.envs.sandboxes.doctor import Check
from palaestra.envs.sandboxes.doctor.rootless_podman import containers_conf, judge_info, judge_settings


@pytest.fixture(params=["4.3", "5.4"])
def info(request: pytest.FixtureRequest) -> dict[str, Any]:
    """``podman info --format json``, shortened."""
    loaded: dict[str, Any] = json.loads(Path(__file__).with_name(f"podman-info-{request.param}.json").read_text())
    return loaded


def judge(info: dict[str, Any], free_locks: int = 2048) -> dict[str, Check]:
    checks = judge_info(info, free_locks)
    assert all(check.advice for check in checks if check.status in ("warning", "broken"))
    return {check.name: check for check in checks}


def test_a_good_podman_has_nothing_to_do(info: dict[str, Any]) -> None:
    checks = judge(info)
    assert {check.status for check in checks.values()} == {"ok", "note"}
    assert checks["Podman"].seen in ("4.3.1", "5.4.2")
    assert checks["OCI runtime"].seen.startswith("crun version 1.")
    assert checks["conmon"].seen.startswith("conmon version 2.1.")
    assert checks["storage driver"].seen == "overlay, the kernel's own, on extfs"
    assert checks["subordinate ids"].seen == "65537 user and 65537 group ids"
    assert checks["Podman's control groups"].seen == "v1, cgroupfs; delegated: none"


def test_vfs_is_flagged(info: dict[str, Any]) -> None:
    info["store"]["graphDriverName"] = "vfs"
    check = judge(info)["storage driver"]
    assert (check.status, "podman system reset" in check.advice) == ("warning", True)


def test_fuse_overlayfs_is_named(info: dict[str, Any]) -> None:
    program = {"Executable": "/usr/bin/fuse-overlayfs", "Version": "fusermount3 version: 3.14.0"}
    info["store"]["graphOptions"] = {"overlay.mount_program": program}
    assert "fuse-overlayfs" in judge(info)["storage driver"].seen


@pytest.mark.parametrize("backing", ["nfs", "overlayfs"])
def test_a_file_system_that_cannot_hold_an_overlay_is_flagged(info: dict[str, Any], backing: str) -> None:
    info["store"]["graphStatus"]["Backing Filesystem"] = backing
    check = judge(info)["storage driver"]
    assert (check.status, "graphroot" in check.advice, backing in check.seen) == ("warning", True, True)


@pytest.mark.parametrize("name", ["uidmap", "gidmap"])
def test_too_few_subordinate_ids_are_flagged(info: dict[str, Any], name: str) -> None:
    info["host"]["idMappings"][name] = info["host"]["idMappings"][name][:1]
    check = judge(info)["subordinate ids"]
    assert (check.status, "/etc/subuid" in check.advice, "1 " in check.seen) == ("warning", True, True)


def test_a_full_disk_and_few_locks_are_flagged(info: dict[str, Any]) -> None:
    info["store"]["graphRootUsed"] = info["store"]["graphRootAllocated"] - (1 << 30)
    checks = judge(info, free_locks=12)
    assert checks["disk for images"].status == "warning"
    assert checks["disk for images"].seen.startswith("1.0 of ")
    assert (checks["locks"].status, "12 " in checks["locks"].seen) == ("warning", True)


def test_a_podman_that_does_not_tell_of_its_disk_is_not_taken_for_one_without(info: dict[str, Any]) -> None:
    del info["store"]["graphRootAllocated"], info["store"]["graphRootUsed"]
    assert judge(info)["disk for images"].status == "note"


@pytest.mark.parametrize(("version", "status"), [("3.4.4", "warning"), ("4.2.0", "warning"), ("10.0.1", "ok")])
def test_an_old_podman_is_flagged(info: dict[str, Any], version: str, status: str) -> None:
    info["version"]["Version"] = version
    assert judge(info)["Podman"].status == status


def test_a_podman_without_runtime_or_conmon_is_flagged(info: dict[str, Any]) -> None:
    del info["host"]["ociRuntime"], info["host"]["conmon"]
    assert {judge(info)[name].status for name in ("OCI runtime", "conmon")} == {"warning"}


def test_the_users_settings_come_over_those_of_the_machine(tmp_path: Path) -> None:
    home = tmp_path / "home"
    texts = {
        tmp_path / "usr/share/containers/containers.conf": "[containers]\nkeyring = true\npids_limit = 7\n",
        tmp_path / "etc/containers/containers.conf.d/10-a.conf": "[engine]\nnum_locks = 4096\n",
        home / ".config/containers/containers.conf": "[containers]\nkeyring = false\n",
        home / ".config/containers/containers.conf.d/broken.conf": "not toml at all",
    }
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    merged = containers_conf(tmp_path, home)
    assert merged == {"containers": {"keyring": False, "pids_limit": 7}, "engine": {"num_locks": 4096}}


@pytest.mark.parametrize(
    ("containers", "keyrings", "copies"),
    [
        ({}, "warning", "ok"),
        ({"keyring": True}, "warning", "ok"),
        ({"keyring": False}, "ok", "ok"),
        ({"keyring": False, "userns": "auto"}, "ok", "warning"),
        ({"keyring": False, "userns": "host"}, "ok", "ok"),
    ],
)
def test_keyrings_and_id_remapping_are_flagged(
    tmp_path: Path, containers: dict[str, Any], keyrings: str, copies: str
) -> None:
    checks = {check.name: check for check in judge_settings({"containers": containers}, tmp_path)}
    assert (checks["kernel keyrings"].status, checks["copies of images"].status) == (keyrings, copies)
