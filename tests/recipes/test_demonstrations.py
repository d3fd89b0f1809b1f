"""Scripted agents play through the real environment, and their rows are what a rollout would have recorded."""

from __future__ import annotations

import random

import pytest

from palaestra.envs.async_env import AsyncAgentEnv
from palaestra.envs.errors import InfrastructureError, SandboxDied, UsageError
from palaestra.envs.sandboxes import BackendName, SandboxPool, open_pool
from palaestra.envs.suites.code.repair_lines import repair_line, repair_lines
from palaestra.envs.suites.code.repair_lines_agents import demonstrated_program, good_program
from palaestra.recipes.demonstrations import Demonstration, collect_demonstrations, demonstration_row
from palaestra.rollout.chat import PLAIN_SPECIALS, ChatFormat
from palaestra.rollout.tokenizer import byte_tokenizer

TASKS = repair_lines("train", kinds=("op", "name", "guard"), seeds=range(8))


def env_on(pool: SandboxPool) -> AsyncAgentEnv:
    return AsyncAgentEnv(TASKS, sandboxes=pool, feedback="last_line", action_format="program", interpreter="fork")


def good(task_id: str, last: str | None, seen: str | None, rng: random.Random) -> str:
    return good_program(repair_line(task_id).prompt, last, seen)


def imperfect(task_id: str, last: str | None, seen: str | None, rng: random.Random) -> str:
    return demonstrated_program(repair_line(task_id), last, seen, rng)


async def collect(pool: SandboxPool, agent: object, concurrency: int, seed: int = 0) -> list[Demonstration]:
    return await collect_demonstrations(TASKS.ids, agent, lambda: env_on(pool), seed=seed, concurrency=concurrency)  # type: ignore[arg-type]


async def test_episodes_come_back_in_the_order_of_the_tasks_and_a_good_agent_passes(backend: BackendName) -> None:
    async with await open_pool(backend=backend) as pool:
        played = await collect(pool, good, concurrency=5)
    assert [done.task_id for done in played] == list(TASKS.ids)
    assert all(done.passed for done in played)
    renamed = next(done for done in played if "/name-" in done.task_id)
    assert "Did you mean" in renamed.turns[0][1]
    assert len(renamed.turns) == 2


async def test_the_same_seed_gives_the_same_episodes_whatever_the_concurrency() -> None:
    async with await open_pool() as pool:
        alone, together, other = [await collect(pool, imperfect, n, seed) for n, seed in ((1, 0), (7, 0), (7, 1))]
    assert alone == together
    assert alone != other


def test_a_row_holds_the_actions_as_targets_and_everything_else_as_context() -> None:
    chat = ChatFormat.plain(byte_tokenizer(PLAIN_SPECIALS), max_prompt_tokens=20, max_observation_tokens=20)
    row = demonstration_row(Demonstration("t", "do", (("one", "no"), ("two", "")), passed=True), chat)
    assert chat.tokenizer.decode([int(i) for i in row.ids]) == "<user>do<assistant>one<eot><tool>no<assistant>two<eot>"
    targets = [int(i) for i, m in zip(row.ids, row.mask, strict=True) if m]
    assert chat.tokenizer.decode(targets) == "one<eot>two<eot>"


async def test_a_concurrency_of_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="concurrency must be at least 1, got 0"):
        await collect_demonstrations(
            TASKS.ids, good, lambda: pytest.fail("no environment is made"), seed=0, concurrency=0
        )


async def test_an_infrastructure_failure_ends_the_collection_instead_of_becoming_an_example() -> None:
    class Dying(AsyncAgentEnv):
        async def _play(self, action: str) -> object:
            raise SandboxDied("the host is gone")

    async with await open_pool() as pool:
        with pytest.raises(InfrastructureError, match="SandboxDied"):
            await collect_demonstrations(
                TASKS.ids, good, lambda: Dying(TASKS, sandboxes=pool, action_format="program"), seed=0, concurrency=3
            )
