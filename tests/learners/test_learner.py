from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.monitoring
import numpy as np
import pytest
from flax import nnx

from palaestra.learners.batching import PackingShape
from palaestra.learners.config import CispoLossConfig, GspoLossConfig, KlConfig, LearnerConfig, OptimizerConfig
from palaestra.learners.learner import Learner
from palaestra.learners.models.config import DecoderConfig
from palaestra.learners.models.decoder import Decoder
from palaestra.learners.models.parameters import fingerprint, named_leaves
from palaestra.learners.rows import TokenRow

MakeRow = Callable[..., TokenRow]

PLAIN_GRADIENT = OptimizerConfig(1e-2, clip_norm=None, b1=0.0, b2=0.0, eps=1e8)
"""AdamW with an eps this large moves each weight by -1e-10 times its gradient, so that a step shows the gradient."""


def moments(learner: Learner) -> dict[str, np.ndarray]:
    """With b1 = 0 the optimizer's first moment is the gradient of the last step."""
    leaves = named_leaves(learner.state().optimizer).items()
    return {name.split("mu/")[1]: np.asarray(leaf) for name, leaf in leaves if "mu/" in name}


def assert_close(a: dict[str, np.ndarray], b: dict[str, np.ndarray], atol: float) -> None:
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_allclose(a[name], b[name], atol=atol, err_msg=name)


@pytest.fixture
def rows(make_row: MakeRow) -> list[TokenRow]:
    return [make_row(seed, length) for seed, length in enumerate((9, 5, 12, 7, 4, 10))]


@pytest.fixture
def gradient_config(tiny_learner_config: LearnerConfig) -> LearnerConfig:
    return dataclasses.replace(tiny_learner_config, optimizer=PLAIN_GRADIENT, entropy_coefficient=0.01)


@pytest.mark.parametrize("loss", [None, GspoLossConfig(), CispoLossConfig()], ids=["clip", "gspo", "cispo"])
def test_loss_and_gradient_do_not_depend_on_order_packing_padding_or_chunks(
    loss: Any, tiny_model: Decoder, rows: list[TokenRow], gradient_config: LearnerConfig
) -> None:
    base = gradient_config if loss is None else dataclasses.replace(gradient_config, loss=loss)
    variants = [
        (base, rows),
        (base, rows[::-1]),
        (dataclasses.replace(base, shape=PackingShape(31, 4), logit_chunk_tokens=5), rows),
    ]
    found = []
    for config, order in variants:
        learner = Learner(tiny_model, config)
        metrics = learner.update(order)
        found.append(({name: metrics[name] for name in ("loss", "entropy", "k3", "grad_norm")}, moments(learner)))
    for metrics, gradient in found[1:]:
        assert metrics == pytest.approx(found[0][0], abs=1e-6, rel=1e-6)
        assert_close(gradient, found[0][1], atol=1e-6)


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "token-sum-norm"])
def test_the_loss_is_the_sum_over_all_rows_divided_once(
    aggregation: Any, tiny_model: Decoder, rows: list[TokenRow], tiny_learner_config: LearnerConfig
) -> None:
    """Written out by hand from the log-probs of each row alone."""
    learner = Learner(tiny_model, dataclasses.replace(tiny_learner_config, aggregation=aggregation, norm_tokens=16))
    per_row = []
    for row, logprobs in zip(rows, learner.logprobs(rows), strict=True):
        ratio = np.exp(logprobs.astype(np.float64) - row.behaviour_logprobs)
        token = np.maximum(-ratio * row.advantage, -np.clip(ratio, 0.8, 1.28) * row.advantage)
        per_row.append(token[row.mask > 0])
    tokens = np.concatenate(per_row)
    expected = {
        "token-mean": tokens.mean(),
        "seq-mean-token-mean": np.mean([row.mean() for row in per_row]),
        "seq-mean-token-sum": np.mean([row.sum() for row in per_row]),
        "token-sum-norm": tokens.sum() / (len(rows) * 16),
    }
    assert learner.update(rows)["loss"] == pytest.approx(expected[aggregation], rel=1e-5)


