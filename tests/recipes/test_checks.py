"""Each check of a run's end can fail."""

from __future__ import annotations

import os
import re
import subprocess
import sys

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
    program = "print('ready', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()  # before it says so, the kernel may not yet show its command line
        named = " ".join([sys.executable, "-c", program])
        assert named in child_processes()
        with pytest.raises(PalaestraError, match=re.escape(named)):
            require_no_children()
        process.kill()
    assert named not in child_processes()


def test_a_process_without_a_command_line_is_named_too() -> None:
    process = subprocess.Popen(["true"])
    try:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and nobody has asked for its status
        assert "[true]" in child_processes()
    finally:
        process.wait()
