from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from palaestra.learners.aggregation import AGGREGATIONS, Aggregation, denominator, token_weight, weighted_sum
from palaestra.learners.losses import (
    cispo_loss,
    clipped_loss,
    gspo_loss,
    kl_estimate,
    log_difference,
    supervised_loss,
    truncated_importance_weight,
)

NORM_TOKENS = 6
LossOf = Callable[[Array], Array]


class Fixture:
    """The golden arrays at the precision in force, each row one sequence."""

    def __init__(self, golden: dict[str, Any]) -> None:
        self.logprobs, self.old, self.behaviour, self.ref, self.mask = (
            jnp.asarray(golden[name], float) for name in ("logp", "old", "behaviour", "ref", "mask")
        )
        self.advantages = jnp.asarray(golden["advantages"], float)[:, None] * jnp.ones_like(self.logprobs)
        self.segments = jnp.ones(self.mask.shape, jnp.int32)

    def reduce(self, token_loss: Array, aggregation: Aggregation) -> Array:
        tokens = [int(n) for n in np.asarray(self.mask).sum(axis=1)]
        weights = self.mask * jnp.asarray([token_weight(aggregation, n) for n in tokens])[:, None]
        scale = denominator(aggregation, tokens, [1.0] * len(tokens), norm_tokens=NORM_TOKENS)
        return weighted_sum(token_loss, weights) / scale

    def losses(self) -> dict[str, LossOf]:
        def ppo(logprobs: Array) -> Array:
            return clipped_loss(logprobs, self.old, self.advantages).loss

        def corrected(logprobs: Array) -> Array:
            return ppo(logprobs) * truncated_importance_weight(self.old, self.behaviour, cap_absolute=2.0)

        def gspo(logprobs: Array) -> Array:
            return gspo_loss(logprobs, self.old, self.advantages, self.mask, self.segments).loss

        def cispo(logprobs: Array) -> Array:
            return cispo_loss(logprobs, self.old, self.advantages).loss

        def reduced(loss: LossOf, aggregation: Aggregation) -> LossOf:
            return lambda logprobs: self.reduce(loss(logprobs), aggregation)

        plain = {name: reduced(ppo, name) for name in AGGREGATIONS}
        return plain | {
            "gspo": reduced(gspo, "seq-mean-token-mean"),
            "cispo": reduced(cispo, "token-mean"),
            "token-mean+tis": reduced(corrected, "token-mean"),
        }


GOLDEN_LOSSES = [*AGGREGATIONS, "gspo", "cispo", "token-mean+tis"]


@pytest.mark.parametrize("name", GOLDEN_LOSSES)
def test_losses_and_gradients_equal_those_of_trl_and_verl(name: str, golden: dict[str, Any]) -> None:
    fixture = Fixture(golden)
    loss, gradient = jax.value_and_grad(fixture.losses()[name])(fixture.logprobs)
    expected = golden["policy_loss"][name]
    assert float(loss) == pytest.approx(expected["loss"], abs=5e-7)
    assert float(jnp.linalg.norm(gradient)) == pytest.approx(expected["grad_norm"], abs=5e-7)


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_gradients_equal_finite_differences(name: str, golden: dict[str, Any], x64: None) -> None:
    fixture = Fixture(golden)
    loss = fixture.losses()[name]
    assert_gradient_is_a_finite_difference(loss, fixture.logprobs)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_gradients_equal_finite_differences(kind: Any, golden: dict[str, Any], x64: None) -> None:
    fixture = Fixture(golden)
    assert_gradient_is_a_finite_difference(
        lambda logprobs: fixture.reduce(kl_estimate(kind, logprobs, fixture.ref), "token-mean"), fixture.logprobs
    )


def assert_gradient_is_a_finite_difference(loss: LossOf, at: Array) -> None:
    assert at.dtype == jnp.float64
    gradient = np.asarray(jax.grad(loss)(at))
    assert np.abs(gradient).max() > 1e-3
    compiled = jax.jit(loss)
    for place in np.ndindex(*at.shape):
        step = jnp.zeros_like(at).at[place].set(1e-6)
        difference = (float(compiled(at + step)) - float(compiled(at - step))) / 2e-6
        assert gradient[place] == pytest.approx(difference, abs=1e-8)


def test_gspo_gives_every_token_the_gradient_of_its_sequence_ratio(golden: dict[str, Any], x64: None) -> None:
    """Its value goes through a stop-gradient, so the finite difference is that of the sequence form."""
    fixture = Fixture(golden)
    count = fixture.mask.sum(axis=1)

    def sequence_form(logprobs: Array) -> Array:
        ratio = jnp.exp(((logprobs - fixture.old) * fixture.mask).sum(axis=1) / count)
        advantages = fixture.advantages[:, 0]
        return jnp.maximum(-ratio * advantages, -jnp.clip(ratio, 1 - 3e-4, 1 + 4e-4) * advantages).mean()

    ours = jax.grad(fixture.losses()["gspo"])(fixture.logprobs)
    np.testing.assert_allclose(ours, jax.grad(sequence_form)(fixture.logprobs), atol=1e-12)


