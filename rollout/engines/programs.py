"""The three compiled programs of the embedded engine: prefill, fork and decode. Pure functions of static shapes.

Every program takes and returns the cache, which is donated. Rows that only fill a batch up to its bucket point at the
scratch slot.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax
from numpy.typing import NDArray

from palaestra.learners.models.decoder import Decoder
from palaestra.rollout.engines import kv_cache, sampler
from palaestra.rollout.engines.cached_attention import WindowedAttention, empty_window
from palaestra.rollout.engines.kv_cache import KVCache, KVWindow

Ints = NDArray[np.int32]


class DecodeRows(NamedTuple):
    """What a decode chunk is told of its B rows."""

    slots: Ints
    """[B] cache row."""
    lengths: Ints
    """[B] tokens in the cache."""
    last_ids: Ints
    """[B] the token that comes next and is not in the cache yet."""
    seeds: NDArray[np.uint32]
    """[B, 2] halves of the request's 64-bit seed."""
    drawn: Ints
    """[B] tokens drawn so far."""
    remaining: Ints
    """[B] tokens the request may still draw; 0 for padding rows."""
    temperatures: NDArray[np.float32]
    """[B]"""
    stop_ids: Ints
    """[B, M] padded with -1."""


class DecodedChunk(NamedTuple):
    """What a decode chunk drew. Columns from ``counts`` on are meaningless."""

    ids: Array
    """[N, B] int32."""
    logprobs: Array
    """[N, B] float32."""
    counts: Array
    """[B] tokens drawn by each row."""
    stopped: Array
    """[B] whether the last one was a stop id."""


class _DecodeState(NamedTuple):
    step: Array
    window: KVWindow
    last_ids: Array
    alive: Array
    stopped: Array
    counts: Array
    ids: Array
    logprobs: Array


@dataclass(frozen=True, slots=True)
class Programs:
    """The programs of one model. ``prefill`` and ``decode`` take the parameters first."""

    prefill: Callable[..., KVCache]
    """``(params, cache, slots [P], starts [P], ids [P, W], columns=C) -> cache``: compute ids at columns
    ``starts..`` of their slots; they see the first ``starts`` columns, of which C are read."""
    fork: Callable[..., KVCache]
    """``(cache, sources [P], targets [P], columns=C) -> cache``: copy the first C columns between slots."""
    decode: Callable[..., tuple[KVCache, DecodedChunk]]
    """``(params, cache, rows: DecodeRows, columns=C, steps=N) -> (cache, chunk)``: draw up to N tokens a row."""


@lru_cache(maxsize=8)
def programs_of(graphdef: nnx.GraphDef[Decoder]) -> Programs:
    """The programs for models of this structure; engines of the same structure share what was compiled."""
    return Programs(
        prefill=jax.jit(partial(_prefill, graphdef), static_argnames="columns", donate_argnums=1),
        fork=jax.jit(_fork, static_argnames="columns", donate_argnums=0),
        decode=jax.jit(partial(_decode, graphdef), static_argnames=("columns", "steps"), donate_argnums=1),
    )


def _prefill(
    graphdef: nnx.GraphDef[Decoder], params: Any, cache: KVCache, slots: Array, starts: Array, ids: Array, columns: int
) -> KVCache:
    model = nnx.merge(graphdef, params)
    past = kv_cache.read(cache, slots, columns)
    width = ids.shape[1]
    attention = WindowedAttention(past, starts, empty_window(past, width), at=0)
    model.hidden(ids, starts[:, None] + jnp.arange(width), attention.attend)
    return kv_cache.write(cache, attention.window, slots, starts)


def _fork(cache: KVCache, sources: Array, targets: Array, columns: int) -> KVCache:
    return kv_cache.write(cache, kv_cache.read(cache, sources, columns), targets, jnp.zeros_like(targets))


def _decode(
    graphdef: nnx.GraphDef[Decoder], params: Any, cache: KVCache, rows: DecodeRows, columns: int, steps: int
) -> tuple[KVCache, DecodedChunk]:
    model = nnx.merge(graphdef, params)
    slots, lengths, drawn = jnp.asarray(rows.slots), jnp.asarray(rows.lengths), jnp.asarray(rows.drawn)
    temperatures, keys = jnp.asarray(rows.temperatures), sampler.request_keys(jnp.asarray(rows.seeds))
    past = kv_cache.read(cache, slots, columns)
    batch = slots.shape[0]

    def draw_next(state: _DecodeState) -> _DecodeState:
        attention = WindowedAttention(past, lengths, state.window, at=state.step)
        positions = (lengths + state.step)[:, None]
        hidden = model.hidden(state.last_ids[:, None], positions, attention.attend)[:, 0]
        ids, logprobs = sampler.draw(model.logits(hidden), temperatures, keys, drawn + state.step)
        counts = state.counts + state.alive
        stopped = state.stopped | (state.alive & (ids[:, None] == rows.stop_ids).any(-1))
        return _DecodeState(
            step=state.step + 1,
            window=attention.window,
            last_ids=ids,
            alive=state.alive & ~stopped & (counts < rows.remaining),
            stopped=stopped,
            counts=counts,
            ids=lax.dynamic_update_slice(state.ids, ids[None], (state.step, 0)),
            logprobs=lax.dynamic_update_slice(state.logprobs, logprobs[None], (state.step, 0)),
        )

    end = lax.while_loop(
        lambda state: (state.step < steps) & state.alive.any(),
        draw_next,
        _DecodeState(
            step=jnp.int32(0),
            window=empty_window(past, steps),
            last_ids=jnp.asarray(rows.last_ids),
            alive=jnp.asarray(rows.remaining) > 0,
            stopped=jnp.zeros(batch, bool),
            counts=jnp.zeros(batch, jnp.int32),
            ids=jnp.zeros((steps, batch), jnp.int32),
            logprobs=jnp.zeros((steps, batch), jnp.float32),
        ),
    )
    cache = kv_cache.write(cache, end.window, slots, lengths)
    return cache, DecodedChunk(end.ids, end.logprobs, end.counts, end.stopped)
