"""Where control groups may be made, from what the kernel says and from trying."""

from __future__ import annotations

from pathlib import Path

import pytest

from palaestra.envs.sandboxes.cgroups import Hierarchy, delegation, find_delegation, hand_down, hierarchies, version_of

_V1 = """
31 23 0:28 / /sys/fs/cgroup rw,relatime shared:5 - tmpfs tmpfs rw,mode=755
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:6 - cgroup cgroup rw,cpu,cpuacct
39 31 0:36 / /sys/fs/cgroup/with\\040space rw - cgroup cgroup rw,pids
40 31 0:37 / /sys/fs/cgroup/systemd rw,relatime shared:14 - cgroup cgroup rw,name=systemd
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime shared:15 - cgroup2 cgroup2 rw
"""
_V2 = "\n30 23 0:26 / /sys/fs/cgroup rw,nosuid,nodev shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
_IN_DOCKER = "\n35 31 0:32 /docker/abc /sys/fs/cgroup/memory ro master:9 - cgroup cgroup rw,memory\n"


def test_each_controller_of_version_1_has_its_own_mount_and_group() -> None:
    found = hierarchies(_V1.strip(), "4:memory:/user/a\n3:cpu,cpuacct:/\n2:pids:/b\n1:name=systemd:/c\n0::/d")
    assert found == {
        "memory": Hierarchy(1, Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup/memory/user/a")),
        "cpu": Hierarchy(1, Path("/sys/fs/cgroup/cpu,cpuacct"), Path("/sys/fs/cgroup/cpu,cpuacct")),
        "pids": Hierarchy(1, Path("/sys/fs/cgroup/with space"), Path("/sys/fs/cgroup/with space/b")),
        "": Hierarchy(2, Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup/unified/d")),
    }


def test_version_2_has_one_mount_and_one_group_for_all() -> None:
    found = hierarchies(_V2.strip(), "0::/user.slice/user-1000.slice/run-7.scope")
    own = Path("/sys/fs/cgroup/user.slice/user-1000.slice/run-7.scope")
    assert found == {"": Hierarchy(2, Path("/sys/fs/cgroup"), own)}


@pytest.mark.parametrize(
    ("membership", "own"),
    [
        ("4:memory:/docker/abc", "/sys/fs/cgroup/memory"),
        ("4:memory:/docker/abc/inner", "/sys/fs/cgroup/memory/inner"),
        ("4:memory:/docker/abcdef", None),
        ("4:memory:/../other", None),
    ],
)
def test_our_own_group_is_found_only_where_it_is_mounted(membership: str, own: str | None) -> None:
    found = hierarchies(_IN_DOCKER.strip(), membership)
    assert found["memory"].own == (None if own is None else Path(own))


def test_where_nothing_is_mounted_it_is_said_what_to_do() -> None:
    found = delegation({}, None, 1000)
    assert (found.version, dict(found.controllers)) == (0, {})
    assert found.problem == "memory, pids, cpu: no hierarchy that has it is mounted"
    assert "Mount" in found.advice


def test_a_folder_that_root_gave_us_below_the_mount_is_used(tmp_path: Path) -> None:
    (tmp_path / "palaestra-1000").mkdir()
    found = delegation({"memory": Hierarchy(1, tmp_path, tmp_path / "not" / "there")}, None, 1000)
    assert dict(found.controllers) == {"memory": tmp_path / "palaestra-1000"}
    assert found.problem == "pids, cpu: no hierarchy that has it is mounted"


def test_without_one_the_advice_names_it(tmp_path: Path) -> None:
    found = delegation({"memory": Hierarchy(1, tmp_path, None)}, None, 1000)
    assert dict(found.controllers) == {}
    assert found.problem is not None
    assert "No such file or directory" in found.problem
    assert f"mkdir -p {tmp_path}/palaestra-1000; chown -R 1000" in found.advice


def test_a_group_that_was_chosen_and_does_not_work_is_a_problem_and_no_other_is_taken(tmp_path: Path) -> None:
    (tmp_path / "palaestra-1000").mkdir()
    found = delegation({"memory": Hierarchy(1, tmp_path, tmp_path)}, "/chosen", 1000)
    assert dict(found.controllers) == {}
    assert f"{tmp_path}/chosen" in str(found.problem)
    (tmp_path / "chosen").mkdir()
    assert delegation({"memory": Hierarchy(1, tmp_path, tmp_path)}, "/chosen", 1000).controllers == {
        "memory": tmp_path / "chosen"
    }


def fake_group(folder: Path, *, controllers: str, enabled: str = "", processes: str = "", inner: bool = True) -> Path:
    """What a version 2 group looks like; files stay as they were written."""
    folder.mkdir()
    (folder / "cgroup.controllers").write_text(f"{controllers}\n")
    (folder / "cgroup.subtree_control").write_text(f"{enabled}\n")
    (folder / "cgroup.procs").write_text(processes)
    if inner:
        (folder / "cgroup.type").write_text("domain\n")
    return folder


def test_a_version_2_group_moves_its_processes_out_before_it_hands_controllers_down(tmp_path: Path) -> None:
    group = fake_group(tmp_path / "g", controllers="cpuset memory pids", processes="17\n")
    assert version_of(group) == 2
    assert hand_down(group, ["memory", "cpu"]) == {"cpu": f"{group} is not given it"}
    assert (group / "palaestra-leaf" / "cgroup.procs").read_text() == "17"
    assert (group / "cgroup.subtree_control").read_text() == "+memory"


def test_nothing_is_moved_where_nothing_has_to_change(tmp_path: Path) -> None:
    enabled = fake_group(tmp_path / "a", controllers="memory pids", enabled="memory pids", processes="17\n")
    assert hand_down(enabled, ["memory", "pids"]) == {}
    root = fake_group(tmp_path / "b", controllers="memory", processes="1\n", inner=False)
    assert hand_down(root, ["memory"]) == {}
    assert not list(tmp_path.glob("*/palaestra-leaf"))


@pytest.mark.parametrize("group", ["own", "leaf", "chosen", "root's"])
def test_on_version_2_it_is_our_own_group_or_what_root_chooses(tmp_path: Path, group: str) -> None:
    mount = fake_group(tmp_path / "m", controllers="memory pids cpu", inner=False)
    inner = fake_group(mount / "inner", controllers="memory pids cpu", enabled="memory pids cpu")
    own = fake_group(inner / "palaestra-leaf", controllers="memory") if group == "leaf" else inner
    chosen, uid = {"own": (None, 1000), "leaf": (None, 1000), "chosen": ("inner", 0), "root's": (None, 0)}[group]
    found = delegation({"": Hierarchy(2, mount, own)}, chosen, uid)
    assert (found.version, found.problem) == (2, None)
    assert set(found.controllers.values()) == {mount if group == "root's" else inner}


def test_what_this_machine_gives_is_tried_and_not_only_read() -> None:
    found = find_delegation()
    assert (found.problem is None) == (set(found.controllers) == {"memory", "pids", "cpu"})
    assert (found.advice == "") == (found.problem is None)
    for place in found.controllers.values():
        (place / "cells-test").mkdir()
        (place / "cells-test").rmdir()