def test_the_clip_fraction_of_the_fixture_is_one_in_fourteen(golden: dict[str, Any]) -> None:
    fixture = Fixture(golden)
    clipped = clipped_loss(fixture.logprobs, fixture.old, fixture.advantages).clipped
    assert float((clipped * fixture.mask).sum() / fixture.mask.sum()) == pytest.approx(golden["clip_fraction"])


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_estimates_equal_the_golden_means(kind: Any, golden: dict[str, Any]) -> None:
    fixture = Fixture(golden)
    estimate = fixture.reduce(kl_estimate(kind, fixture.logprobs, fixture.ref), "token-mean")
    assert float(estimate) == pytest.approx(golden["kl_mean"][kind], abs=1e-7)


def test_k3_keeps_its_value_where_the_difference_is_tiny() -> None:
    difference = jnp.float32(1e-3)
    assert float(kl_estimate("k3", difference, jnp.float32(0))) == pytest.approx(4.998e-7, rel=1e-3)
    assert float(kl_estimate("k3", jnp.float32(-1.5), jnp.float32(-1.5))) == 0


def test_dual_clip_bounds_the_loss_of_a_bad_token_that_became_likely() -> None:
    old, advantages = jnp.array([-5.0, -5.0, -1.0]), jnp.array([-1.0, 1.0, -1.0])
    logprobs = jnp.array([-0.5, -0.5, -1.0])
    free = clipped_loss(logprobs, old, advantages)
    capped = clipped_loss(logprobs, old, advantages, dual_clip_absolute=3.0)
    assert float(free.loss[0]) == pytest.approx(np.exp(4.5), rel=1e-5)
    assert float(capped.loss[0]) == 3.0
    assert capped.clipped.tolist() == [1, 1, 0]
    np.testing.assert_array_equal(capped.loss[1:], free.loss[1:])


def test_log_differences_are_clamped_so_that_no_ratio_overflows() -> None:
    far = jnp.float32(-1e4)
    assert float(log_difference(jnp.float32(0), far)) == 20
    for advantage in (1.0, -1.0):
        result = clipped_loss(jnp.zeros(1), far[None], jnp.asarray([advantage]))
        assert np.isfinite(np.asarray(result.loss)).all()


def test_importance_weights_are_capped_and_carry_no_gradient() -> None:
    old, behaviour = jnp.array([-1.0, -1.0]), jnp.array([-3.0, -0.5])
    weights = truncated_importance_weight(old, behaviour, cap_absolute=2.0)
    np.testing.assert_allclose(weights, [2.0, np.exp(-0.5)], rtol=1e-6)
    gradient = jax.grad(lambda x: truncated_importance_weight(x, behaviour).sum())(old)
    assert (gradient == 0).all()


def test_cispo_keeps_the_gradient_of_a_token_that_ppo_clips() -> None:
    old, logprobs, advantages = jnp.array([-3.0]), jnp.array([-0.5]), jnp.array([1.0])
    assert float(jax.grad(lambda x: clipped_loss(x, old, advantages).loss.sum())(logprobs)[0]) == 0
    assert float(jax.grad(lambda x: cispo_loss(x, old, advantages).loss.sum())(logprobs)[0]) == -5.0


def test_gspo_in_a_packed_row_equals_gspo_of_its_sequences_apart(golden: dict[str, Any]) -> None:
    fixture = Fixture(golden)
    apart = gspo_loss(fixture.logprobs, fixture.old, fixture.advantages, fixture.mask, fixture.segments).loss
    arrays = (fixture.logprobs, fixture.old, fixture.advantages, fixture.mask)
    segments = jnp.repeat(jnp.arange(1, 5), 6)[None]
    packed = gspo_loss(*(array.reshape(1, 24) for array in arrays), segments).loss
    np.testing.assert_allclose(packed.reshape(4, 6), apart, rtol=1e-6)


def test_the_supervised_loss_is_minus_the_mean_log_prob_of_the_targets(golden: dict[str, Any]) -> None:
    fixture = Fixture(golden)
    expected = -np.asarray(fixture.logprobs)[np.asarray(fixture.mask) > 0].mean()
    loss = fixture.reduce(supervised_loss(fixture.logprobs).loss, "token-mean")
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 1e30])
def test_what_stands_under_a_zero_weight_reaches_neither_the_sum_nor_the_gradient(poison: float) -> None:
    weights = jnp.array([1.0, 0.0, 2.0])
    value, gradient = jax.value_and_grad(weighted_sum)(jnp.array([1.0, poison, 3.0]), weights)
    assert float(value) == 7
    assert gradient.tolist() == [1, 0, 2]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_row_that_is_masked_out_is_in_no_denominator(aggregation: Aggregation) -> None:
    kept = denominator(aggregation, [3, 5], [1.0, 1.0], norm_tokens=8)
    assert denominator(aggregation, [3, 0, 5, 7], [1.0, 1.0, 1.0, 0.0], norm_tokens=8) == kept


def test_the_constant_length_of_token_sum_norm_must_be_given() -> None:
    with pytest.raises(ValueError, match="needs norm_tokens"):
        denominator("token-sum-norm", [3], [1.0])
