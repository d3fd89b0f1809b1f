"""Losses and estimators per token: pure functions on arrays, no model, no mesh.

Three log-probs are never conflated: ``behaviour`` (the engine's, when it sampled), ``old`` (the learner's before this
batch's updates) and ``logprobs`` (the current ones, differentiated). All are float arrays of one shape, [..., T].
Losses are to be minimised and are *not* reduced: :mod:`palaestra.learners.aggregation` keeps sum and count apart.
Parameters named ``*_delta`` are distances from a ratio of 1, those named ``*_absolute`` are ratios themselves (peers
use one word for both).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

MAX_LOG_DIFFERENCE = 20.0
"""Log differences are clamped to +-20 before they are exponentiated: e^20 is finite in float32, e^89 is not."""

KlKind = Literal["k1", "k2", "k3"]


class TokenLoss(NamedTuple):
    """Both [..., T]."""

    loss: Array
    clipped: Array
    """1.0 where the clip decided the loss, so that the token gives no gradient; else 0.0."""


def log_difference(logprobs: Array, reference: Array) -> Array:
    """logprobs - reference, clamped to +-``MAX_LOG_DIFFERENCE``."""
    return jnp.clip(logprobs - reference, -MAX_LOG_DIFFERENCE, MAX_LOG_DIFFERENCE)


def clipped_loss(
    logprobs: Array,
    old: Array,
    advantages: Array,
    *,
    clip_low_delta: float = 0.2,
    clip_high_delta: float = 0.28,
    dual_clip_absolute: float | None = None,
) -> TokenLoss:
    """PPO's clipped surrogate (Schulman et al., 2017), clip-higher by default (DAPO, Yu et al., 2025).

    -min(r A, clip(r, 1 - low, 1 + high) A) with r = exp(logprobs - old). ``dual_clip_absolute`` = c > 1 bounds the loss
    of tokens with A < 0 by -c A (Ye et al., 2020).
    """
    return _clip(
        jnp.exp(log_difference(logprobs, old)), advantages, clip_low_delta, clip_high_delta, dual_clip_absolute
    )


def gspo_loss(
    logprobs: Array,
    old: Array,
    advantages: Array,
    mask: Array,
    segment_ids: Array,
    *,
    clip_low_delta: float = 3e-4,
    clip_high_delta: float = 4e-4,
) -> TokenLoss:
    """GSPO (Zheng et al., 2025): one ratio a sequence, the geometric mean of its tokens' ratios.

    ``segment_ids`` [B, T] int32 in 0..T tell the sequences of a packed row apart. This is the token form, whose
    gradient goes through each token's own log-prob; pair it with the aggregation ``seq-mean-token-mean``.
    """
    difference = jnp.where(mask > 0, logprobs - old, 0.0)
    mean = jnp.clip(_segment_mean(difference, mask, segment_ids), -MAX_LOG_DIFFERENCE, MAX_LOG_DIFFERENCE)
    ratio = jnp.exp(jax.lax.stop_gradient(mean) + logprobs - jax.lax.stop_gradient(logprobs))
    return _clip(ratio, advantages, clip_low_delta, clip_high_delta, None)


def cispo_loss(
    logprobs: Array,
    old: Array,
    advantages: Array,
    *,
    ratio_low_absolute: float = 0.0,
    ratio_high_absolute: float = 5.0,
) -> TokenLoss:
    """CISPO (MiniMax-M1, 2025): -stop_gradient(clip(r)) A logprobs; a clipped token still learns.

    The canonical form has no lower bound. ``ratio_high_absolute=5`` is TRL's ``epsilon_high=5``, verl's 4.
    """
    ratio = jnp.exp(log_difference(logprobs, old))
    bounded = jax.lax.stop_gradient(jnp.clip(ratio, ratio_low_absolute, ratio_high_absolute))
    return TokenLoss(-bounded * advantages * logprobs, (ratio != bounded).astype(logprobs.dtype))


def supervised_loss(logprobs: Array) -> TokenLoss:
    """Cross-entropy of the target tokens."""
    return TokenLoss(-logprobs, jnp.zeros_like(logprobs))


def truncated_importance_weight(old: Array, behaviour: Array, *, cap_absolute: float = 2.0) -> Array:
    """min(exp(old - behaviour), cap), without gradient: corrects an engine that computes slightly other log-probs."""
    return jax.lax.stop_gradient(jnp.minimum(jnp.exp(log_difference(old, behaviour)), cap_absolute))


def kl_estimate(kind: KlKind, logprobs: Array, reference: Array) -> Array:
    """Per-token estimate of KL(p || q) from tokens sampled from p (Schulman, "Approximating KL divergence", 2020).

    With d = log p - log q: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d, computed as expm1(-d) + d, which keeps its value
    where d is tiny. k1 and k3 are unbiased as values, not as gradients.
    """
    d = log_difference(logprobs, reference)
    if kind == "k1":
        return d
    if kind == "k2":
        return 0.5 * d * d
    if kind == "k3":
        return jnp.expm1(-d) + d
    raise ValueError(f"unknown KL estimator {kind!r}; choose k1, k2 or k3")


def _clip(ratio: Array, advantages: Array, low: float, high: float, dual_clip_absolute: float | None) -> TokenLoss:
    free = -ratio * advantages
    bounded = -jnp.clip(ratio, 1.0 - low, 1.0 + high) * advantages
    loss = jnp.maximum(free, bounded)
    clipped = bounded > free
    if dual_clip_absolute is not None:
        ceiling = -dual_clip_absolute * advantages
        limited = (advantages < 0) & (loss > ceiling)
        loss, clipped = jnp.where(limited, ceiling, loss), clipped | limited
    return TokenLoss(loss, clipped.astype(loss.dtype))


def _segment_mean(values: Array, weights: Array, segment_ids: Array) -> Array:
    """[B, T]: for each token, the weighted mean over its own sequence; 0 where the sequence has no weight."""
    number = values.shape[-1] + 1

    def one_row(values_t: Array, weights_t: Array, ids_t: Array) -> Array:
        total = jax.ops.segment_sum(values_t * weights_t, ids_t, number)
        count = jax.ops.segment_sum(weights_t, ids_t, number)
        return (total / jnp.maximum(count, 1.0))[ids_t]

    return jax.vmap(one_row)(values, weights, segment_ids)
