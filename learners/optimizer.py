"""AdamW behind a global-norm clip, from its configuration."""

from __future__ import annotations

import jax
import optax

from palaestra.learners.config import OptimizerConfig
from palaestra.learners.models.parameters import Params


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """AdamW (Loshchilov and Hutter, 2019) with the configured schedule; weight decay on matrices only."""
    adamw = optax.adamw(
        config.rate,
        b1=config.b1,
        b2=config.b2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        mask=_is_matrix,
    )
    if config.clip_norm is None:
        return adamw
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), adamw)


def _is_matrix(params: Params) -> Params:
    return jax.tree.map(lambda leaf: leaf.ndim >= 2, params)
