"""How fast the learner trains, beside what the machine's matrix multiplication would allow in the same minutes.

    python benchmarks/learner_update.py

* ``update``: whole policy-gradient updates on ragged rows: packing, gradients, optimizer step, a copy of the weights
  for the engine. In slots a second (places of packed arrays, padding included) and trajectory tokens a second.
* ``gradient``: one chunk's gradient alone, forward and backward.
* ``matmul``: a 1024 x 1024 float32 product, in GFLOP/s. The ratio of the two says how much of the machine is used; a
  small model is bound by memory and by short loops, not by multiplication.

Rounds of the three take turns, so that a busy machine slows all of them alike; medians and bests are printed, with the
machine's load. The model is the demo's (0.2 M parameters) unless sizes are given.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from palaestra.learners import programs
from palaestra.learners.batching import PackingShape, pack
from palaestra.learners.config import LearnerConfig, OptimizerConfig
from palaestra.learners.learner import Learner
from palaestra.learners.models.config import DecoderConfig
from palaestra.learners.models.decoder import Decoder
from palaestra.learners.rows import TokenRow


def ragged_rows(number: int, longest: int, vocabulary: int, seed: int) -> list[TokenRow]:
    """Trajectories of a quarter to the whole of the longest length, half of their tokens sampled."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(number):
        length = int(rng.integers(max(longest // 4, 2), longest + 1))
        mask = (rng.random(length) < 0.5).astype(np.float32)
        mask[0], mask[1] = 0, 1
        logprobs = np.where(mask > 0, -np.log(vocabulary), 0).astype(np.float32)
        ids = rng.integers(1, vocabulary, length).astype(np.int32)
        rows.append(TokenRow(ids, mask, logprobs, np.zeros(length, np.int32), advantage=float(rng.normal())))
    return rows


def flops_per_slot(config: DecoderConfig, row_tokens: int) -> float:
    """Of forward and backward: 6 a matrix weight, and the two attention products over the whole packed row."""
    norms = config.hidden_size * (2 * config.num_layers + 1) + 2 * config.head_dim * config.num_layers * config.qk_norm
    matrices = config.parameter_count - norms
    if not config.tie_word_embeddings:
        matrices -= config.vocab_size * config.hidden_size
    return 6 * matrices + 12 * config.num_layers * config.num_heads * config.head_dim * row_tokens


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    jax.block_until_ready(work())
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--vocabulary", type=int, default=384)
    parser.add_argument("--row-tokens", type=int, default=107)
    parser.add_argument("--rows-per-chunk", type=int, default=8)
    parser.add_argument("--episodes", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    config = DecoderConfig(
        vocab_size=arguments.vocabulary,
        hidden_size=arguments.hidden,
        num_layers=arguments.layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        intermediate_size=3 * arguments.hidden,
        suppressed_ids=(0,),
    )
    shape = PackingShape(arguments.row_tokens, arguments.rows_per_chunk)
    learner_config = LearnerConfig(OptimizerConfig(1e-4), shape, entropy_coefficient=0.005)
    learner = Learner(Decoder(config, rngs=nnx.Rngs(0)), learner_config)
    batches = [ragged_rows(arguments.episodes, shape.row_tokens, config.vocab_size, seed) for seed in range(4)]
    packed = [pack(batch, shape) for batch in batches]
    chunk_slots = shape.row_tokens * shape.rows_per_chunk
    square = jnp.ones((1024, 1024))
    multiply = jax.jit(lambda a: a @ a)
    params = learner.params()
    chunk = jax.tree.map(jnp.asarray, packed[0].chunks[0])

    def update(number: int) -> object:
        learner.update(batches[number % 4])
        return learner.params()

    def gradient() -> object:
        accumulators = programs.fresh_accumulators(params)
        old = reference = chunk.behaviour_logprobs
        return programs.add_policy_gradient(
            config, learner_config, params, *accumulators, chunk, np.float32(1), old, reference
        )

    started = time.perf_counter()
    for work in (lambda: update(0), gradient, lambda: multiply(square)):
        timed(work)
    print(f"{config.parameter_count:,} parameters, rows of {shape.row_tokens}, {shape.rows_per_chunk} rows a chunk")
    print(f"compiled in {time.perf_counter() - started:.1f} s; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    seconds = np.array(
        [(timed(partial(update, n)), timed(gradient), timed(lambda: multiply(square))) for n in range(arguments.rounds)]
    )
    slots = np.array([len(packed[n % 4].chunks) * chunk_slots for n in range(arguments.rounds)])
    tokens = np.array([sum(len(row.ids) for row in batches[n % 4]) for n in range(arguments.rounds)])
    peak = 2 * 1024**3 / seconds[:, 2] / 1e9
    per_slot = flops_per_slot(config, shape.row_tokens) / 1e9
    rates = {"update": slots / seconds[:, 0], "gradient": chunk_slots / seconds[:, 1]}
    print(f"{'':10}{'slots/s median':>16}{'best':>10}{'GFLOP/s':>10}{'of matmul':>11}")
    for name, rate in rates.items():
        achieved = rate * per_slot
        print(
            f"{name:10}{np.median(rate):16,.0f}{rate.max():10,.0f}{np.median(achieved):10.1f}"
            f"{np.median(achieved / peak):11.3f}"
        )
    print(f"{'matmul':10}{'':26}{np.median(peak):10.1f}{1:11.3f}")
    print(f"update: {np.median(tokens / seconds[:, 0]):,.0f} trajectory tokens/s median, fill {packed[0].fill:.2f}")
    print(f"load {os.getloadavg()[0]:.1f} at the end")


if __name__ == "__main__":
    main()
