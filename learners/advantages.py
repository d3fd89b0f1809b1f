"""Advantages from the rewards of groups: pure functions on arrays, no model, no configuration.

Shapes: ``rewards`` [N, G] (N groups of G episodes of one task), ``valid`` [N, G] bool. An episode that is not valid
(its infrastructure failed) is in no mean, no deviation and no count, may hold any reward, NaN included, and gets
advantage 0. Results are float64 [N, G]. A group whose valid rewards are all equal, by ``max == min`` and not by a
deviation that rounding may keep from 0, gets exactly 0 from every group-relative estimator; so does a group with a
single valid episode, which has nothing to be compared with (verl keeps the raw reward there).
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

GRPO_EPSILON = 1e-6
"""Added to the standard deviation, as TRL, verl and Tunix do."""


def rloo(rewards: ArrayLike, valid: ArrayLike | None = None) -> Floats:
    """REINFORCE leave-one-out: R_i minus the mean reward of the others (Kool et al., 2019; Ahmadian et al., 2024).

    >>> rloo([[1.0, 3.0, 2.0, float("nan")]], [[True, True, True, False]])
    array([[-1.5,  1.5,  0. ,  0. ]])
    """
    rewards_ng, valid_ng = _checked(rewards, valid)
    count_n1 = valid_ng.sum(axis=1, keepdims=True)
    centred_ng = _centred(rewards_ng, valid_ng)
    return np.asarray(centred_ng * count_n1 / np.maximum(count_n1 - 1, 1))


def grpo(rewards: ArrayLike, valid: ArrayLike | None = None, *, ddof: int = 1) -> Floats:
    """(R_i - mean) / (std + 1e-6) (DeepSeekMath, Shao et al., 2024).

    ``ddof=1`` (sample deviation, ``torch.std``'s default, as in TRL, verl and Tunix); 0 is the population deviation.
    """
    if ddof not in (0, 1):
        raise ValueError(f"ddof is {ddof}; give 1 (sample deviation, the peers' choice) or 0 (population deviation)")
    rewards_ng, valid_ng = _checked(rewards, valid)
    centred_ng = _centred(rewards_ng, valid_ng)
    degrees_n1 = np.maximum(valid_ng.sum(axis=1, keepdims=True) - ddof, 1)
    std_n1 = np.sqrt((centred_ng**2).sum(axis=1, keepdims=True) / degrees_n1)
    return np.asarray(centred_ng / (std_n1 + GRPO_EPSILON))


def dr_grpo(rewards: ArrayLike, valid: ArrayLike | None = None) -> Floats:
    """R_i - mean, without the division that favours easy and hard tasks (Liu et al., 2025).

    Its loss sums tokens and divides by a constant: pair it with the aggregation ``token-sum-norm``.
    """
    return _centred(*_checked(rewards, valid))


def reinforce(
    rewards: ArrayLike, valid: ArrayLike | None = None, *, baseline: float | Literal["batch_mean"] = 0.0
) -> Floats:
    """R_i - baseline (Williams, 1992): a number such as a running mean, or the mean of all valid rewards here."""
    rewards_ng, valid_ng = _checked(rewards, valid)
    if baseline == "batch_mean":
        if zero_variance(rewards_ng.reshape(1, -1), valid_ng.reshape(1, -1))[0]:
            return np.zeros_like(rewards_ng)
        baseline = float(rewards_ng.sum()) / max(int(valid_ng.sum()), 1)
    return np.where(valid_ng, rewards_ng - baseline, 0.0)


def zero_variance(rewards: ArrayLike, valid: ArrayLike | None = None) -> Bools:
    """[N] bool: groups that teach nothing, because their valid rewards are all equal (or none or one is valid)."""
    rewards_ng, valid_ng = _checked(rewards, valid)
    highest = np.where(valid_ng, rewards_ng, -np.inf).max(axis=1, initial=-np.inf)
    lowest = np.where(valid_ng, rewards_ng, np.inf).min(axis=1, initial=np.inf)
    return np.asarray(highest <= lowest)


def _centred(rewards_ng: Floats, valid_ng: Bools) -> Floats:
    count_n1 = np.maximum(valid_ng.sum(axis=1, keepdims=True), 1)
    mean_n1 = rewards_ng.sum(axis=1, keepdims=True) / count_n1
    keep_ng = valid_ng & ~zero_variance(rewards_ng, valid_ng)[:, None]
    return np.where(keep_ng, rewards_ng - mean_n1, 0.0)


def _checked(rewards: Any, valid: Any) -> tuple[Floats, Bools]:
    """Rewards as float64 with 0 where invalid, and the mask; errors name the offending place."""
    rewards_ng = np.asarray(rewards, np.float64)
    if rewards_ng.ndim != 2:
        raise ValueError(f"rewards have shape {rewards_ng.shape}; give [groups, episodes of a group]")
    valid_ng = np.ones(rewards_ng.shape, bool) if valid is None else np.asarray(valid, bool)
    if valid_ng.shape != rewards_ng.shape:
        raise ValueError(f"valid has shape {valid_ng.shape}, rewards {rewards_ng.shape}; give one flag a reward")
    rewards_ng = np.where(valid_ng, rewards_ng, 0.0)
    if not np.isfinite(rewards_ng).all():
        group, episode = np.argwhere(~np.isfinite(rewards_ng))[0]
        raise ValueError(
            f"the reward of episode {episode} in group {group} is {rewards_ng[group, episode]} but it is marked valid; "
            "an episode without a reward is masked out (valid=False), never scored"
        )
    return rewards_ng, valid_ng
