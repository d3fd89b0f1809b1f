"""The Gymnasium facade: the contract of ``gymnasium.Env``, and sharing one loop thread and one pool."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import pytest
from gymnasium.error import ClosedEnvironmentError, ResetNeeded
from gymnasium.utils.env_checker import check_env

from palaestra.envs import loop, shared_pools
from palaestra.envs.agent_env import AgentEnv
from palaestra.envs.errors import UsageError
from palaestra.envs.tasks.task import Task
from palaestra.envs.tasks.task_set import TaskSet

MakeTask = Callable[..., Task]
SUBMIT_RIGHT = "```python path=solution.py\ndef add(a, b):\n    return a + b\n```\n<submit/>"


@pytest.fixture
def env(three_tasks: TaskSet) -> Iterator[AgentEnv]:
    made = AgentEnv(three_tasks, render_mode="ansi")
    yield made
    made.close()


@pytest.mark.parametrize(
    "options", [{}, {"feedback": "last_line", "interpreter": "fork"}], ids=["terminal", "last_line"]
)
def test_gymnasiums_checker_is_content_with_warnings_as_errors(three_tasks: TaskSet, options: dict[str, Any]) -> None:
    env = gymnasium.make("AgentCode-v0", tasks=three_tasks, render_mode="ansi", **options)
    try:
        check_env(env.unwrapped)
    finally:
        env.close()


def test_an_episode_through_gymnasium_make(three_tasks: TaskSet) -> None:
    env = gymnasium.make("AgentCode-v0", tasks=three_tasks)
    observation, info = env.reset(seed=0, options={"task_id": "add"})
    assert observation in env.observation_space
    assert info["task_id"] == "add"

    observation, reward, terminated, truncated, info = env.step(SUBMIT_RIGHT)

    assert observation in env.observation_space
    assert (reward, terminated, truncated) == (1.0, True, False)
    assert type(reward) is float
    env.close()


def test_a_seed_gives_the_same_task_files_and_observation(env: AgentEnv) -> None:
    def seen() -> tuple[str, str, str]:
        observation, info = env.reset(seed=11)
        listing, *_ = env.step("```bash\nls -A; md5sum * 2>/dev/null\n```")
        return observation, info["task_id"], listing

    assert seen() == seen()


def test_shell_commands_of_an_episode_go_on_where_the_last_one_ended(env: AgentEnv) -> None:
    env.reset(options={"task_id": "add"})
    env.step("```bash\nmkdir sub && cd sub && export NAME=value\n```")
    env.step('```bash\ngreet() { echo "hello $NAME from $PWD"; }; exit 3\n```\n```python\nprint(1)\n```')

    assert env.step("```bash\ngreet\n```")[0] == "$ greet\nhello value from /workspace/sub"

    env.reset(options={"task_id": "add"})
    observation, *_ = env.step("```bash\npwd; echo [$NAME]; greet\n```")
    assert "/workspace\n[]\n" in observation
    assert "greet: command not found" in observation


def test_rendering_is_the_episode_so_far(env: AgentEnv) -> None:
    env.reset(options={"task_id": "add"})
    env.step("```bash\necho hello\n```")

    text = env.render()

    assert text is not None
    assert "Repair add" in text
    assert "$ echo hello\nhello" in text


def test_misuse_raises_what_gymnasium_raises(three_tasks: TaskSet) -> None:
    env = AgentEnv(three_tasks)
    with pytest.raises(ResetNeeded):
        env.step("<submit/>")
    assert env.reset() is not None
    assert env.render() is None
    env.close()
    env.close()
    for call in (env.reset, lambda: env.step("x"), env.render):
        with pytest.raises(ClosedEnvironmentError):
            call()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"max_turn": 1}, "did you mean 'max_turns'"),
        ({"backends": "podman"}, "did you mean 'backend'"),
        ({"backend": "docker"}, "'podman', 'bubblewrap'"),
        ({"tasks": "humanevil:x"}, "not 'builtin'"),
        ({"tasks": 3}, "TaskSet or a str"),
        ({"tasks": "nowhere.jsonl"}, "no task file 'nowhere.jsonl'"),
    ],
)
def test_an_argument_that_cannot_be_is_a_usage_error(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        gymnasium.make("AgentCode-v0", **arguments)


def test_another_render_mode_is_a_usage_error(three_tasks: TaskSet) -> None:
    with pytest.raises(UsageError, match="not one of None, 'ansi'"):
        AgentEnv(three_tasks, render_mode="human")


def test_environments_share_a_pool_and_close_it_with_the_last(three_tasks: TaskSet) -> None:
    first, second = AgentEnv(three_tasks), AgentEnv(three_tasks)
    first.reset(options={"task_id": "add"})
    second.reset(options={"task_id": "double"})
    assert len(shared_pools._shared) == 1

    first.close()
    assert len(shared_pools._shared) == 1
    second.step("```bash\necho still here\n```")
    second.close()
    assert not shared_pools._shared


def test_a_task_with_other_limits_gets_cells_with_those(make_function_task: MakeTask) -> None:
    task = make_function_task(limits={"memory_mib": 128, "step_s": 5.0})
    env = AgentEnv(TaskSet.of([task]))
    env.reset()

    observation, *_ = env.step("```python\nbytearray(200 * 1024 * 1024)\n```")

    assert "MemoryError" in observation
    env.close()


async def test_it_works_from_code_that_runs_in_an_event_loop(three_tasks: TaskSet) -> None:
    env = AgentEnv(three_tasks)
    env.reset(options={"task_id": "add"})

    assert env.step(SUBMIT_RIGHT)[1] == 1.0
    env.close()


def test_the_loop_thread_refuses_to_wait_for_itself() -> None:
    async def nested() -> None:
        loop.run(asyncio.sleep(0))

    with pytest.raises(UsageError, match="cannot wait for itself"):
        loop.run(nested())


def test_what_work_raises_is_raised_where_it_is_waited_for() -> None:
    async def fail() -> None:
        raise LookupError("from the loop thread")

    with pytest.raises(LookupError, match="from the loop thread"):
        loop.run(fail())


def test_the_loop_thread_starts_again_after_it_was_stopped() -> None:
    async def answer() -> int:
        return 42

    assert loop.run(answer()) == 42
    loop.stop()
    assert loop.run(answer()) == 42


IN_A_CHILD = """
import os
from palaestra.envs.agent_env import AgentEnv
from palaestra.envs.tasks.load import resolve