def test_what_stands_under_mask_zero_changes_nothing_bit_for_bit(
    tiny_model: Decoder, rows: list[TokenRow], tiny_learner_config: LearnerConfig
) -> None:
    poisoned = [
        dataclasses.replace(
            row,
            behaviour_logprobs=np.where(row.mask > 0, row.behaviour_logprobs, np.float32(np.nan)),
            versions=np.where(row.mask > 0, row.versions, 7).astype(np.int32),
        )
        for row in rows
    ]
    clean, dirty = Learner(tiny_model, tiny_learner_config), Learner(tiny_model, tiny_learner_config)
    assert clean.update(rows) == dirty.update(poisoned)
    assert clean.fingerprint() == dirty.fingerprint()


def test_rows_that_are_masked_out_dilute_nothing(
    tiny_model: Decoder, rows: list[TokenRow], tiny_learner_config: LearnerConfig, make_row: MakeRow
) -> None:
    failed = make_row(50, 10, row_weight=0.0, advantage=float("nan"))
    untrained = make_row(51, 6, mask=np.zeros(6, np.float32))
    plain, mixed = Learner(tiny_model, tiny_learner_config), Learner(tiny_model, tiny_learner_config)
    alone, together = plain.update(rows), mixed.update([failed, *rows, untrained])
    assert plain.fingerprint() == mixed.fingerprint()
    assert (alone["empty_rows"], together["empty_rows"]) == (0, 2)
    assert (together["rows"], together["tokens"], together["loss"]) == (8, alone["tokens"], alone["loss"])


@pytest.mark.parametrize("method", ["update", "supervised_update"])
def test_a_batch_with_nothing_to_train_on_changes_nothing(
    method: str, tiny_model: Decoder, tiny_learner_config: LearnerConfig, make_row: MakeRow
) -> None:
    learner = Learner(tiny_model, tiny_learner_config)
    before = fingerprint(learner.state())
    for batch in ([], [make_row(0, 6, mask=np.zeros(6, np.float32))], [make_row(1, row_weight=0.0)]):
        metrics = getattr(learner, method)(batch)
        assert (metrics["loss"], metrics["tokens"], metrics["optimizer_steps"]) == (0, 0, 0)
        assert metrics["empty_rows"] == len(batch)
        assert all(np.isfinite(value) for value in metrics.values())
    assert fingerprint(learner.state()) == before
    assert (learner.step, learner.version) == (0, 0)


def test_k3_is_tiny_and_the_ratio_one_where_the_sampler_had_the_same_weights(
    tiny_model: Decoder, rows: list[TokenRow], tiny_learner_config: LearnerConfig
) -> None:
    learner = Learner(tiny_model, tiny_learner_config)
    exact = [
        dataclasses.replace(row, behaviour_logprobs=logprobs)
        for row, logprobs in zip(rows, learner.logprobs(rows), strict=True)
    ]
    sampled = sum(row.mask.sum() for row in rows)
    expected_loss = -sum(row.advantage * row.mask.sum() for row in rows) / sampled
    metrics = learner.update(exact)
    assert abs(metrics["k3"]) < 1e-9
    assert metrics["loss"] == pytest.approx(expected_loss, abs=1e-6)
    assert metrics["clip_fraction"] == 0
    assert learner.update(exact)["k3"] > 1e-6


def test_a_positive_advantage_makes_the_sampled_tokens_and_their_stop_likelier(
    tiny_model: Decoder, tiny_learner_config: LearnerConfig, make_row: MakeRow
) -> None:
    mask = np.array([0, 0, 0, 0, 1, 1], np.float32)
    row = make_row(3, 6, mask=mask, advantage=1.0)
    for sign in (1.0, -1.0):
        learner = Learner(tiny_model, tiny_learner_config)
        before = learner.logprobs([row])[0]
        learner.update([dataclasses.replace(row, advantage=sign, behaviour_logprobs=before)])
        change = (learner.logprobs([row])[0] - before) * sign
        assert (change[4:] > 0).all()


