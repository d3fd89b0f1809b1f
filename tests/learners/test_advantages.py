from __future__ import annotations

import doctest
from typing import Any

import numpy as np
import pytest

from palaestra.learners import advantages
from palaestra.learners.advantages import dr_grpo, grpo, reinforce, rloo, zero_variance

ESTIMATORS = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo}
NAN = float("nan")


def test_the_example_in_the_documentation_is_true() -> None:
    assert doctest.testmod(advantages) == (0, 1)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_advantages_equal_those_of_trl_and_verl(name: str, golden: dict[str, Any]) -> None:
    expected = golden["group_advantages"]
    np.testing.assert_allclose(ESTIMATORS[name](expected["rewards"]), expected[name], atol=1e-7)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_masked_episode_is_out_of_the_baseline_and_gets_nothing(name: str) -> None:
    with_masked = ESTIMATORS[name]([[1, 3, 2, NAN]], [[True, True, True, False]])
    np.testing.assert_array_equal(with_masked[:, :3], ESTIMATORS[name]([[1, 3, 2]]))
    assert with_masked[0, 3] == 0


def test_leave_one_out_compares_each_with_the_mean_of_the_others() -> None:
    rewards = np.random.default_rng(0).random((3, 5))
    others = (rewards.sum(axis=1, keepdims=True) - rewards) / 4
    np.testing.assert_allclose(rloo(rewards), rewards - others, rtol=1e-12)


def test_grpo_divides_by_the_sample_deviation_unless_told_otherwise() -> None:
    rewards = np.array([[1.0, 3.0, 2.0, 6.0]])
    for ddof, std in ((1, rewards.std(ddof=1)), (0, rewards.std(ddof=0))):
        np.testing.assert_allclose(grpo(rewards, ddof=ddof), (rewards - 3) / (std + 1e-6), rtol=1e-12)
    with pytest.raises(ValueError, match="ddof is 2"):
        grpo(rewards, ddof=2)


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 0.95, 1 / 3])
def test_a_group_of_equal_rewards_gets_exactly_zero(name: str, reward: float) -> None:
    found = ESTIMATORS[name](np.full((1, 7), reward))
    assert (found == 0).all()


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_nearly_constant_group_stays_finite_and_bounded(name: str) -> None:
    found = ESTIMATORS[name]([[0.0] + [0.95] * 7])
    assert np.isfinite(found).all()
    assert np.abs(found).max() < 3


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_group_with_one_or_no_valid_episode_gets_zero(name: str) -> None:
    valid = [[True, False, False], [False, False, False]]
    assert (ESTIMATORS[name]([[5.0, NAN, NAN], [NAN, NAN, NAN]], valid) == 0).all()


def test_zero_variance_looks_at_valid_rewards_and_not_at_their_mean() -> None:
    rewards = [[0.3, 0.3, 0.3], [0.0, 1.0, 0.5], [0.3, 0.3, 9.0], [NAN, NAN, NAN]]
    valid = [[True] * 3, [True] * 3, [True, True, False], [False] * 3]
    assert zero_variance(rewards, valid).tolist() == [True, False, True, True]


def test_reinforce_subtracts_a_number_or_the_batch_mean_of_valid_rewards() -> None:
    rewards, valid = [[1.0, 0.0], [NAN, 0.5]], [[True, True], [False, True]]
    np.testing.assert_allclose(reinforce(rewards, valid), [[1, 0], [0, 0.5]])
    np.testing.assert_allclose(reinforce(rewards, valid, baseline=0.25), [[0.75, -0.25], [0, 0.25]])
    np.testing.assert_allclose(reinforce(rewards, valid, baseline="batch_mean"), [[0.5, -0.5], [0, 0]])
    assert (reinforce(np.full((2, 3), 0.1), baseline="batch_mean") == 0).all()


def test_a_reward_that_is_not_finite_but_marked_valid_is_refused_by_its_place() -> None:
    with pytest.raises(ValueError, match="episode 1 in group 2 is nan"):
        rloo([[0, 0], [0, 0], [0, NAN]])
    with pytest.raises(ValueError, match="give \\[groups, episodes of a group\\]"):
        rloo([1.0, 2.0])
    with pytest.raises(ValueError, match="one flag a reward"):
        rloo([[1.0, 2.0]], [[True]])
