from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import jax
import jax.monitoring
import numpy as np
import pytest
from flax import nnx

from palaestra.envs.errors import EngineError, UsageError
from palaestra.learners.models.decoder import Decoder
from palaestra.rollout.engines.continuous_batching import EngineShapes
from palaestra.rollout.engines.jax_engine import JaxEngine
from palaestra.rollout.engines.protocol import Generation, SamplingParams
from palaestra.rollout.weights import score

PROMPT = (257, 5, 6, 7, 258)


def sampling(tokens: int = 8, seed: int = 0, temperature: float = 1.0, stop: tuple[int, ...] = ()) -> SamplingParams:
    return SamplingParams(max_new_tokens=tokens, seed=seed, temperature=temperature, stop_ids=stop)


def learner_logprobs(model: Decoder, prompt: Sequence[int], generation: Generation) -> np.ndarray:
    return score(model, nnx.state(model, nnx.Param), prompt, generation.ids)


def whole_vocabulary(model: Decoder, prompt: Sequence[int]) -> np.ndarray:
    """The learner's log-prob of every id after the prompt, [V]."""
    candidates = (Generation((i,), (0.0,), (0,), "length") for i in range(model.config.vocab_size))
    return np.concatenate([learner_logprobs(model, prompt, candidate) for candidate in candidates])


async def fresh(model: Decoder, shapes: EngineShapes, prompt: Sequence[int], params: SamplingParams) -> Generation:
    """What an engine that has seen nothing else says."""
    engine = JaxEngine(model, shapes=shapes)
    try:
        return await engine.generate(prompt, params)
    finally:
        await engine.close()


async def test_log_probs_are_the_learners_over_several_turns(engine: JaxEngine, model: Decoder) -> None:
    """k3 = expm1(-d) + d of d = learner - engine; every turn but the first continues what the cache holds."""
    ids, differences = list(PROMPT), []
    for turn in range(4):
        generation = await engine.generate(ids, sampling(6, seed=turn))
        differences.append(learner_logprobs(model, ids, generation) - np.asarray(generation.logprobs))
        ids += [*generation.ids, 259, 40 + turn, 41, 258]
    d = np.concatenate(differences).astype(np.float64)
    assert d.size == 24
    assert np.mean(np.expm1(-d) + d) < 1e-9


@pytest.mark.parametrize("temperature", [0.5, 2.0])
async def test_behaviour_log_probs_are_those_at_the_sampling_temperature(
    engine: JaxEngine, model: Decoder, temperature: float
) -> None:
    at_one = whole_vocabulary(model, PROMPT)
    expected = at_one / temperature - np.logaddexp.reduce(at_one / temperature)
    for seed in range(4):
        generation = await engine.generate(PROMPT, sampling(1, seed=seed, temperature=temperature))
        assert generation.logprobs[0] == pytest.approx(expected[generation.ids[0]], abs=1e-5)


async def test_temperature_zero_takes_the_likeliest_id_with_its_log_prob_at_one(
    engine: JaxEngine, model: Decoder
) -> None:
    greedy = await engine.generate(PROMPT, sampling(4, temperature=0.0))
    again = await engine.generate(PROMPT, sampling(4, temperature=0.0, seed=9))
    assert greedy == again
    np.testing.assert_allclose(greedy.logprobs, learner_logprobs(model, PROMPT, greedy), atol=1e-5)
    assert greedy.ids[0] == whole_vocabulary(model, PROMPT).argmax()


async def test_sampled_ids_follow_the_models_distribution(engine: JaxEngine, model: Decoder) -> None:
    drawn = await asyncio.gather(*(engine.generate(PROMPT, sampling(1, seed=s)) for s in range(1500)))
    counts = np.bincount([g.ids[0] for g in drawn], minlength=264)
    expected = np.exp(whole_vocabulary(model, PROMPT))
    top = np.argsort(expected)[-8:]
    error = (counts[top] - 1500 * expected[top]) / np.sqrt(1500 * expected[top])
    assert np.abs(error).max() < 5.0
    assert counts[[256, 261, 262, 263]].sum() == 0


async def test_a_request_gets_the_same_ids_whatever_else_is_in_the_batch(model: Decoder, shapes: EngineShapes) -> None:
    requests = [
        ((257, *range(3 + i, 3 + i + length), 258), sampling(10, seed=i)) for i, length in enumerate([1, 9, 20, 4])
    ]
    alone = [await fresh(model, shapes, prompt, params) for prompt, params in requests]
    engine = JaxEngine(model, shapes=shapes)
    noise = [engine.generate((257, 99, 100 + i, 258), sampling(30, seed=100 + i)) for i in range(7)]
    together = await asyncio.gather(*noise, *(engine.generate(prompt, params) for prompt, params in requests))
    await engine.close()
    assert [g.ids for g in together[7:]] == [g.ids for g in alone]
    for one, other in zip(together[7:], alone, strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)


async def test_different_seeds_give_different_ids(engine: JaxEngine) -> None:
    seeds = [0, 1, 1 << 32, (1 << 63) - 1, -1]
    drawn = await asyncio.gather(*(engine.generate(PROMPT, sampling(16, seed=seed)) for seed in seeds))
    assert len({g.ids for g in drawn}) == len(seeds)


