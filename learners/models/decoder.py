"""A decoder-only transformer in Flax NNX, Qwen3-shaped; Qwen2 and Llama are configurations of it.

Attention is handed in as a function, so that the model knows nothing of caches or packing: the learner passes
:func:`packed_attention`, an engine passes a closure that reads and writes its KV cache.

Axes: B batch, T time, E hidden, H query heads, K key-value heads, D head size, F feed-forward, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from palaestra.learners.models.config import DecoderConfig

AttendFn = Callable[[int, Array, Array, Array], Array]
"""``(layer, q [B,T,H,D], k [B,T,K,D], v [B,T,K,D]) -> [B,T,H,D]``; q and k are already normed and rotated, q is not
yet scaled by D^-1/2."""

SUPPRESSED_LOGIT = -1e9
"""Finite, so that p * log p of a suppressed id is exactly 0 and never NaN."""


class Attention(nnx.Module):
    """Grouped-query self-attention. Kernels are [in, out]."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs) -> None:
        self.config = config
        embed, head = config.hidden_size, config.head_dim
        q_width, kv_width = config.num_heads * head, config.num_kv_heads * head
        self.q_kernel = _matrix(config, rngs, embed, q_width)
        self.k_kernel = _matrix(config, rngs, embed, kv_width)
        self.v_kernel = _matrix(config, rngs, embed, kv_width)
        self.o_kernel = _matrix(config, rngs, q_width, embed, zero=config.zero_output_projections)
        if config.attention_bias:
            self.q_bias = nnx.Param(jnp.zeros(q_width))
            self.k_bias = nnx.Param(jnp.zeros(kv_width))
            self.v_bias = nnx.Param(jnp.zeros(kv_width))
        if config.qk_norm:
            self.q_norm = nnx.Param(jnp.ones(head))
            self.k_norm = nnx.Param(jnp.ones(head))

    def __call__(self, x_bte: Array, rotation: tuple[Array, Array], layer: int, attend: AttendFn) -> Array:
        config = self.config
        q, k, v = x_bte @ self.q_kernel[...], x_bte @ self.k_kernel[...], x_bte @ self.v_kernel[...]
        if config.attention_bias:
            q, k, v = q + self.q_bias[...], k + self.k_bias[...], v + self.v_bias[...]
        lead = x_bte.shape[:-1]
        q_bthd = q.reshape(*lead, config.num_heads, config.head_dim)
        k_btkd = k.reshape(*lead, config.num_kv_heads, config.head_dim)
        v_btkd = v.reshape(*lead, config.num_kv_heads, config.head_dim)
        if config.qk_norm:
            q_bthd = rms_norm(q_bthd, self.q_norm[...], config.rms_norm_eps)
            k_btkd = rms_norm(k_btkd, self.k_norm[...], config.rms_norm_eps)
        mixed = attend(layer, rotate(q_bthd, rotation), rotate(k_btkd, rotation), v_btkd)
        return mixed.reshape(*lead, config.num_heads * config.head_dim) @ self.o_kernel[...]


class FeedForward(nnx.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs) -> None:
        embed, inner = config.hidden_size, config.intermediate_size
        self.gate_kernel = _matrix(config, rngs, embed, inner)
        self.up_kernel = _matrix(config, rngs, embed, inner)
        self.down_kernel = _matrix(config, rngs, inner, embed, zero=config.zero_output_projections)

    def __call__(self, x_bte: Array) -> Array:
        return (jax.nn.silu(x_bte @ self.gate_kernel[...]) * (x_bte @ self.up_kernel[...])) @ self.down_kernel[...]


