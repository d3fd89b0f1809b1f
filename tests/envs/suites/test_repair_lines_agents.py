"""The scripted agents: what they do on paper, and what they reach in the real environment."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from palaestra.envs.async_env import AsyncAgentEnv
from palaestra.envs.errors import UsageError
from palaestra.envs.sandboxes import SandboxPool, open_pool
from palaestra.envs.suites.code.repair_lines import (
    LONG_KINDS,
    STANDARD_KINDS,
    Kind,
    RepairLine,
    repair_line,
    repair_lines,
)
from palaestra.envs.suites.code.repair_lines_agents import (
    Habits,
    demonstrated_program,
    expression_of,
    good_program,
)
from palaestra.envs.tasks.task_set import TaskSet

Agent = Callable[[str, str | None, str | None], str]
AT_ONCE = 4


async def play(pool: SandboxPool, tasks: TaskSet, task_id: str, agent: Agent) -> tuple[bool, list[str], list[str]]:
    """Whether the agent solves the task, its programs, and the observations after them."""
    env = AsyncAgentEnv(
        tasks, sandboxes=pool, feedback="last_line", action_format="program", interpreter="fork", max_turns=3
    )
    programs: list[str] = []
    seen: list[str] = []
    try:
        prompt, _ = await env.reset(options={"task_id": task_id})
        over = False
        while not over:
            programs.append(agent(prompt, programs[-1] if programs else None, seen[-1] if seen else None))
            observation, _, terminated, truncated, info = await env.step(programs[-1])
            seen.append(observation)
            over = terminated or truncated
            assert info["failure"] is None, info["failure_message"]
        return info["verdict"].passed, programs, seen
    finally:
        await env.close()


async def play_all(tasks: TaskSet, agent_for: Callable[[str], Agent]) -> dict[str, tuple[bool, list[str], list[str]]]:
    async with await open_pool() as pool:
        places = asyncio.Semaphore(AT_ONCE)

        async def one(task_id: str) -> tuple[bool, list[str], list[str]]:
            async with places:
                return await play(pool, tasks, task_id, agent_for(task_id))

        return dict(zip(tasks.ids, await asyncio.gather(*map(one, tasks.ids)), strict=True))


async def test_the_good_agent_solves_nearly_all_held_out_tasks_within_three_turns() -> None:
    tasks = repair_lines("held_out", seeds=range(34)).shuffled(0).select(limit=200)
    played = await play_all(tasks, lambda task_id: good_program)

    unsolved = {task_id: rest for task_id, (passed, *rest) in played.items() if not passed}
    assert len(played) == 200
    assert len(unsolved) <= 2, unsolved


async def test_the_good_agent_solves_the_longer_kinds_too() -> None:
    played = await play_all(repair_lines("held_out", kinds=LONG_KINDS, seeds=range(8)), lambda task_id: good_program)

    assert [task_id for task_id, (passed, *_) in played.items() if not passed] == []
    assert {len(programs) for task_id, (_, programs, _) in played.items() if "/chain-" in task_id} == {3}


async def test_names_can_only_be_read_from_the_message() -> None:
    """Without its observations the good agent never solves them: nothing else gives the real name away."""

    def blind(prompt: str, last_program: str | None, observation: str | None) -> str:
        return good_program(prompt, last_program, None if observation is None else "error")

    played = await play_all(repair_lines("held_out", kinds=("name", "attr"), seeds=range(8)), lambda task_id: blind)

    assert not any(passed for passed, *_ in played.values())


@pytest.mark.parametrize(("kind", "error"), [("name", "NameError"), ("attr", "AttributeError")])
async def test_the_message_suggests_the_real_name(kind: Kind, error: str) -> None:
    tasks = repair_lines("held_out", kinds=(kind,), seeds=range(8))
    played = await play_all(tasks, lambda task_id: good_program)

    for task_id, (_, _, seen) in played.items():
        line = repair_line(task_id)
        assert seen[0].startswith(f"{error}: ")
        assert seen[0].endswith(f"Did you mean: '{line.real}'?")


async def test_the_demonstrator_leaves_much_to_learn_and_still_shows_how() -> None:
    tasks = repair_lines("train", seeds=range(100, 120))

    def demonstrator(task_id: str) -> Agent:
        line, rng = repair_line(task_id), random.Random(f"demonstrator {task_id}")
        return lambda prompt, last, seen: demonstrated_program(line, last, seen, rng)

    played = await play_all(tasks, demonstrator)

    solved = sum(passed for passed, *_ in played.values()) / len(played)
    assert 0.2 < solved < 0.7
    assert any(passed and len(programs) > 1 for passed, programs, _ in played.values())


LINE = repair_line("repair_lines/train/name-000000")


def test_the_good_agent_fixes_its_form_before_it_believes_a_message() -> None:
    prompt = "def load_row(a,b) # difference"
    slipped = "def load_row(a,b)return a-b"

    assert good_program(prompt, slipped, "SyntaxError: expected ':'") == "def load_row(a,b):return a-b"
    assert good_program(prompt, "def load_row(a,b):return a-b", "AssertionError") == "def load_row(a,b):return b-a"


def test_the_good_agent_takes_the_suggestion_with_the_module_that_the_prompt_names() -> None:
    first = good_program("def load_row(a) # kit.read_tag", None, None)
    second = good_program("def load_row(a) # kit.read_tag", first, "AttributeError: ... Did you mean: 'read_box'?")

    assert first == "def load_row(a):return kit.read_tag(a)"
    assert second == "def load_row(a):return kit.read_box(a)"


def test_something_else_than_a_prompt_of_a_repair_line_is_refused() -> None:
    with pytest.raises(UsageError, match="not the prompt of a repair line"):
        good_program("Write a function", None, None)


def test_each_habit_can_be_had_alone() -> None:
    always = Habits(first=1.0, fix=1.0, same=0.0, slip=0.0)
    rng = random.Random(0)
    good = good_program(LINE.prompt, None, None)
    message = f"NameError: name '{LINE.stale}' is not defined. Did you mean: '{LINE.real}'?"

    assert demonstrated_program(LINE, None, None, rng, always) == good
    assert demonstrated_program(LINE, good, message, rng, always) == LINE.program(LINE.solution)
    stubborn = replace(always, fix=0.0, same=1.0)
    assert demonstrated_program(LINE, good, message, rng, stubborn) == good
    clumsy = replace(always, slip=1.0)
    slips = {demonstrated_program(LINE, None, None, rng, clumsy) for _ in range(20)}
    assert all(expression_of(slip) == expression_of(good) for slip in slips)
    assert good.replace(":", "", 1) in slips


def test_the_demonstrator_is_decided_by_its_random_stream() -> None:
    def program(seed: int) -> str:
        return demonstrated_program(LINE, "def x(a):return y(a)", "NameError", random.Random(seed))

    assert [program(seed) for seed in range(20)] == [program(seed) for seed in range(20)]
    assert len({program(seed) for seed in range(20)}) > 3


@pytest.mark.parametrize("kind", [*STANDARD_KINDS, *LONG_KINDS])
def test_guesses_are_programs_of_the_tasks_own_form_and_split(kind: Kind) -> None:
    guessing = Habits(first=0.0, fix=0.0, same=0.0, slip=0.0)
    line: RepairLine = repair_line(f"repair_lines/train/{kind}-000007")
    guesses = {demonstrated_program(line, None, None, random.Random(seed), guessing) for seed in range(40)}

    assert len(guesses) > 2
    assert all(guess == line.program(expression_of(guess)) for guess in guesses)


@pytest.mark.parametrize("wrong", [{"first": 1.5}, {"slip": -0.1}, {"fix": 0.6, "same": 0.6}])
def test_habits_that_are_no_probabilities_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="habits are probabilities"):
        Habits(**wrong)
