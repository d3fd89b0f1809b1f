"""A loop small enough to learn within seconds: a tiny decoder, the embedded engine, and a one-letter environment."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from flax import nnx

from palaestra.envs.grading.verdict import Verdict
from palaestra.envs.tasks.task import FunctionCase, FunctionGrader, Task
from palaestra.envs.tasks.task_set import TaskSet
from palaestra.learners.batching import PackingShape
from palaestra.learners.config import LearnerConfig, OptimizerConfig
from palaestra.learners.learner import Learner
from palaestra.learners.models.config import DecoderConfig
from palaestra.learners.models.decoder import Decoder
from palaestra.recipes.policy_gradient import PolicyGradient, PolicyGradientConfig
from palaestra.recipes.sampling import KindSampler
from palaestra.rollout.chat import PLAIN_SPECIALS, ChatFormat
from palaestra.rollout.engines.continuous_batching import EngineShapes
from palaestra.rollout.engines.jax_engine import JaxEngine
from palaestra.rollout.episode import EpisodeOptions
from palaestra.rollout.scheduler import Scheduler, SchedulerLimits
from palaestra.rollout.tokenizer import byte_tokenizer
from palaestra.rollout.weights import WeightProbe

LETTERS = "abcd"
TOKENIZER = byte_tokenizer(PLAIN_SPECIALS)
CHAT = ChatFormat.plain(TOKENIZER, max_prompt_tokens=8, max_observation_tokens=4)
ALLOWED = {*map(ord, LETTERS), TOKENIZER.special("<eot>")}
CONFIG = DecoderConfig(
    vocab_size=TOKENIZER.vocab_size,
    hidden_size=16,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    intermediate_size=16,
    zero_output_projections=False,
    suppressed_ids=tuple(i for i in range(TOKENIZER.vocab_size) if i not in ALLOWED),
)


def _task(letter: str) -> Task:
    case = FunctionCase.of(expected=letter)
    return Task(
        id=f"say/{letter}",
        kind=letter,
        instruction=letter,
        grader=FunctionGrader(entry_point="f", hidden=(case,)),
        reference={"solution.py": letter},
    )


@dataclass
class SayTheLetter:
    """An environment of one turn: the action is right when it begins with the letter of the instruction."""

    fails: Callable[[str], bool] = lambda task_id: False
    letter: str = field(default="", init=False)

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        self.letter = (options or {})["task_id"][-1]
        return self.letter, self._info(None)

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if self.fails(self.letter):
            return "", float("nan"), False, True, {**self._info(None), "failure": "Died", "failure_message": "asked to"}
        reward = float(action.startswith(self.letter))
        return "", reward, True, False, self._info(reward)

    async def conclude(self) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "", 0.0, False, True, self._info(0.0)

    async def close(self) -> None:
        self.letter = ""

    @staticmethod
    def _info(reward: float | None) -> dict[str, Any]:
        verdict = None if reward is None else Verdict(passed=reward == 1.0, reward=reward, cases=())
        return {"failure": None, "failure_message": None, "reward": reward, "verdict": verdict}


@asynccontextmanager
async def _open_loop(
    *, seed: int = 0, fails: Callable[[str], bool] = lambda task_id: False, **config: Any
) -> AsyncIterator[PolicyGradient]:
    tasks = TaskSet.of(_task(letter) for letter in LETTERS)
    learner = Learner(
        Decoder(CONFIG, nnx.Rngs(seed)),
        LearnerConfig(OptimizerConfig(0.02), PackingShape(row_tokens=16, rows_per_chunk=8)),
    )
    shapes = EngineShapes(max_slots=32, max_tokens=16, row_buckets=(32,), column_buckets=(16,), decode_chunk=2)
    engine = JaxEngine(learner.model(), shapes=shapes)
    scheduler = Scheduler(
        engine,
        CHAT,
        lambda: SayTheLetter(fails),
        EpisodeOptions(max_action_tokens=3, max_context_tokens=12, truncated_action="run", retries=0),
        SchedulerLimits(max_episodes=32),
    )
    probe = WeightProbe(learner.model(), tuple(CHAT.opening("a")))
    settings = PolicyGradientConfig(**{"groups_per_update": 4, "group_size": 8, **config})
    try:
        sampler = KindSampler(tasks, seed=seed)
        yield PolicyGradient(learner, scheduler, tasks, sampler, probe, settings, seed=seed)
    finally:
        await engine.close()


@pytest.fixture
def open_loop() -> Callable[..., Any]:
    """``async with open_loop(seed=..., fails=..., **PolicyGradientConfig fields) as loop``."""
    return _open_loop
