from __future__ import annotations

import doctest
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import Array

from palaestra.learners.models import config as config_module
from palaestra.learners.models.config import DecoderConfig
from palaestra.learners.models.decoder import SUPPRESSED_LOGIT, Decoder, masked_attention, packed_attention

IDS = jnp.asarray([[3, 1, 4, 1, 5, 9, 2, 6]], jnp.int32)
POSITIONS = jnp.arange(8)[None]
SIZES: dict[str, Any] = {
    "vocab_size": 23,
    "hidden_size": 8,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 4,
    "intermediate_size": 12,
}


def logits(model: Decoder, ids_bt: Array, positions_bt: Array, segments_bt: Array) -> Array:
    return model.logits(model.hidden(ids_bt, positions_bt, packed_attention(segments_bt)))


def test_the_example_of_the_configuration_is_true() -> None:
    assert doctest.testmod(config_module).failed == 0


@pytest.mark.parametrize("shape", [{}, {"tie_word_embeddings": False}, {"qk_norm": False, "attention_bias": True}])
def test_the_parameter_count_is_that_of_the_model(shape: dict[str, Any]) -> None:
    config = DecoderConfig(**SIZES, **shape)
    model = Decoder(config, rngs=nnx.Rngs(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))) == config.parameter_count


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 0}, "num_layers is 0; give a whole number"),
        ({"vocab_size": 2.5}, "vocab_size is 2.5; give a whole number"),
        ({"num_kv_heads": 3}, r"num_heads \(4\) is no multiple of num_kv_heads \(3\)"),
        ({"head_dim": 5}, "head_dim is 5; rotary embeddings need an even number"),
        ({"rope_theta": 0.0}, "rope_theta is 0.0; give a number above 0"),
        ({"weight_init_std": -1.0}, "weight_init_std is -1.0; give a number above 0"),
        ({"suppressed_ids": (23,)}, r"suppressed_ids holds \[23\]; ids of this vocabulary are 0..22"),
        ({"suppressed_ids": tuple(range(23))}, "suppresses the whole vocabulary"),
    ],
)
def test_a_configuration_that_cannot_be_says_which_field_and_what_to_do(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DecoderConfig(**(SIZES | change))


def test_with_zero_output_projections_every_block_begins_as_the_identity() -> None:
    config = DecoderConfig(**SIZES, zero_output_projections=True)
    model = Decoder(config, rngs=nnx.Rngs(0))
    embedded = model.embedding[...][IDS]
    hidden = model.hidden(IDS, POSITIONS, packed_attention(jnp.ones_like(IDS)))
    normed = embedded / jnp.sqrt(jnp.mean(embedded**2, axis=-1, keepdims=True) + config.rms_norm_eps)
    np.testing.assert_allclose(hidden, normed, rtol=1e-5)


def test_initial_matrices_have_the_deviation_asked_for() -> None:
    sizes = SIZES | {"vocab_size": 400, "hidden_size": 64, "intermediate_size": 100}
    state = Decoder(DecoderConfig(**sizes, zero_output_projections=False), rngs=nnx.Rngs(0))
    assert float(state.embedding[...].std()) == pytest.approx(0.1, rel=0.05)
    assert float(state.layers[0].feed_forward.up_kernel[...].std()) == pytest.approx(64**-0.5, rel=0.05)
    assert float(state.layers[0].feed_forward.down_kernel[...].std()) == pytest.approx(100**-0.5, rel=0.05)
    fixed = Decoder(DecoderConfig(**sizes, weight_init_std=0.02), rngs=nnx.Rngs(0))
    assert float(fixed.layers[0].feed_forward.up_kernel[...].std()) == pytest.approx(0.02, rel=0.05)
    assert float(jnp.abs(fixed.layers[0].feed_forward.down_kernel[...]).max()) == 0


def test_a_token_never_sees_a_later_one(tiny_model: Decoder) -> None:
    ones = jnp.ones_like(IDS)
    before = logits(tiny_model, IDS, POSITIONS, ones)
    after = logits(tiny_model, IDS.at[0, 5].set(7), POSITIONS, ones)
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert (before[:, 5:] != after[:, 5:]).any(axis=-1).all()


def test_sequences_packed_into_a_row_get_the_logits_they_get_alone(tiny_model: Decoder) -> None:
    packed = logits(
        tiny_model,
        jnp.concatenate([IDS[:, :5], IDS[:, :3]], axis=1),
        jnp.asarray([[0, 1, 2, 3, 4, 0, 1, 2]]),
        jnp.asarray([[1, 1, 1, 1, 1, 2, 2, 2]]),
    )
    alone = logits(tiny_model, IDS, POSITIONS, jnp.ones_like(IDS))
    np.testing.assert_allclose(packed[:, :5], alone[:, :5], atol=1e-5)
    np.testing.assert_allclose(packed[:, 5:], alone[:, :3], atol=1e-5)


def test_only_distances_between_positions_matter(tiny_model: Decoder) -> None:
    ones = jnp.ones_like(IDS)
    np.testing.assert_allclose(
        logits(tiny_model, IDS, POSITIONS, ones), logits(tiny_model, IDS, POSITIONS + 37, ones), atol=1e-4
    )


def test_an_attend_closure_with_a_cache_gives_the_logits_of_the_whole_sequence(tiny_model: Decoder) -> None:
    """The seam an engine uses: one token at a time, keys and values kept by the closure."""
    cache: dict[int, tuple[Array, Array]] = {}

    def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
        if layer in cache:
            k, v = (jnp.concatenate(pair, axis=1) for pair in zip(cache[layer], (k, v), strict=True))
        cache[layer] = (k, v)
        return masked_attention(q, k, v, jnp.ones((1, q.shape[1], k.shape[1]), bool))

    steps = [tiny_model.logits(tiny_model.hidden(IDS[:, t : t + 1], POSITIONS[:, t : t + 1], attend)) for t in range(8)]
    whole = logits(tiny_model, IDS, POSITIONS, jnp.ones_like(IDS))
    np.testing.assert_allclose(jnp.concatenate(steps, axis=1), whole, atol=1e-5)


def test_attention_equals_softmax_written_out_for_every_head() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(2, 5, heads, 4)).astype(np.float32) for heads in (4, 2, 2))
    visible = np.tril(np.ones((5, 5), bool))[None].repeat(2, axis=0)
    expected = np.zeros_like(q)
    for batch, time, head in np.ndindex(2, 5, 4):
        scores = np.where(visible[batch, time], k[batch, :, head // 2] @ q[batch, time, head] / 2.0, -np.inf)
        weights = np.exp(scores - scores.max())
        expected[batch, time, head] = weights / weights.sum() @ v[batch, :, head // 2]
    np.testing.assert_allclose(masked_attention(*map(jnp.asarray, (q, k, v, visible))), expected, atol=1e-5)


def test_suppressed_ids_have_probability_zero_and_give_no_gradient(tiny_model: Decoder) -> None:
    ones = jnp.ones_like(IDS)
    found = logits(tiny_model, IDS, POSITIONS, ones)
    assert (found[..., 0] == SUPPRESSED_LOGIT).all()
    assert (jax.nn.softmax(found)[..., 0] == 0).all()
    graphdef, params = nnx.split(tiny_model, nnx.Param)

    def spread(params: Any) -> Array:
        return jax.nn.logsumexp(logits(nnx.merge(graphdef, params), IDS, POSITIONS, ones), axis=-1).sum()

    gradient = jax.grad(spread)(params)
    assert float(jnp.abs(gradient["embedding"][...][0]).max()) == 0
    assert float(jnp.abs(gradient["embedding"][...][11]).max()) > 0
