"""Drawing one token a row: Gumbel-max with a key of the request's own, so that no row depends on its neighbours."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array


def request_keys(seeds_b2: Array) -> Array:
    """One key a row from the two 32-bit halves of its seed, uint32 [B, 2]."""
    keys_b: Array = jax.random.wrap_key_data(seeds_b2, impl="threefry2x32")
    return keys_b


def draw(logits_bv: Array, temperatures_b: Array, keys_b: Array, drawn_b: Array) -> tuple[Array, Array]:
    """Sample ids [B] int32 and their behaviour log-probs [B] float32.

    ``drawn_b`` counts the tokens that the request has drawn so far: noise depends on (seed, count) and on nothing
    else. The log-prob is ``log_softmax(logits / T)[id]``. Temperature 0 takes the most likely id, with its log-prob at
    temperature 1.
    """
    greedy_b = temperatures_b == 0
    scaled_bv = logits_bv / jnp.where(greedy_b, 1.0, temperatures_b)[:, None]
    vocabulary = logits_bv.shape[-1:]
    noise_bv = jax.vmap(lambda key, count: jax.random.gumbel(jax.random.fold_in(key, count), vocabulary))(
        keys_b, drawn_b
    )
    ids_b = jnp.argmax(scaled_bv + jnp.where(greedy_b[:, None], 0.0, noise_bv), axis=-1).astype(jnp.int32)
    logprobs_bv = jax.nn.log_softmax(scaled_bv)
    return ids_b, jnp.take_along_axis(logprobs_bv, ids_b[:, None], axis=-1)[:, 0]
