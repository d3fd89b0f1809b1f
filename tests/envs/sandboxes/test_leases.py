"""Whose containers may be removed: only those whose owner is known to be gone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from palaestra.envs.sandboxes import leases
from palaestra.envs.sandboxes.leases import Lease, is_abandoned


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