def test_training_on_a_batch_again_and_again_learns_it(
    tiny_model: Decoder, rows: list[TokenRow], tiny_learner_config: LearnerConfig
) -> None:
    optimizer = OptimizerConfig(3e-2, weight_decay=0.01)
    learner = Learner(tiny_model, dataclasses.replace(tiny_learner_config, optimizer=optimizer))
    losses = [learner.supervised_update(rows)["loss"] for _ in range(40)]
    assert losses[-1] < 0.25 * losses[0]
    targets = np.concatenate([lp[r.mask > 0] for lp, r in zip(learner.logprobs(rows), rows, strict=True)])
    assert -targets.mean() < losses[0] * 0.25


def test_the_supervised_loss_is_minus_the_mean_log_prob_of_the_masked_tokens(
    tiny_model: Decoder, rows: list[TokenRow], tiny_learner_config: LearnerConfig
) -> None:
    learner = Learner(tiny_model, tiny_learner_config)
    targets = np.concatenate([lp[r.mask > 0] for lp, r in zip(learner.logprobs(rows), rows, strict=True)])
    metrics = learner.supervised_update(rows)
    assert metrics["loss"] == pytest.approx(-targets.mean(), rel=1e-5)
    assert not {"k3", "clip_fraction"} & metrics.keys()


@pytest.fixture
def compilations() -> Iterator[list[str]]:
    """Names of what XLA compiles during the test."""
    seen: list[str] = []

    def listen(event: str, duration_s: float, **_: Any) -> None:
        del duration_s
        if event.endswith("backend_compile_duration"):
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


def test_after_the_first_update_nothing_is_compiled_again_whatever_the_lengths(
    compilations: list[str], tiny_model: Decoder, tiny_learner_config: LearnerConfig, make_row: MakeRow
) -> None:
    config = dataclasses.replace(tiny_learner_config, old_logprobs="recomputed", kl=KlConfig(0.1))
    learner = Learner(tiny_model, config)

    def everything(seed: int) -> None:
        rng = np.random.default_rng(seed)
        ragged = [make_row(seed * 100 + i, int(rng.integers(3, 17))) for i in range(int(rng.integers(1, 12)))]
        learner.update(ragged)
        learner.supervised_update(ragged)
        learner.logprobs(ragged)
        learner.params()
        learner.fingerprint()

    everything(0)
    assert compilations
    compilations.clear()
    for seed in range(1, 9):
        everything(seed)
    assert compilations == []


def test_weights_that_were_handed_out_survive_later_updates(
    tiny_model: Decoder, rows: list[TokenRow], tiny_learner_config: LearnerConfig
) -> None:
    learner = Learner(tiny_model, tiny_learner_config)
    given, model, mark = learner.params(), learner.model(), learner.fingerprint()
    for _ in range(3):
        learner.update(rows)
    assert learner.fingerprint() != mark
    assert mark == fingerprint(given) == fingerprint(nnx.state(model, nnx.Param))
    assert mark == fingerprint(nnx.state(tiny_model, nnx.Param))


def test_several_minibatches_take_several_steps_from_one_set_of_old_log_probs(
    tiny_model: Decoder, rows: list[TokenRow], tiny_learner_config: LearnerConfig
) -> None:
    config = dataclasses.replace(
        tiny_learner_config, optimizer=OptimizerConfig(0.1), minibatches=3, old_logprobs="recomputed"
    )
    learner = Learner(tiny_model, config)
    metrics = learner.update(rows)
    assert (metrics["optimizer_steps"], metrics["step"], metrics["version"]) == (3, 3, 1)
    assert metrics["clip_fraction"] > 0
    assert metrics["tokens"] == sum(row.mask.sum() for row in rows)
    single = Learner(tiny_model, dataclasses.replace(config, minibatches=1)).update(rows)
    assert (single["optimizer_steps"], single["clip_fraction"]) == (1, 0)