class Block(nnx.Module):
    """Pre-norm residual block."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs) -> None:
        self.eps = config.rms_norm_eps
        self.attention_norm = nnx.Param(jnp.ones(config.hidden_size))
        self.attention = Attention(config, rngs)
        self.feed_forward_norm = nnx.Param(jnp.ones(config.hidden_size))
        self.feed_forward = FeedForward(config, rngs)

    def __call__(self, x_bte: Array, rotation: tuple[Array, Array], layer: int, attend: AttendFn) -> Array:
        x_bte = x_bte + self.attention(rms_norm(x_bte, self.attention_norm[...], self.eps), rotation, layer, attend)
        return x_bte + self.feed_forward(rms_norm(x_bte, self.feed_forward_norm[...], self.eps))


class Decoder(nnx.Module):
    """The model. Parameters and activations are float32.

    Jit it through ``graphdef, params = nnx.split(model, nnx.Param)`` outside and ``nnx.merge(graphdef, params)``
    inside.
    """

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs) -> None:
        self.config = config
        shape = (config.vocab_size, config.hidden_size)
        self.embedding = nnx.Param(jax.random.normal(rngs.params(), shape) * config.embedding_init_std)
        self.layers = nnx.List([Block(config, rngs) for _ in range(config.num_layers)])
        self.final_norm = nnx.Param(jnp.ones(config.hidden_size))
        if not config.tie_word_embeddings:
            self.head_kernel = _matrix(config, rngs, config.hidden_size, config.vocab_size)

    def hidden(self, ids_bt: Array, positions_bt: Array, attend: AttendFn) -> Array:
        """Hidden states after the final norm, [B, T, E] float32, of int32 ids and their positions in their sequence.

        Ids outside the vocabulary are the caller's to refuse: under jit they cannot be seen.
        """
        rotation = rotary_table(positions_bt, self.config.head_dim, self.config.rope_theta)
        x_bte = self.embedding[...][ids_bt]
        for layer, block in enumerate(self.layers):
            x_bte = block(x_bte, rotation, layer, attend)
        return rms_norm(x_bte, self.final_norm[...], self.config.rms_norm_eps)

    def logits(self, hidden: Array) -> Array:
        """[..., E] -> [..., V] float32, the suppressed ids at ``SUPPRESSED_LOGIT``."""
        kernel_ev = self.embedding[...].T if self.config.tie_word_embeddings else self.head_kernel[...]
        logits = (hidden @ kernel_ev).astype(jnp.float32)
        if not self.config.suppressed_ids:
            return logits
        suppressed_v = np.zeros(self.config.vocab_size, bool)
        suppressed_v[list(self.config.suppressed_ids)] = True
        return jnp.where(suppressed_v, SUPPRESSED_LOGIT, logits)


def packed_attention(segment_ids_bt: Array) -> AttendFn:
    """Causal attention that never leaves its segment: several sequences share a row without seeing one another.

    ``segment_ids_bt`` is int32; equal ids in one row are one sequence, whose tokens lie side by side in order.
    """
    time = segment_ids_bt.shape[1]
    visible_bts = (segment_ids_bt[:, :, None] == segment_ids_bt[:, None, :]) & jnp.tril(jnp.ones((time, time), bool))

    def attend(layer: int, q_bthd: Array, k_btkd: Array, v_btkd: Array) -> Array:
        del layer
        return masked_attention(q_bthd, k_btkd, v_btkd, visible_bts)

    return attend


def masked_attention(q_bthd: Array, k_bskd: Array, v_bskd: Array, visible_bts: Array) -> Array:
    """Softmax attention of T queries over S keys under a boolean mask; every query must see at least one key.

    The weights are divided by their sum after they have met the values, which saves a pass over [T, S] forward and
    several backward (a fifth of a whole training step of a small model on a CPU).
    """
    batch, time, heads, head_dim = q_bthd.shape
    keys, kv_heads = k_bskd.shape[1:3]
    group = heads // kv_heads
    q_bkgtd = (q_bthd * head_dim**-0.5).reshape(batch, time, kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4)
    q_bknd = q_bkgtd.reshape(batch, kv_heads, group * time, head_dim)
    scores_bknt = jnp.matmul(q_bknd, k_bskd.transpose(0, 2, 3, 1)).reshape(batch, kv_heads, group, time, keys)
    scores = jnp.where(visible_bts[:, None, None], scores_bknt, -1e9)
    weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True)))
    mixed = jnp.matmul(weights.reshape(batch, kv_heads, group * time, keys), v_bskd.transpose(0, 2, 1, 3))
    mixed = mixed.reshape(batch, kv_heads, group, time, head_dim) / weights.sum(axis=-1)[..., None]
    return mixed.transpose(0, 3, 1, 2, 4).reshape(q_bthd.shape)


def rms_norm(x: Array, scale: Array, eps: float) -> Array:
    """RMSNorm over the last axis (Zhang and Sennrich, 2019), computed in float32."""
    x32 = x.astype(jnp.float32)
    return (x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps) * scale).astype(x.dtype)


def rotary_table(positions_bt: Array, head_dim: int, theta: float) -> tuple[Array, Array]:
    """Cosines and signed sines for :func:`rotate`, each [B, T, 1, D] float32 (RoFormer, Su et al., 2021)."""
    frequencies = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    angles = positions_bt[..., None, None].astype(jnp.float32) * jnp.asarray(frequencies, jnp.float32)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([cos, cos], axis=-1), jnp.concatenate([-sin, sin], axis=-1)


def rotate(x_bthd: Array, rotation: tuple[Array, Array]) -> Array:
    """Rotate the two halves of the last axis against each other: Hugging Face's layout, not the interleaved one."""
    cos, signed_sin = rotation
    return x_bthd * cos + jnp.roll(x_bthd, x_bthd.shape[-1] // 2, axis=-1) * signed_sin


def _matrix(config: DecoderConfig, rngs: nnx.Rngs, fan_in: int, fan_out: int, *, zero: bool = False) -> nnx.Param[Any]:
    if zero:
        return nnx.Param(jnp.zeros((fan_in, fan_out)))
    std = fan_in**-0.5 if config.weight_init_std is None else config.weight_init_std
    return nnx.Param(jax.random.normal(rngs.params(), (fan_in, fan_out)) * std)
