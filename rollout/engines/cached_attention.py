"""Attention over a cache that stays fixed plus the tokens that were computed since.

While a chunk of tokens is decoded the main cache is only read; the new keys and values go to a small window, one
column a step, and attention runs over both parts with one softmax. Writing a window once a chunk instead of a column
a step keeps XLA from copying the cache.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from palaestra.rollout.engines.kv_cache import KVWindow

_HIDDEN_SCORE = -1e9


def empty_window(like: KVWindow, columns: int) -> KVWindow:
    """A window of zeros with ``columns`` columns for the same rows and layers."""
    return KVWindow(
        keys=tuple(jnp.zeros((*k.shape[:3], columns), k.dtype) for k in like.keys),
        values=tuple(jnp.zeros((*v.shape[:2], columns, v.shape[3]), v.dtype) for v in like.values),
    )


class WindowedAttention:
    """An ``attend`` closure for T tokens a row; after the forward pass ``window`` holds their keys and values.

    ``past`` [B, K, D, C] is visible where ``column < lengths_b``; token t of a row is written to column ``at + t`` of
    the window and sees the window's columns up to its own.
    """

    def __init__(self, past: KVWindow, lengths_b: Array, window: KVWindow, at: Array | int) -> None:
        self._past = past
        self._past_visible = jnp.arange(past.keys[0].shape[-1])[None] < lengths_b[:, None]  # [B, C]
        self._at = at
        self._keys, self._values = list(window.keys), list(window.values)

    @property
    def window(self) -> KVWindow:
        return KVWindow(tuple(self._keys), tuple(self._values))

    def attend(self, layer: int, q_bthd: Array, k_btkd: Array, v_btkd: Array) -> Array:
        """The decoder's attention hook: ``(layer, q, k, v) -> [B, T, H, D]``."""
        batch, time, heads, head_dim = q_bthd.shape
        kv_heads = k_btkd.shape[2]
        self._keys[layer] = lax.dynamic_update_slice(
            self._keys[layer], k_btkd.transpose(0, 2, 3, 1), (0, 0, 0, self._at)
        )
        self._values[layer] = lax.dynamic_update_slice(
            self._values[layer], v_btkd.transpose(0, 2, 1, 3), (0, 0, self._at, 0)
        )
        own_column = self._at + jnp.arange(time)
        window_visible = jnp.arange(self._keys[layer].shape[-1])[None] <= own_column[:, None]  # [T, W]

        groups = heads // kv_heads
        q_bkgtd = q_bthd.reshape(batch, time, kv_heads, groups, head_dim).transpose(0, 2, 3, 1, 4) * head_dim**-0.5
        q_bkqd = q_bkgtd.reshape(batch, kv_heads, groups * time, head_dim)
        past = jnp.einsum("bkqd,bkdc->bkqc", q_bkqd, self._past.keys[layer])
        past = jnp.where(self._past_visible[:, None, None], past, _HIDDEN_SCORE)
        new = jnp.einsum("bkqd,bkdw->bkqw", q_bkqd, self._keys[layer])
        new = jnp.where(jnp.tile(window_visible, (groups, 1)), new, _HIDDEN_SCORE)

        peak = jnp.maximum(past.max(-1), new.max(-1))[..., None]
        past, new = jnp.exp(past - peak), jnp.exp(new - peak)
        mixed = jnp.einsum("bkqc,bkcd->bkqd", past, self._past.values[layer])
        mixed += jnp.einsum("bkqw,bkwd->bkqd", new, self._values[layer])
        mixed /= (past.sum(-1) + new.sum(-1))[..., None]
        return mixed.reshape(batch, kv_heads, groups, time, head_dim).transpose(0, 3, 1, 2, 4).reshape(q_bthd.shape)
