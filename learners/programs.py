"""What the learner compiles. Every function is pure and compiled once for a model, a configuration and a shape: two
learners that share those share the programs.

``spec`` and ``config`` are static; ``params``, ``gradient``, ``sums`` and ``optimizer`` are pytrees of arrays. Gradient
and sums are donated where they are added to, parameters and optimizer state where they are replaced.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array

from palaestra.learners.batching import PackedChunk
from palaestra.learners.config import LearnerConfig, OptimizerConfig
from palaestra.learners.logprobs import token_logprobs_and_entropy
from palaestra.learners.models.config import DecoderConfig
from palaestra.learners.models.decoder import Decoder
from palaestra.learners.models.parameters import Params, global_norm
from palaestra.learners.objectives import ChunkSums, policy_objective, supervised_objective, zero_sums
from palaestra.learners.optimizer import make_optimizer


def assemble(spec: DecoderConfig, params: Params) -> Decoder:
    """A decoder around parameters, which it does not copy."""
    return nnx.merge(_graph(spec), params)


@jax.jit
def fresh_accumulators(params: Params) -> tuple[Params, ChunkSums]:
    """A gradient and sums of zeros."""
    return jax.tree.map(jnp.zeros_like, params), zero_sums()


@partial(jax.jit, static_argnames=("spec", "config"), donate_argnames=("gradient", "sums"))
def add_policy_gradient(
    spec: DecoderConfig,
    config: LearnerConfig,
    params: Params,
    gradient: Params,
    sums: ChunkSums,
    chunk: PackedChunk,
    denominator: Array,
    old: Array,
    reference: Array,
) -> tuple[Params, ChunkSums]:
    """Add one chunk's policy gradient and sums."""

    def objective(params: Params) -> tuple[Array, ChunkSums]:
        return policy_objective(assemble(spec, params), chunk, old, reference, denominator, config)

    return _add(gradient, sums, *jax.grad(objective, has_aux=True)(params))


@partial(jax.jit, static_argnames=("spec", "config"), donate_argnames=("gradient", "sums"))
def add_supervised_gradient(
    spec: DecoderConfig,
    config: LearnerConfig,
    params: Params,
    gradient: Params,
    sums: ChunkSums,
    chunk: PackedChunk,
    denominator: Array,
) -> tuple[Params, ChunkSums]:
    """Add one chunk's cross-entropy gradient and sums."""

    def objective(params: Params) -> tuple[Array, ChunkSums]:
        return supervised_objective(assemble(spec, params), chunk, denominator, config)

    return _add(gradient, sums, *jax.grad(objective, has_aux=True)(params))


@partial(jax.jit, static_argnames=("spec", "temperature", "logit_chunk_tokens"))
def chunk_logprobs(
    spec: DecoderConfig, params: Params, chunk: PackedChunk, *, temperature: float, logit_chunk_tokens: int
) -> Array:
    """[rows_per_chunk, row_tokens] log-probs of every token."""
    logprobs, _ = token_logprobs_and_entropy(
        assemble(spec, params),
        jnp.asarray(chunk.ids),
        jnp.asarray(chunk.positions),
        jnp.asarray(chunk.segment_ids),
        temperature=temperature,
        logit_chunk_tokens=logit_chunk_tokens,
    )
    return logprobs


@partial(jax.jit, static_argnames=("config",))
def fresh_optimizer(config: OptimizerConfig, params: Params) -> Any:
    """The optimizer's state at step 0."""
    return make_optimizer(config).init(params)


@partial(jax.jit, static_argnames=("config",), donate_argnames=("params", "optimizer"))
def apply_gradient(config: OptimizerConfig, params: Params, optimizer: Any, gradient: Params) -> tuple[Params, Any]:
    """One optimizer step."""
    updates, optimizer = make_optimizer(config).update(gradient, optimizer, params)
    return optax.apply_updates(params, updates), optimizer


gradient_norm = jax.jit(global_norm)


@cache
def _graph(spec: DecoderConfig) -> nnx.GraphDef[Decoder]:
    """The model without its arrays."""
    graph, _ = nnx.split(nnx.eval_shape(lambda: Decoder(spec, rngs=nnx.Rngs(0))), nnx.Param)
    return graph


def _add(gradient: Params, sums: ChunkSums, more_gradient: Params, more_sums: ChunkSums) -> tuple[Params, ChunkSums]:
    return jax.tree.map(jnp.add, gradient, more_gradient), ChunkSums(*map(jnp.add, sums, more_sums))
