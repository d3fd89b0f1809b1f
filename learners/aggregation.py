"""How token losses become one number: a weight for each token and one denominator for the whole batch.

A loss is always sum(weight * token loss) / denominator, where the denominator belongs to the *global* batch (all
chunks, all hosts) and is known before the first backward pass. So the sum can be cut anywhere, and a mean of chunk
means never happens. n_i is the number of sampled tokens of row i, and w_i its row weight:

====================  =============  ======================  ==============================
aggregation           token weight   denominator             used by
====================  =============  ======================  ==============================
token-mean            w_i            sum_i w_i n_i           DAPO, SFT
seq-mean-token-mean   w_i / n_i      sum_i w_i               GRPO, GSPO
seq-mean-token-sum    w_i            sum_i w_i
token-sum-norm        w_i            (sum_i w_i) * L         Dr. GRPO; L a constant length
====================  =============  ======================  ==============================

Rows without a sampled token, or of weight 0, are in none of the sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import jax.numpy as jnp
from jax import Array

Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "token-sum-norm"]
AGGREGATIONS: tuple[Aggregation, ...] = get_args(Aggregation)


def token_weight(aggregation: Aggregation, tokens: int, row_weight: float = 1.0) -> float:
    """What each of a row's ``tokens`` sampled tokens counts."""
    return row_weight / tokens if aggregation == "seq-mean-token-mean" else row_weight


def denominator(
    aggregation: Aggregation,
    tokens: Sequence[int],
    row_weights: Sequence[float],
    *,
    norm_tokens: int | None = None,
) -> float:
    """The batch's denominator, from its rows' sampled tokens and weights; ``norm_tokens`` is L of token-sum-norm."""
    kept = [(n, weight) for n, weight in zip(tokens, row_weights, strict=True) if n > 0 and weight > 0]
    if aggregation == "token-mean":
        return float(sum(n * weight for n, weight in kept))
    rows = float(sum(weight for _, weight in kept))
    if aggregation != "token-sum-norm":
        return rows
    if norm_tokens is None:
        raise ValueError("the aggregation token-sum-norm needs norm_tokens: the constant length to divide by")
    return rows * norm_tokens


def weighted_sum(values: Array, weights: Array) -> Array:
    """Scalar sum(weights * values); what stands where a weight is 0, NaN and infinity included, is not looked at."""
    return jnp.sum(weights * jnp.where(weights != 0, values, 0.0))
