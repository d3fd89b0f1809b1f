from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from palaestra.learners.batching import PackingShape
from palaestra.learners.config import ClippedLossConfig, LearnerConfig, OptimizerConfig


def rates(config: OptimizerConfig, steps: int) -> list[float]:
    return [float(config.rate(step)) for step in range(steps)]


def test_a_constant_rate_warms_up_linearly_and_even_the_first_step_learns() -> None:
    np.testing.assert_allclose(rates(OptimizerConfig(2.0, warmup_steps=4), 6), [0.5, 1, 1.5, 2, 2, 2])
    np.testing.assert_allclose(rates(OptimizerConfig(2.0), 2), [2, 2])


def test_a_cosine_falls_from_the_warm_up_to_its_last_value_and_stays_there() -> None:
    config = OptimizerConfig(1.0, schedule="cosine", warmup_steps=2, total_steps=10, final_fraction=0.2)
    found = rates(config, 13)
    np.testing.assert_allclose(found[:3], [0.5, 1.0, 1.0])
    assert found[6] == pytest.approx(0.6)
    np.testing.assert_allclose(found[10:], [0.2, 0.2, 0.2], rtol=1e-6)
    assert all(a >= b for a, b in itertools.pairwise(found[2:]))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"learning_rate": 0.0}, "learning_rate is 0.0; give a number above 0"),
        ({"schedule": "cosine"}, r"needs total_steps above warmup_steps \(0\); got None"),
        ({"schedule": "linear"}, "'linear'; choose constant or cosine"),
        ({"clip_norm": 0.0}, "clip_norm is 0.0; give a number above 0, or None"),
    ],
)
def test_an_optimizer_that_cannot_be_says_what_to_do(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(**({"learning_rate": 1.0} | fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"aggregation": "mean"}, "unknown aggregation 'mean'; choose one of token-mean"),
        ({"aggregation": "token-sum-norm"}, "needs norm_tokens"),
        ({"temperature": 0.0}, "training needs one above 0"),
        ({"minibatches": 0}, "minibatches is 0; give at least 1"),
        ({"mismatch_cap_absolute": 2.0}, 'set old_logprobs="recomputed"'),
        ({"old_logprobs": "engine"}, "unknown old_logprobs 'engine'"),
    ],
)
def test_a_learner_that_cannot_be_says_what_to_do(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LearnerConfig(OptimizerConfig(1.0), PackingShape(8, 1), **fields)


def test_clip_bounds_that_cannot_be_say_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"give clip_low_delta in 0\.\.1"):
        ClippedLossConfig(clip_low_delta=1.2)
    with pytest.raises(ValueError, match="give a ratio above 1"):
        ClippedLossConfig(dual_clip_absolute=0.5)
