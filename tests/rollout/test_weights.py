from __future__ import annotations

from typing import Any

import pytest

from palaestra.envs.errors import EngineError
from palaestra.learners.models.decoder import Decoder
from palaestra.rollout.engines.jax_engine import JaxEngine
from palaestra.rollout.engines.protocol import EngineStatus, Generation, SamplingParams
from palaestra.rollout.weights import WeightProbe, push


class Deaf:
    """An engine that takes an update politely and goes on as before; ``claims`` says what it admits."""

    def __init__(self, inner: JaxEngine, *, claims: str) -> None:
        self.inner, self.claims, self.version = inner, claims, 0

    async def generate(self, prompt_ids: Any, sampling: SamplingParams) -> Generation:
        generation = await self.inner.generate(prompt_ids, sampling)
        versions = (self.version if self.claims == "all" else 0,) * len(generation.ids)
        return Generation(generation.ids, generation.logprobs, versions, generation.finish_reason)

    async def update_weights(self, params: Any, version: int) -> None:
        self.version = version if self.claims != "nothing" else 0

    async def status(self) -> EngineStatus:
        return EngineStatus(version=self.version, running=0, waiting=0, tokens_sampled=0, busy_s=0.0)

    async def close(self) -> None:
        await self.inner.close()


@pytest.fixture
def probe(model: Decoder) -> WeightProbe:
    return WeightProbe(model, prompt_ids=(257, 1, 2, 258))


async def test_after_a_push_the_engine_samples_with_the_learners_weights(
    engine: JaxEngine, probe: WeightProbe, other_params: Any
) -> None:
    difference = await push(other_params, 4, engine, probe)
    assert (await engine.status()).version == 4
    assert difference < 1e-4


@pytest.mark.parametrize(
    ("claims", "message"),
    [
        ("nothing", "pushed, and the engine reports version 0"),
        ("version", r"pushed, and the engine still sampled with \[0\]"),
        ("all", "log-probs differ from the learner's by .*the update did not reach"),
    ],
)
async def test_a_push_that_silently_did_nothing_is_an_error(
    engine: JaxEngine, probe: WeightProbe, other_params: Any, claims: str, message: str
) -> None:
    with pytest.raises(EngineError, match=message):
        await push(other_params, 1, Deaf(engine, claims=claims), probe)