env = AgentEnv({path!r})
env.reset(seed=0)
child = os.fork()
if child == 0:
    own = AgentEnv({path!r})
    own.reset(seed=0)
    good = own.step({action!r})[1] == 1.0
    own.close()
    env.close()
    os._exit(0 if good else 1)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0, "the child could not use its own environment"
assert env.step({action!r})[1] == 1.0, "the parent's environment suffered from the child"
print("both worked")
"""


def test_a_forked_child_has_a_loop_of_its_own_and_leaves_the_parents_alone(
    tmp_path: Any, make_function_task: MakeTask
) -> None:
    """In a process of its own, which also ends with an open environment and must not hang or complain.

    Python 3.12 and later warn of every fork of a process with threads; that warning is not ours.
    """
    path = tmp_path / "tasks.jsonl"
    path.write_text(make_function_task().model_dump_json() + "\n")
    program = IN_A_CHILD.format(path=str(path), action=SUBMIT_RIGHT)

    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, "both worked\n", "")


def test_gymnasiums_own_vector_classes_work_on_it(make_function_task: MakeTask) -> None:
    tasks = TaskSet.of([make_function_task()])
    vector = gymnasium.make_vec("AgentCode-v0", num_envs=2, vectorization_mode="sync", tasks=tasks)
    observations, _ = vector.reset(seed=0)
    assert len(observations) == 2

    _, rewards, terminated, _, _ = vector.step((SUBMIT_RIGHT, "<submit/>"))

    assert rewards.tolist() == [1.0, 0.0]
    assert terminated.all()
    vector.close()


@pytest.mark.parametrize("make", ["make('AgentCode-v0')", "make_vec('AgentCode-v0', num_envs=2)"])
def test_the_process_ends_by_itself_with_environments_open(make: str) -> None:
    program = f"import gymnasium, palaestra\nenv = gymnasium.{make}\nenv.reset(seed=0)\nprint('open')"

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)

    assert (done.returncode, done.stdout, done.stderr) == (0, "open\n", "")
