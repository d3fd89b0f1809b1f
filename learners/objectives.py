"""What one chunk adds to the loss, and the sums that become metrics. Pure functions of a model and arrays."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from palaestra.learners.aggregation import weighted_sum
from palaestra.learners.batching import PackedChunk
from palaestra.learners.config import CispoLossConfig, ClippedLossConfig, LearnerConfig, PolicyLossConfig
from palaestra.learners.logprobs import token_logprobs_and_entropy
from palaestra.learners.losses import (
    TokenLoss,
    cispo_loss,
    clipped_loss,
    gspo_loss,
    kl_estimate,
    supervised_loss,
    truncated_importance_weight,
)
from palaestra.learners.models.decoder import Decoder


class ChunkSums(NamedTuple):
    """Scalars that add up over chunks. ``loss`` is already divided by the batch's denominator; the others are sums
    over trained tokens, to be divided by their number."""

    loss: Array
    entropy: Array
    k3: Array
    """KL(behaviour || current), by the k3 estimator."""
    clipped: Array
    reference_kl: Array


def zero_sums() -> ChunkSums:
    return ChunkSums(*(jnp.zeros(()) for _ in ChunkSums._fields))


def policy_objective(
    model: Decoder, chunk: PackedChunk, old: Array, reference: Array, denominator: Array, config: LearnerConfig
) -> tuple[Array, ChunkSums]:
    """The chunk's part of the policy-gradient loss. ``old`` and ``reference`` are log-probs, [B, T]; ``reference`` is
    read only where ``config.kl`` is set."""
    logprobs, entropy = _logprobs_and_entropy(model, chunk, config)
    token_loss = _policy_loss(config.loss, logprobs, old, chunk)
    loss = token_loss.loss
    if config.mismatch_cap_absolute is not None:
        cap = config.mismatch_cap_absolute
        loss = loss * truncated_importance_weight(old, jnp.asarray(chunk.behaviour_logprobs), cap_absolute=cap)
    if config.entropy_coefficient:
        loss = loss - config.entropy_coefficient * entropy
    reference_kl = jnp.zeros_like(logprobs)
    if config.kl is not None:
        reference_kl = kl_estimate(config.kl.kind, logprobs, reference)
        loss = loss + config.kl.coefficient * reference_kl
    total = weighted_sum(loss, jnp.asarray(chunk.weights)) / denominator
    return total, _sums(total, logprobs, entropy, token_loss.clipped, reference_kl, chunk)


def supervised_objective(
    model: Decoder, chunk: PackedChunk, denominator: Array, config: LearnerConfig
) -> tuple[Array, ChunkSums]:
    """The chunk's part of the cross-entropy of the masked tokens."""
    logprobs, entropy = _logprobs_and_entropy(model, chunk, config)
    token_loss = supervised_loss(logprobs)
    total = weighted_sum(token_loss.loss, jnp.asarray(chunk.weights)) / denominator
    return total, _sums(total, logprobs, entropy, token_loss.clipped, jnp.zeros_like(logprobs), chunk)


def _policy_loss(config: PolicyLossConfig, logprobs: Array, old: Array, chunk: PackedChunk) -> TokenLoss:
    advantages = jnp.asarray(chunk.advantages)
    if isinstance(config, ClippedLossConfig):
        return clipped_loss(
            logprobs,
            old,
            advantages,
            clip_low_delta=config.clip_low_delta,
            clip_high_delta=config.clip_high_delta,
            dual_clip_absolute=config.dual_clip_absolute,
        )
    if isinstance(config, CispoLossConfig):
        return cispo_loss(
            logprobs,
            old,
            advantages,
            ratio_low_absolute=config.ratio_low_absolute,
            ratio_high_absolute=config.ratio_high_absolute,
        )
    return gspo_loss(
        logprobs,
        old,
        advantages,
        jnp.asarray(chunk.mask),
        jnp.asarray(chunk.segment_ids),
        clip_low_delta=config.clip_low_delta,
        clip_high_delta=config.clip_high_delta,
    )


def _logprobs_and_entropy(model: Decoder, chunk: PackedChunk, config: LearnerConfig) -> tuple[Array, Array]:
    return token_logprobs_and_entropy(
        model,
        jnp.asarray(chunk.ids),
        jnp.asarray(chunk.positions),
        jnp.asarray(chunk.segment_ids),
        temperature=config.temperature,
        logit_chunk_tokens=config.logit_chunk_tokens,
    )


def _sums(
    total: Array, logprobs: Array, entropy: Array, clipped: Array, reference_kl: Array, chunk: PackedChunk
) -> ChunkSums:
    trained = (jnp.asarray(chunk.weights) > 0).astype(jnp.float32)
    mismatch = kl_estimate("k3", jnp.asarray(chunk.behaviour_logprobs), logprobs)
    per_token = (weighted_sum(values, trained) for values in (entropy, mismatch, clipped, reference_kl))
    return ChunkSums(*(jax.lax.stop_gradient(value) for value in (total, *per_token)))
