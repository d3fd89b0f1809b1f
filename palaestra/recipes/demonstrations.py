"""Demonstrations: a scripted agent plays episodes through the real environment, and its turns become token rows."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from palaestra.envs.async_env import AsyncAgentEnv
from palaestra.envs.errors import InfrastructureError
from palaestra.envs.play import play_all
from palaestra.learners.rows import TokenRow
from palaestra.rollout.chat import ChatFormat
from palaestra.rollout.engines.protocol import Generation
from palaestra.rollout.trajectory import Trajectory


class ScriptedAgent(Protocol):
    """Chooses the next action from what is visible. Pure: everything random comes from ``rng``."""

    def __call__(self, task_id: str, last_action: str | None, last_observation: str | None, rng: random.Random) -> str:
        """The next action; both ``last_`` arguments are None on the first turn."""


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One scripted episode. ``turns`` pairs each action with the observation that followed it."""

    task_id: str
    instruction: str
    turns: tuple[tuple[str, str], ...]
    passed: bool


async def collect_demonstrations(
    task_ids: Sequence[str],
    agent: ScriptedAgent,
    make_env: Callable[[], AsyncAgentEnv],
    *,
    seed: int,
    concurrency: int,
    on_episode: Callable[[Demonstration], None] = lambda _: None,
) -> list[Demonstration]:
    """Play one episode of each task, ``concurrency`` at a time; the result is in the order of ``task_ids``.

    The same seed gives the same actions, whatever the timing: every episode has a generator of its own.

    Raises:
        InfrastructureError: an episode ended in an infrastructure failure; there is nothing to learn from a broken
            demonstration, so the first one ends the collection.
    """

    async def play(env: AsyncAgentEnv, index: int, task_id: str) -> Demonstration:
        done = await _play(env, task_id, agent, random.Random(f"{seed}/{index}"))
        on_episode(done)
        return done

    return await play_all(task_ids, make_env, play, concurrency=concurrency)


async def _play(env: AsyncAgentEnv, task_id: str, agent: ScriptedAgent, rng: random.Random) -> Demonstration:
    instruction, _ = await env.reset(options={"task_id": task_id})
    turns: list[tuple[str, str]] = []
    action, observation, ended = None, None, False
    while not ended:
        action = agent(task_id, action, observation, rng)
        observation, _, terminated, truncated, info = await env.step(action)
        if info["failure"] is not None:
            raise InfrastructureError(f"demonstration of {task_id!r} failed: {info['failure']}")
        turns.append((action, observation))
        ended = terminated or truncated
    verdict = info["verdict"]
    return Demonstration(task_id, instruction, tuple(turns), passed=verdict is not None and verdict.passed)


def demonstration_row(demonstration: Demonstration, chat: ChatFormat) -> TokenRow:
    """The supervised row: rendered exactly as a rollout would have been, the agent's tokens as targets."""
    trajectory = Trajectory()
    trajectory.append_given(chat.opening(demonstration.instruction))
    for index, (action, observation) in enumerate(demonstration.turns):
        ids = tuple(chat.action_ids(action))
        zeros = (0.0,) * len(ids)
        trajectory.append_sampled(Generation(ids, zeros, (0,) * len(ids), "stop"))
        if index + 1 < len(demonstration.turns):
            trajectory.append_given(chat.observation(observation))
    return trajectory.row()
