"""The whole of it: real tasks in real sandboxes, the embedded engine, the scheduler."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from palaestra.envs.async_env import AsyncAgentEnv
from palaestra.envs.sandboxes import SandboxPool, SandboxSpec, open_pool
from palaestra.envs.tasks.task import FunctionCase, FunctionGrader, Task
from palaestra.envs.tasks.task_set import TaskSet
from palaestra.learners.models.decoder import Decoder
from palaestra.rollout.chat import ChatFormat
from palaestra.rollout.engines.continuous_batching import EngineShapes
from palaestra.rollout.engines.jax_engine import JaxEngine
from palaestra.rollout.episode import EpisodeOptions
from palaestra.rollout.scheduler import Group, Scheduler, SchedulerLimits

pytestmark = pytest.mark.asyncio(loop_scope="module")

RIGHT, WRONG = "def add(a, b): return a + b", "def add(a, b): return a + c"


def adding(number: int) -> Task:
    return Task(
        id=f"add-{number}",
        kind="write",
        instruction="add",
        grader=FunctionGrader(
            entry_point="add",
            visible=(FunctionCase.of(1, number, expected=1 + number),),
            hidden=(FunctionCase.of(40, 2, expected=42), FunctionCase.of("a", "b", expected="ab")),
        ),
        reference={"solution.py": RIGHT},
    )


TASKS = TaskSet.of(adding(number) for number in range(3))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[SandboxPool]:
    async with await open_pool(SandboxSpec(memory_mib=256)) as pool:
        yield pool


def scheduler(pool: SandboxPool, engine: Any, chat: ChatFormat, options: EpisodeOptions, **rest: Any) -> Scheduler:
    def make_env() -> AsyncAgentEnv:
        return AsyncAgentEnv(
            TASKS, sandboxes=pool, action_format="program", feedback="last_line", interpreter="fork", **rest
        )

    return Scheduler(engine, chat, make_env, options, SchedulerLimits(max_episodes=8, max_executing=4))


async def groups_of(played: Scheduler, group_size: int) -> list[Group]:
    async with played.run_groups(TASKS, group_size=group_size, seed=3) as stream:
        groups = [group async for group in stream]
    assert stream.stats.episodes_failed == 0
    return groups


async def test_an_agent_that_repairs_after_reading_the_error_passes_on_its_second_turn(
    pool: SandboxPool, make_engine: Any, chat: ChatFormat
) -> None:
    """What it says depends on the observation's tokens alone."""
    error = chat.tokenizer.encode("NameError")

    def say(prompt: Any, sampling: Any) -> list[int]:
        seen = any(list(prompt[i : i + len(error)]) == error for i in range(len(prompt)))
        return chat.action_ids(RIGHT if seen else WRONG)

    long = ChatFormat.plain(chat.tokenizer, max_prompt_tokens=32, max_observation_tokens=60, keep="head")
    options = EpisodeOptions(max_action_tokens=40, max_context_tokens=200)
    groups = await groups_of(scheduler(pool, make_engine(say), long, options, turn_penalty=0.1), group_size=2)
    results = [result for group in groups for result in group.results]
    assert len(results) == 6
    for result in results:
        assert (result.ending, result.passed, result.pass_turn, result.reward) == ("graded", True, 2, 0.9)
        assert [turn.action for turn in result.turns] == [WRONG, RIGHT]
        assert result.turns[0].observation == "NameError: name 'c' is not defined"


async def test_a_random_policy_plays_to_the_turn_limit_and_is_graded(
    pool: SandboxPool, model: Decoder, chat: ChatFormat
) -> None:
    shapes = EngineShapes(max_slots=4, max_tokens=96, row_buckets=(4,), prefill_width=8, decode_chunk=4)
    engine = JaxEngine(model, shapes=shapes)
    options = EpisodeOptions(max_action_tokens=10, max_context_tokens=96, truncated_action="run")
    groups = await groups_of(scheduler(pool, engine, chat, options, max_turns=2), group_size=2)
    await engine.close()
    for group in groups:
        assert group.zero_variance
        for result in group.results:
            assert (result.ending, result.reward, result.passed) == ("graded", 0.0, False)
            assert len(result.turns) == 2
            assert result.trajectory.mask[-1] == 1


async def test_a_full_context_is_graded_as_it_stands(pool: SandboxPool, make_engine: Any, chat: ChatFormat) -> None:
    """The first action fails the visible test; its observation leaves no room for a second."""
    engine = make_engine(lambda prompt, sampling: chat.action_ids(WRONG))
    options = EpisodeOptions(max_action_tokens=40, max_context_tokens=40)
    groups = await groups_of(scheduler(pool, engine, chat, options), group_size=1)
    for group in groups:
        (result,) = group.results
        assert (result.ending, result.reward, len(result.turns)) == ("context", 0.0, 1)