def test_recomputed_old_log_probs_give_a_ratio_of_one_and_the_cap_weighs_the_mismatch(
    tiny_model: Decoder, rows: list[TokenRow], tiny_learner_config: LearnerConfig
) -> None:
    recomputed = dataclasses.replace(tiny_learner_config, old_logprobs="recomputed")
    learner = Learner(tiny_model, recomputed)
    old, sampled = learner.logprobs(rows), [row.mask > 0 for row in rows]
    token_weights = [
        np.minimum(np.exp(lp - row.behaviour_logprobs), 2.0)[m] for lp, row, m in zip(old, rows, sampled, strict=True)
    ]
    count = sum(m.sum() for m in sampled)
    plain = -sum(row.advantage * m.sum() for row, m in zip(rows, sampled, strict=True)) / count
    weighed = -sum(row.advantage * w.sum() for row, w in zip(rows, token_weights, strict=True)) / count
    assert learner.update(rows)["loss"] == pytest.approx(plain, abs=1e-6)
    capped = Learner(tiny_model, dataclasses.replace(recomputed, mismatch_cap_absolute=2.0))
    assert capped.update(rows)["loss"] == pytest.approx(weighed, rel=1e-5)


def test_a_kl_term_pulls_towards_the_reference(
    tiny_model: Decoder, tiny_config: DecoderConfig, rows: list[TokenRow], tiny_learner_config: LearnerConfig
) -> None:
    neutral = [dataclasses.replace(row, advantage=0.0) for row in rows]
    other = Decoder(tiny_config, rngs=nnx.Rngs(5))
    config = dataclasses.replace(tiny_learner_config, kl=KlConfig(1.0, "k2"))
    learner = Learner(tiny_model, config, reference=other)
    distances = [learner.update(neutral)["reference_kl"] for _ in range(15)]
    assert distances[-1] < 0.5 * distances[0]
    assert Learner(tiny_model, config).update(neutral)["reference_kl"] < 1e-9


def test_an_entropy_bonus_flattens_the_policy(
    tiny_model: Decoder, rows: list[TokenRow], tiny_learner_config: LearnerConfig
) -> None:
    neutral = [dataclasses.replace(row, advantage=0.0) for row in rows]
    learner = Learner(tiny_model, dataclasses.replace(tiny_learner_config, entropy_coefficient=1.0))
    entropies = [learner.update(neutral)["entropy"] for _ in range(15)]
    assert entropies[-1] > entropies[0] + 0.1


def test_a_gradient_that_is_not_finite_is_an_error_and_not_a_step(
    tiny_model: Decoder, rows: list[TokenRow], tiny_learner_config: LearnerConfig
) -> None:
    learner = Learner(tiny_model, tiny_learner_config)
    before = learner.fingerprint()
    huge = [dataclasses.replace(row, advantage=3e38) for row in rows]
    with pytest.raises(FloatingPointError, match=r"gradient norm .* of optimizer step 0 is not finite"):
        learner.update(huge)
    assert (learner.fingerprint(), learner.step, learner.version) == (before, 0, 0)
    assert learner.update(rows)["optimizer_steps"] == 1


def test_after_a_broken_minibatch_the_version_says_that_earlier_ones_changed_the_weights(
    tiny_model: Decoder, rows: list[TokenRow], tiny_learner_config: LearnerConfig
) -> None:
    learner = Learner(tiny_model, dataclasses.replace(tiny_learner_config, minibatches=2))
    before = learner.fingerprint()
    with pytest.raises(FloatingPointError, match="optimizer step 1"):
        learner.update([row if i % 2 == 0 else dataclasses.replace(row, advantage=3e38) for i, row in enumerate(rows)])
    assert learner.fingerprint() != before
    assert (learner.step, learner.version) == (1, 1)


