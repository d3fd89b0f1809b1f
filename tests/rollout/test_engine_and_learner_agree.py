from __future__ import annotations

from typing import Any

import numpy as np
from flax import nnx

from palaestra.learners.batching import PackingShape
from palaestra.learners.config import LearnerConfig, OptimizerConfig
from palaestra.learners.learner import Learner
from palaestra.learners.models.decoder import Decoder
from palaestra.rollout.chat import ChatFormat
from palaestra.rollout.engines.continuous_batching import EngineShapes
from palaestra.rollout.engines.jax_engine import JaxEngine
from palaestra.rollout.episode import EpisodeOptions
from palaestra.rollout.scheduler import Scheduler, SchedulerLimits
from palaestra.rollout.weights import WeightProbe, push

SHAPES = EngineShapes(max_slots=4, max_tokens=96, row_buckets=(4,), prefill_width=8, decode_chunk=4)


class Ref:
    def __init__(self, task_id: str) -> None:
        self.id, self.kind = task_id, "kind"


async def mean_k3(learner: Learner, scheduler: Scheduler, seed: int) -> tuple[float, set[int]]:
    """Mean of expm1(-d) + d, d = behaviour - learner's packed log-prob, over the sampled tokens of 12 episodes."""
    async with scheduler.run_groups([Ref(f"task {i}") for i in range(3)], group_size=4, seed=seed) as groups:
        rows = [result.trajectory.row() async for group in groups for result in group.results]
    differences, versions = [], set()
    for row, logprobs in zip(rows, learner.logprobs(rows), strict=True):
        sampled = row.mask > 0
        differences.append(row.behaviour_logprobs[sampled].astype(np.float64) - logprobs[sampled])
        versions |= set(row.versions[sampled].tolist())
    d = np.concatenate(differences)
    assert d.size > 200
    return float(np.mean(np.expm1(-d) + d)), versions


async def test_sampler_and_learner_agree_on_every_sampled_token_before_and_after_an_update(
    model: Decoder, script: Any, chat: ChatFormat
) -> None:
    """Multi-turn episodes, several prompts in flight, packed rows of several episodes each, in float32."""
    learner = Learner(model, LearnerConfig(OptimizerConfig(0.01), PackingShape(row_tokens=96, rows_per_chunk=4)))
    script.turns, script.observation = 4, "ValueError"
    engine = JaxEngine(model, shapes=SHAPES)
    options = EpisodeOptions(max_action_tokens=12, max_context_tokens=96, truncated_action="run")
    scheduler = Scheduler(engine, chat, script.make_env, options, SchedulerLimits(max_episodes=12))
    k3, versions = await mean_k3(learner, scheduler, seed=0)
    assert (k3 < 1e-9, versions) == (True, {0})

    async with scheduler.run_groups([Ref("task")], group_size=4) as groups:
        rows = [result.trajectory.row(advantage=1.0) async for group in groups for result in group.results]
    learner.update(rows)
    stale, _ = await mean_k3(learner, scheduler, seed=1)
    await push(learner.params(), learner.version, engine, WeightProbe(learner.model(), tuple(chat.opening("task"))))
    fresh, versions = await mean_k3(learner, scheduler, seed=1)
    await engine.close()
    assert stale > 1e-6
    assert (fresh < 1e-9, versions) == (True, {1})


async def test_the_learners_own_buffers_may_be_donated_after_a_push(model: Decoder, chat: ChatFormat) -> None:
    learner = Learner(model, LearnerConfig(OptimizerConfig(0.01), PackingShape(row_tokens=96, rows_per_chunk=1)))
    engine = JaxEngine(model, shapes=SHAPES)
    probe = WeightProbe(nnx.merge(*nnx.split(model)), tuple(chat.opening("task")))
    await push(learner.state().params, 1, engine, probe)
    await push(learner.state().params, 2, engine, probe)
    await engine.close()
