"""Each check of a run's end can fail."""

from __future__ import annotations

import subprocess

import pytest

from palaestra.envs.errors import PalaestraError
from palaestra.recipes.checks import child_processes, require_learning, require_no_children


def test_weights_that_changed_and_a_reward_that_moved_pass() -> None:
    require_learning("a", "b", [0.1, 0.2])


def test_weights_that_did_not_change_are_found() -> None:
    with pytest.raises(PalaestraError, match="changed no weight"):
        require_learning("a", "a", [0.1, 0.2])


@pytest.mark.parametrize("rewards", [[], [0.5], [0.5, 0.5]])
def test_a_reward_that_never_moved_is_found(rewards: list[float]) -> None:
    with pytest.raises(PalaestraError, match="never moved"):
        require_learning("a", "b", rewards)


def test_a_process_that_is_left_is_named() -> None:
    with subprocess.Popen(["sleep", "61.7"]) as process:
        try:
            assert "sleep 61.7 " in child_processes()
            with pytest.raises(PalaestraError, match=r"sleep 61\.7"):
                require_no_children()
        finally:
            process.kill()
    assert "sleep 61.7 " not in child_processes()