async def test_equal_prompts_share_their_prefill_and_agree_with_lone_ones(model: Decoder, shapes: EngineShapes) -> None:
    prompt = (257, *range(10, 30), 258)
    engine = JaxEngine(model, shapes=shapes)
    group = await asyncio.gather(*(engine.generate(prompt, sampling(6, seed=s)) for s in range(5)))
    assert engine.tokens_prefilled == len(prompt) - 1
    await engine.close()
    assert [g.ids for g in group] == [(await fresh(model, shapes, prompt, sampling(6, seed=s))).ids for s in range(5)]


async def test_the_next_turn_of_an_episode_prefills_only_what_is_new(engine: JaxEngine) -> None:
    first = await engine.generate(PROMPT, sampling(6))
    before = engine.tokens_prefilled
    await engine.generate([*PROMPT, *first.ids, 259, 8, 9, 258], sampling(6))
    # The last sampled id was never fed and the last id of the prompt is fed by the first decode step.
    assert engine.tokens_prefilled - before == 1 + 3


async def test_more_episodes_than_slots_evict_each_other_and_stay_correct(model: Decoder, shapes: EngineShapes) -> None:
    async def episode(engine: JaxEngine, i: int) -> list[Generation]:
        ids, turns = [257, 20 + i, 258], []
        for turn in range(3):
            turns.append(await engine.generate(ids, sampling(5, seed=10 * i + turn)))
            ids += [*turns[-1].ids, 259, 60 + i, 258]
        return turns

    engine = JaxEngine(model, shapes=shapes)
    together = await asyncio.gather(*(episode(engine, i) for i in range(15)))
    await engine.close()
    for i in (0, 7, 14):
        alone = JaxEngine(model, shapes=shapes)
        assert [g.ids for g in await episode(alone, i)] == [g.ids for g in together[i]]
        await alone.close()


async def test_a_single_slot_serves_the_same_prompt_again(model: Decoder) -> None:
    engine = JaxEngine(model, shapes=EngineShapes(max_slots=1, max_tokens=24, prefill_width=8, decode_chunk=4))
    first = await engine.generate(PROMPT, sampling(5))
    assert await engine.generate(PROMPT, sampling(5)) == first
    await engine.close()


async def test_the_stop_id_ends_the_completion_and_is_part_of_it(engine: JaxEngine) -> None:
    free = await engine.generate(PROMPT, sampling(12))
    stop = free.ids[5]
    at = free.ids.index(stop)
    stopped = await engine.generate(PROMPT, sampling(12, stop=(stop, 3)))
    assert stopped.ids == free.ids[: at + 1]
    assert stopped.finish_reason == "stop"
    assert free.finish_reason == "length"
    assert len(stopped.logprobs) == len(stopped.versions) == at + 1


async def test_a_stop_id_drawn_as_the_last_allowed_token_is_a_stop(engine: JaxEngine) -> None:
    free = await engine.generate(PROMPT, sampling(6))
    at = free.ids.index(free.ids[5])
    assert (await engine.generate(PROMPT, sampling(at + 1, stop=(free.ids[5],)))).finish_reason == "stop"


async def test_a_completion_ends_where_the_context_ends(engine: JaxEngine) -> None:
    prompt = [257, *range(40), 258]
    generation = await engine.generate(prompt, sampling(100))
    assert len(generation.ids) == 48 - len(prompt)
    assert generation.finish_reason == "length"


async def test_new_weights_change_later_tokens_and_drop_what_was_cached(
    model: Decoder, shapes: EngineShapes, other_params: Any
) -> None:
    engine = JaxEngine(model, shapes=shapes)
    first = await engine.generate(PROMPT, sampling(6))
    follow_up = [*PROMPT, *first.ids, 259, 8, 258]
    await engine.update_weights(other_params, 3)
    warm = await engine.generate(follow_up, sampling(6))
    await engine.close()

    cold_engine = JaxEngine(model, other_params, shapes=shapes, version=3)
    cold = await cold_engine.generate(follow_up, sampling(6))
    await cold_engine.close()
    assert set(first.versions) == {0}
    assert set(warm.versions) == {3}
    assert warm.ids == cold.ids
    np.testing.assert_allclose(warm.logprobs, cold.logprobs, atol=1e-6)


async def test_the_engine_keeps_its_own_copy_of_the_weights(model: Decoder, engine: JaxEngine) -> None:
    params = jax.tree.map(lambda array: array + 0.0, nnx.state(model, nnx.Param))
    await engine.update_weights(params, 1)
    jax.tree.map(lambda array: array.delete(), params)
    assert len((await engine.generate(PROMPT, sampling(3))).ids) == 3


