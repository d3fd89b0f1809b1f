"""Whose containers may be removed: only those whose owner is known to be gone."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from palaestra.envs.sandboxes import leases
from palaestra.envs.sandboxes.leases import Lease, base_folder, is_abandoned


@pytest.fixture
def lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lease]:
    """A lease of an owner who has a runtime folder of its own."""
    monkeypatch.setattr(leases, "base_folder", lambda: tmp_path)
    held = Lease("podman")
    monkeypatch.undo()
    yield held
    held.release()


def test_an_owner_with_another_runtime_folder_is_seen_to_live(lease: Lease) -> None:
    assert leases.base_folder() != lease.file.parent
    assert not is_abandoned(lease.file)


def test_what_cleans_tmp_by_age_enters_no_folder_in_which_a_lease_is_held(lease: Lease) -> None:
    """systemd-tmpfiles takes this lock on each folder, and goes past those that are locked."""
    folder = os.open(lease.file.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with pytest.raises(BlockingIOError):
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        lease.release()
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(folder)


def test_a_lease_can_be_had_while_tmp_is_being_cleaned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "base_folder", lambda: tmp_path)
    folder = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        Lease("podman").release()
    finally:
        os.close(folder)
    assert not list(tmp_path.iterdir())


def test_an_owner_that_released_its_lease_is_gone(lease: Lease) -> None:
    lease.release()
    assert is_abandoned(lease.file)


def test_an_owner_that_died_left_a_lease_that_nobody_holds(tmp_path: Path) -> None:
    left = tmp_path / "podman-0123.lease"
    left.touch()
    assert is_abandoned(left)


@pytest.mark.parametrize("label", ["", "podman-0123", "podman-0123.lease", "/no/such/folder/podman-0123.lease", "/tmp"])
def test_an_owner_who_cannot_be_seen_from_here_is_left_alone(label: str) -> None:
    assert not is_abandoned(Path(label))


@pytest.mark.parametrize("runtime", ["/tmp/" + "x" * 90, "/nonexistent", ""])
def test_sockets_have_short_paths_whatever_the_environment(
    runtime: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
    monkeypatch.setenv("TMPDIR", str(tmp_path / ("y" * 100)))
    assert len(os.fsencode(base_folder() / "podman-0123456789ab/control/supervisor.sock")) < 108


def test_a_lease_that_is_taken_for_abandoned_before_it_is_locked_is_made_again(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really_lock, thefts = leases._lock, 3

    def lock(descriptor: int) -> bool:
        nonlocal thefts
        thefts -= 1
        if thefts >= 0:
            (file,) = base.glob("*.lease")
            leases.remove(file)
        return really_lock(descriptor)

    monkeypatch.setattr(leases, "_lock", lock)
    lease = Lease("bwrap")
    assert (thefts, lease.folder.is_dir(), lease.file.exists()) == (-1, True, True)
    monkeypatch.undo()
    assert not leases.is_abandoned(lease.file)
    lease.release()
    assert not any(base.iterdir())
