from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import Array

from palaestra.learners.logprobs import token_logprobs_and_entropy
from palaestra.learners.models.decoder import Decoder, packed_attention

IDS = jnp.asarray([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]], jnp.int32)
POSITIONS = jnp.tile(jnp.arange(6), (2, 1))
ONES = jnp.ones_like(IDS)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_each_token_gets_the_log_prob_that_its_predecessors_gave_it(tiny_model: Decoder, temperature: float) -> None:
    logprobs, entropy = token_logprobs_and_entropy(tiny_model, IDS, POSITIONS, ONES, temperature=temperature)
    hidden = tiny_model.hidden(IDS, POSITIONS, packed_attention(ONES))
    scores = np.asarray(tiny_model.logits(hidden), np.float64)[:, :-1] / temperature
    expected = scores - np.logaddexp.reduce(scores, axis=-1, keepdims=True)
    assert (logprobs[:, 0] == 0).all()
    assert (entropy[:, 0] == 0).all()
    for row, t in np.ndindex(2, 5):
        assert float(logprobs[row, t + 1]) == pytest.approx(expected[row, t, IDS[row, t + 1]], abs=1e-5)
    unsuppressed = expected[..., 1:]
    np.testing.assert_allclose(entropy[:, 1:], -(np.exp(unsuppressed) * unsuppressed).sum(-1), atol=1e-5)


@pytest.mark.parametrize("chunk", [5, 1000])
def test_values_and_gradients_do_not_depend_on_the_chunk(tiny_model: Decoder, chunk: int) -> None:
    graphdef, params = nnx.split(tiny_model, nnx.Param)

    def mixed(params: nnx.State, size: int) -> Array:
        found = token_logprobs_and_entropy(nnx.merge(graphdef, params), IDS, POSITIONS, ONES, logit_chunk_tokens=size)
        return (found[0] * jnp.arange(6)).sum() + 0.3 * (found[1] ** 2).sum()

    compiled = jax.jit(jax.value_and_grad(mixed), static_argnums=1)
    both = [compiled(params, size) for size in (chunk, 7)]
    for ours, theirs in zip(*map(jax.tree.leaves, both), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)


def test_no_array_of_batch_by_time_by_vocabulary_exists_forward_or_backward(tiny_model: Decoder) -> None:
    """What XLA compiled is read: no array holds more than a chunk's logits along the vocabulary (23)."""
    graphdef, params = nnx.split(tiny_model, nnx.Param)

    def loss(params: nnx.State, size: int) -> Array:
        logprobs, entropy = token_logprobs_and_entropy(
            nnx.merge(graphdef, params), IDS, POSITIONS, ONES, logit_chunk_tokens=size
        )
        return logprobs.sum() + entropy.sum()

    def largest(size: int) -> int:
        text = jax.jit(jax.grad(loss), static_argnums=1).lower(params, size).compile().as_text()
        shapes = [[int(n) for n in dims.split(",")] for dims in re.findall(r"f32\[([\d,]+)\]", text)]
        return max(int(np.prod(shape)) for shape in shapes if 23 in shape and 8 not in shape)

    assert largest(3) == 3 * 23
    assert largest(12) == 12 * 23
