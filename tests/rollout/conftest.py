"""Small real parts: a random decoder, an engine over it, and a scripted environment with the real one's methods."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from flax import nnx

from palaestra.envs.grading.verdict import Verdict
from palaestra.learners.models.config import DecoderConfig
from palaestra.learners.models.decoder import Decoder
from palaestra.rollout.chat import PLAIN_SPECIALS, ChatFormat
from palaestra.rollout.engines.continuous_batching import EngineShapes
from palaestra.rollout.engines.jax_engine import JaxEngine
from palaestra.rollout.engines.protocol import EngineStatus, Generation, SamplingParams
from palaestra.rollout.tokenizer import Tokenizer, byte_tokenizer

TINY = DecoderConfig(
    vocab_size=264,
    hidden_size=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=32,
    embedding_init_std=0.5,
    zero_output_projections=False,
    suppressed_ids=(256, 261, 262, 263),
)
SHAPES = EngineShapes(
    max_slots=6, max_tokens=48, row_buckets=(3, 6), column_buckets=(24, 48), prefill_width=8, decode_chunk=4
)


@pytest.fixture(scope="session")
def model() -> Decoder:
    return Decoder(TINY, nnx.Rngs(0))


@pytest.fixture(scope="session")
def other_params() -> Any:
    """Weights of the same structure with other values."""
    return nnx.state(Decoder(TINY, nnx.Rngs(1)), nnx.Param)


@pytest.fixture(scope="session")
def shapes() -> EngineShapes:
    return SHAPES


@pytest.fixture
async def engine(model: Decoder) -> AsyncIterator[JaxEngine]:
    engine = JaxEngine(model, shapes=SHAPES)
    yield engine
    await engine.close()


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return byte_tokenizer(PLAIN_SPECIALS)


@pytest.fixture(scope="session")
def chat(tokenizer: Tokenizer) -> ChatFormat:
    return ChatFormat.plain(tokenizer, max_prompt_tokens=32, max_observation_tokens=10)


@dataclass
class Script:
    """What scripted environments do, and what was done to them."""

    turns: int = 2
    """The turn that is graded."""
    reward: Callable[[str], float] = lambda task_id: 1.0
    fail_reset: Callable[[str, int], BaseException | None] = lambda task_id, attempt: None
    fail_step: Callable[[str, int], str | None] = lambda task_id, attempt: None
    step_s: Callable[[str], float] = lambda task_id: 0.0
    observation: str = "no"
    opened: int = 0
    closed: int = 0
    inside: int = 0
    entered: asyncio.Event = field(default_factory=asyncio.Event)
    most_inside: int = 0
    attempts: dict[tuple[str, int | None], int] = field(default_factory=dict)
    actions: list[str] = field(default_factory=list)

    def make_env(self) -> ScriptedEnv:
        self.opened += 1
        return ScriptedEnv(self)


class ScriptedEnv:
    """The methods of ``AsyncAgentEnv`` that an episode uses, driven by a ``Script``."""

    def __init__(self, script: Script) -> None:
        self.script, self.task_id, self.attempt, self.turn, self.open = script, "", 0, 0, True

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        self.task_id = (options or {})["task_id"]
        key = (self.task_id, seed)
        self.attempt = self.script.attempts[key] = self.script.attempts.get(key, 0) + 1
        error = self.script.fail_reset(self.task_id, self.attempt)
        if error is not None:
            raise error
        return self.task_id, self._info()

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.script.actions.append(action)
        self.script.inside += 1
        self.script.entered.set()
        self.script.most_inside = max(self.script.most_inside, self.script.inside)
        try:
            await asyncio.sleep(self.script.step_s(self.task_id))
        finally:
            self.script.inside -= 1
        self.turn += 1
        failure = self.script.fail_step(self.task_id, self.attempt)
        if failure is not None:
            info = {**self._info(), "failure": failure, "failure_message": "scripted"}
            return "", float("nan"), False, True, info
        graded = self.turn >= self.script.turns
        return self.script.observation, 0.0, graded, False, self._info(graded)

    async def conclude(self) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "", 0.0, False, True, self._info(graded=True)

    async def close(self) -> None:
        if self.open:
            self.open = False
            self.script.closed += 1

    def _info(self, graded: bool = False) -> dict[str, Any]:
        reward = self.script.reward(self.task_id) if graded else None
        verdict = Verdict(passed=reward == 1.0, reward=reward, cases=()) if reward is not None else None
        return {"reward": reward, "verdict": verdict, "failure": None, "failure_message": None}


@pytest.fixture(scope="session")
def make_script() -> type[Script]:
    return Script


@pytest.fixture
def script() -> Script:
    return Script()


class ScriptedEngine:
    """An engine that says what it is told to: a completion is ``say(prompt, sampling)`` as ids."""

    def __init__(self, say: Callable[[Sequence[int], SamplingParams], list[int]]) -> None:
        self.say = say
        self.prompts: list[tuple[int, ...]] = []
        self.generations: list[Generation] = []
        self.delay_s = 0.0
        self.running = 0
        self.most_running = 0
        self.state = EngineStatus(version=0, running=0, waiting=0, tokens_sampled=0, busy_s=0.0)

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingParams) -> Generation:
        self.prompts.append(tuple(prompt_ids))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(self.delay_s)
        finally:
            self.running -= 1
        ids = self.say(prompt_ids, sampling)[: sampling.max_new_tokens]
        stopped = bool(ids) and ids[-1] in sampling.stop_ids
        generation = Generation(
            ids=tuple(ids),
            logprobs=tuple(-0.5 - i for i in range(len(ids))),
            versions=(self.state.version,) * len(ids),
            finish_reason="stop" if stopped else "length",
        )
        self.generations.append(generation)
        return generation

    async def update_weights(self, params: Any, version: int) -> None:
        self.state = replace(self.state, version=version)

    async def status(self) -> EngineStatus:
        return self.state

    async def close(self) -> None:
        return None


@pytest.fixture(scope="session")
def make_engine() -> type[ScriptedEngine]:
    return ScriptedEngine


@pytest.fixture
def scripted_engine(tokenizer: Tokenizer) -> ScriptedEngine:
    """Says "ok" and ends its turn."""
    end = tokenizer.special("<eot>")
    return ScriptedEngine(lambda prompt, sampling: [*tokenizer.encode("ok"), end])