@pytest.mark.parametrize("method", ["update", "supervised_update", "logprobs"])
@pytest.mark.parametrize("bad", [-1, 23])
def test_a_token_id_outside_the_vocabulary_is_refused_with_its_row(
    tiny_model: Decoder, rows: list[TokenRow], tiny_learner_config: LearnerConfig, method: str, bad: int
) -> None:
    learner = Learner(tiny_model, tiny_learner_config)
    assert tiny_model.config.vocab_size == 23
    before = learner.fingerprint()
    for position in (0, 2):  # a given token, and a sampled one
        ids = rows[1].ids.copy()
        ids[position] = bad
        with pytest.raises(ValueError, match=rf"row 1 has token id {bad}, outside .* 0\.\.22"):
            getattr(learner, method)([rows[0], dataclasses.replace(rows[1], ids=ids)])
    assert learner.fingerprint() == before


def test_the_gradient_is_clipped_to_its_global_norm(
    tiny_model: Decoder, rows: list[TokenRow], gradient_config: LearnerConfig
) -> None:
    free = Learner(tiny_model, gradient_config)
    norm = free.update(rows)["grad_norm"]
    gradient = moments(free)
    assert norm == pytest.approx(np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in gradient.values())), rel=1e-5)
    limit = norm / 4
    optimizer = dataclasses.replace(PLAIN_GRADIENT, clip_norm=limit)
    clipped = Learner(tiny_model, dataclasses.replace(gradient_config, optimizer=optimizer))
    assert clipped.update(rows)["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert_close(moments(clipped), {name: g / 4 for name, g in gradient.items()}, atol=1e-6)


def test_log_probs_come_back_in_the_order_of_their_rows(
    tiny_model: Decoder, rows: list[TokenRow], tiny_learner_config: LearnerConfig, make_row: MakeRow
) -> None:
    learner = Learner(tiny_model, tiny_learner_config)
    untrained = make_row(60, 6, mask=np.zeros(6, np.float32), row_weight=0.0)
    empty = make_row(61, 0)
    mixed = [*rows[:3], untrained, empty, *rows[3:]]
    together = learner.logprobs(mixed)
    assert [len(found) for found in together] == [len(row.ids) for row in mixed]
    for row, found in zip(mixed, together, strict=True):
        if len(row.ids):
            np.testing.assert_allclose(found, learner.logprobs([row])[0], atol=1e-5)
            assert found[0] == 0
            assert (found[1:] < 0).all()


def test_a_state_goes_into_another_learner_and_only_into_one_that_fits(
    tiny_model: Decoder, tiny_config: DecoderConfig, rows: list[TokenRow], tiny_learner_config: LearnerConfig
) -> None:
    first, second = Learner(tiny_model, tiny_learner_config), Learner(tiny_model, tiny_learner_config, version=7)
    first.update(rows)
    second.load_state(first.state())
    assert (second.step, second.version, second.fingerprint()) == (1, 1, first.fingerprint())
    assert first.update(rows) == second.update(rows)
    assert first.fingerprint() == second.fingerprint()
    fields = {name: getattr(tiny_config, name) for name in DecoderConfig.__dataclass_fields__}
    larger = Decoder(DecoderConfig(**(fields | {"num_layers": 3})), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="belongs to another model or optimizer"):
        Learner(larger, tiny_learner_config).load_state(first.state())


def test_a_reference_without_a_kl_term_is_refused(tiny_model: Decoder, tiny_learner_config: LearnerConfig) -> None:
    with pytest.raises(ValueError, match=r"set LearnerConfig\.kl or leave it out"):
        Learner(tiny_model, tiny_learner_config, reference=tiny_model)