async def test_cancelling_requests_frees_their_slots(model: Decoder) -> None:
    shapes = EngineShapes(max_slots=3, max_tokens=4000, row_buckets=(3,), column_buckets=(4000,))
    engine = JaxEngine(model, shapes=shapes)
    running = [asyncio.create_task(engine.generate((257, i, 258), sampling(3990, seed=i))) for i in range(6)]
    while (await engine.status()).tokens_sampled == 0:  # noqa: ASYNC110 - the worker is a thread
        await asyncio.sleep(0.001)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    assert all(task.cancelled() for task in running)
    assert len((await engine.generate(PROMPT, sampling(4))).ids) == 4
    status = await engine.status()
    await engine.close()
    assert (status.running, status.waiting) == (0, 0)
    assert status.tokens_sampled < 6 * 3990


async def test_nothing_is_compiled_after_the_warm_up(model: Decoder, other_params: Any) -> None:
    compiled: list[str] = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        del duration_secs, kwargs
        if event.endswith("backend_compile_duration"):
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    shapes = EngineShapes(max_slots=5, max_tokens=40, row_buckets=(2, 5), column_buckets=(16, 40), prefill_width=8)
    engine = JaxEngine(model, shapes=shapes)
    await engine.warm_up()
    assert compiled
    compiled.clear()
    rng = np.random.default_rng(0)
    for size in (1, 2, 5, 9):
        prompts = [rng.integers(0, 256, rng.integers(1, 30)).tolist() for _ in range(size)]
        prompts += prompts[:2]
        await asyncio.gather(*(engine.generate(p, sampling(int(rng.integers(1, 10)), stop=(7,))) for p in prompts))
    await engine.update_weights(other_params, 1)
    await engine.generate(PROMPT, sampling(3, temperature=0.0))
    await engine.close()
    assert compiled == []


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ((), sampling(), "prompt is empty"),
        ((1, 264), sampling(), r"token id 264 is outside the vocabulary 0\.\.263"),
        ((-1,), sampling(), "token id -1"),
        ((1,) * 48, sampling(), "the prompt has 48 tokens and the engine holds 48"),
        ((1,), sampling(0), "max_new_tokens is 0"),
        ((1,), sampling(temperature=-1.0), "temperature is -1"),
        ((1,), sampling(temperature=float("nan")), "temperature is nan"),
        ((1,), sampling(stop=(2**40,)), "stop id 1099511627776 is outside the vocabulary"),
        ((1,), sampling(stop=(1, 2, 3, 4, 5)), "5 stop ids were given and the engine compares 4"),
    ],
)
async def test_a_request_that_cannot_be_is_refused_with_its_numbers(
    engine: JaxEngine, prompt: tuple[int, ...], params: SamplingParams, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        await engine.generate(prompt, params)


async def test_weights_that_do_not_fit_or_are_older_are_refused(engine: JaxEngine, model: Decoder) -> None:
    params = nnx.state(model, nnx.Param)
    wrong = jax.tree.map(lambda array: array[:1], params)
    with pytest.raises(UsageError, match=r"do not fit the engine's model; the first difference is .*float32\[1"):
        await engine.update_weights(wrong, 1)
    await engine.update_weights(params, 2)
    with pytest.raises(UsageError, match="version 1 are older than the engine's, 2"):
        await engine.update_weights(params, 1)


async def test_a_closed_engine_refuses_requests_and_fails_those_that_were_running(model: Decoder) -> None:
    engine = JaxEngine(model, shapes=EngineShapes(max_slots=2, max_tokens=48))
    running = [asyncio.create_task(engine.generate((257, i), sampling(40))) for i in range(4)]
    await asyncio.sleep(0)
    await engine.close()
    results = await asyncio.gather(*running, return_exceptions=True)
    assert [type(result) for result in results] == [EngineError] * 4
    with pytest.raises(EngineError, match="closed"):
        await engine.generate(PROMPT, sampling())
    await engine.close()


async def test_a_failure_in_the_worker_reaches_every_waiter_with_its_cause(
    model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = JaxEngine(model, shapes=EngineShapes(max_slots=2, max_tokens=48))

    def out_of_memory() -> list[object]:
        raise MemoryError("no more")

    monkeypatch.setattr(engine._batcher, "step", out_of_memory)
    results = await asyncio.gather(
        *(engine.generate(PROMPT, sampling(seed=s)) for s in range(3)), return_exceptions=True
    )
    assert [type(result) for result in results] == [EngineError] * 3
    assert "MemoryError('no more')" in str(results[0])
    with pytest.raises(EngineError, match="failed earlier"):
        await engine.status()
    await engine.close()


async def test_an_engine_longer_than_its_model_is_refused(model: Decoder) -> None:
    with pytest.raises(UsageError, match="max_tokens is 40000"):
        JaxEngine(model, shapes=EngineShapes(max_slots=1, max_tokens=40_000))
    with pytest.raises(UsageError, match=r"row_buckets is \(4, 2\)"):
        EngineShapes(max_slots=4, max_tokens=8, row_buckets=(4, 2))


async def test_status_counts_what_was_sampled(engine: JaxEngine) -> None:
    await asyncio.gather(*(engine.generate(PROMPT, sampling(7, seed=s)) for s in range(3)))
    status = await engine.status()
    assert (status.version, status.tokens_sampled, status.running, status.waiting) == (0, 21, 0, 0)
    assert status.busy_s > 0
