"""How fast the embedded engine samples, beside two limits that the same model sets on the same machine.

    python benchmarks/engine_decode.py

Three numbers, in tokens a second:

* ``engine``: sampled tokens of three-turn episodes played all at once against the engine, prefill, queueing and event
  loop included; environments answer at once.
* ``decode loop``: the same model's decode step on a full batch with nothing around it: no prompts, no joining and
  leaving. What the engine cannot pass.
* ``learner forward``: log-probs of whole packed rows, every token at once. What no sampler reaches, since it must go
  token by token.

The model is the demo's (0.2 M parameters) unless sizes are given. Each number is given per second of wall time and
per second of processor time (all threads of this process): the second one stands on a busy machine too.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time

import jax
import numpy as np
from flax import nnx

from palaestra.learners.batching import PackingShape
from palaestra.learners.config import LearnerConfig, OptimizerConfig
from palaestra.learners.learner import Learner
from palaestra.learners.models.config import DecoderConfig
from palaestra.learners.models.decoder import Decoder
from palaestra.learners.rows import TokenRow
from palaestra.rollout.engines.continuous_batching import ContinuousBatcher, EngineShapes, Request
from palaestra.rollout.engines.jax_engine import JaxEngine
from palaestra.rollout.engines.protocol import SamplingParams

Rates = list[tuple[float, float]]
"""Tokens per second of wall time and of processor time, one pair a round."""

PROMPT, ACTION, OBSERVATION, TURNS, GROUP = 13, 18, 20, 3, 8
CONTEXT = PROMPT + TURNS * ACTION + (TURNS - 1) * OBSERVATION


class Clock:
    """Wall and processor time since it was made."""

    def __init__(self) -> None:
        self._wall_s, self._cpu_s = time.perf_counter(), time.process_time()

    def rates(self, tokens: int) -> tuple[float, float]:
        return tokens / (time.perf_counter() - self._wall_s), tokens / (time.process_time() - self._cpu_s)


def demo_model(hidden: int, layers: int) -> Decoder:
    config = DecoderConfig(
        vocab_size=384,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        intermediate_size=3 * hidden,
        zero_output_projections=False,
        suppressed_ids=(0,),
    )
    return Decoder(config, nnx.Rngs(0))


async def engine_tokens_per_s(model: Decoder, shapes: EngineShapes, episodes: int, rounds: int) -> Rates:
    engine = JaxEngine(model, shapes=shapes)
    started = time.perf_counter()
    await engine.warm_up()
    print(f"  compiled in {time.perf_counter() - started:.1f} s")
    rng = np.random.default_rng(0)

    async def episode(prompt: list[int], seed: int) -> None:
        ids = list(prompt)
        for turn in range(TURNS):
            sampling = SamplingParams(max_new_tokens=int(rng.integers(10, ACTION + 1)), seed=seed * TURNS + turn)
            ids += (await engine.generate(ids, sampling)).ids
            ids += rng.integers(1, 384, OBSERVATION).tolist()

    rates = []
    for number in range(rounds):
        prompts = [rng.integers(1, 384, PROMPT).tolist() for _ in range(-(-episodes // GROUP))]
        before, clock = (await engine.status()).tokens_sampled, Clock()
        await asyncio.gather(*(episode(prompts[i // GROUP], number * episodes + i) for i in range(episodes)))
        rates.append(clock.rates((await engine.status()).tokens_sampled - before))
    await engine.close()
    return rates


def decode_loop_tokens_per_s(model: Decoder, shapes: EngineShapes, rounds: int) -> Rates:
    """One chunk after another on a full batch in the middle of its context."""
    batcher = ContinuousBatcher(model, nnx.state(model, nnx.Param), shapes, version=0)
    rates = []
    for number in range(rounds + 1):
        rng, budget = np.random.default_rng(number), 4 * shapes.decode_chunk
        for i in range(shapes.max_slots):
            prompt = tuple(rng.integers(1, 384, shapes.max_tokens // 3).tolist())
            batcher.add(Request(prompt, SamplingParams(budget, seed=i), budget))
        batcher.step()  # admits and prefills as well, so it is not timed
        before, clock = batcher.tokens_sampled, Clock()
        while batcher.has_work:
            batcher.step()
        rates.append(clock.rates(batcher.tokens_sampled - before))
    return rates[1:]


def learner_forward_tokens_per_s(model: Decoder, rounds: int) -> Rates:
    shape = PackingShape(row_tokens=CONTEXT, rows_per_chunk=16)
    learner = Learner(model, LearnerConfig(OptimizerConfig(1e-3), shape))
    rng, tokens = np.random.default_rng(0), CONTEXT
    row = TokenRow(
        ids=rng.integers(1, 384, tokens).astype(np.int32),
        mask=np.r_[np.float32(0), np.ones(tokens - 1, np.float32)],
        behaviour_logprobs=np.zeros(tokens, np.float32),
        versions=np.zeros(tokens, np.int32),
    )
    rates = []
    for _ in range(rounds + 1):
        clock = Clock()
        learner.logprobs([row] * 96)
        rates.append(clock.rates(96 * tokens))
    return rates[1:]


def show(name: str, rates: Rates) -> None:
    wall, cpu = (np.array(column) for column in zip(*rates, strict=True))
    print(
        f"{name:16} median {np.median(wall):9,.0f}  best {wall.max():9,.0f} tokens/s"
        f"   median {np.median(cpu):9,.0f} tokens per processor second"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--episodes", type=int, default=192, help="concurrent episodes, and cache slots")
    parser.add_argument("--chunk", type=int, default=8, help="decode steps between two chances to join")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    model = demo_model(arguments.hidden, arguments.layers)
    shapes = EngineShapes(max_slots=arguments.episodes, max_tokens=CONTEXT, decode_chunk=arguments.chunk)
    print(
        f"{model.config.parameter_count:,} parameters, {arguments.episodes} episodes, {CONTEXT} tokens of context, "
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {jax.devices()[0].platform}, jax {jax.__version__}"
    )
    show("engine", asyncio.run(engine_tokens_per_s(model, shapes, arguments.episodes, arguments.rounds)))
    show("decode loop", decode_loop_tokens_per_s(model, shapes, arguments.rounds))
    show("learner forward", learner_forward_tokens_per_s(model, arguments.rounds))


if __name__ == "__main__":
    main()
