"""How to learn: typed configurations, whose names say absolute or delta."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from palaestra.learners.aggregation import AGGREGATIONS, Aggregation
from palaestra.learners.batching import PackingShape
from palaestra.learners.losses import KlKind


@dataclass(frozen=True, slots=True)
class ClippedLossConfig:
    """PPO's clip; the defaults are DAPO's clip-higher."""

    clip_low_delta: float = 0.2
    clip_high_delta: float = 0.28
    dual_clip_absolute: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.clip_low_delta <= 1 or self.clip_high_delta < 0:
            raise ValueError(
                f"the clip keeps a ratio in [1 - {self.clip_low_delta}, 1 + {self.clip_high_delta}]; "
                "give clip_low_delta in 0..1 and clip_high_delta of at least 0"
            )
        if self.dual_clip_absolute is not None and self.dual_clip_absolute <= 1:
            raise ValueError(f"dual_clip_absolute is {self.dual_clip_absolute}; give a ratio above 1 (3 is common)")


@dataclass(frozen=True, slots=True)
class GspoLossConfig:
    """GSPO; pair it with the aggregation ``seq-mean-token-mean``."""

    clip_low_delta: float = 3e-4
    clip_high_delta: float = 4e-4


@dataclass(frozen=True, slots=True)
class CispoLossConfig:
    """CISPO; both bounds are ratios."""

    ratio_low_absolute: float = 0.0
    ratio_high_absolute: float = 5.0


PolicyLossConfig: TypeAlias = ClippedLossConfig | GspoLossConfig | CispoLossConfig


@dataclass(frozen=True, slots=True)
class KlConfig:
    """Keeps the policy near a reference model: adds ``coefficient * estimate of KL(current || reference)``."""

    coefficient: float
    kind: KlKind = "k3"


@dataclass(frozen=True, slots=True)
class OptimizerConfig:
    """AdamW behind a global-norm clip, its learning rate a function of the optimizer step alone."""

    learning_rate: float
    schedule: Literal["constant", "cosine"] = "constant"
    warmup_steps: int = 0
    """Linear: step s has (s + 1) / warmup_steps of the rate, so that even the first step learns."""
    total_steps: int | None = None
    """Where the cosine ends, warm-up included; it stays at its last value afterwards."""
    final_fraction: float = 0.0
    """The cosine's last value, as a share of ``learning_rate``."""
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    """Decoupled, on matrices only: norms and biases are not decayed."""
    clip_norm: float | None = 1.0

    def __post_init__(self) -> None:
        if not self.learning_rate > 0:
            raise ValueError(f"OptimizerConfig.learning_rate is {self.learning_rate}; give a number above 0")
        if self.schedule == "cosine" and (self.total_steps is None or self.total_steps <= self.warmup_steps):
            raise ValueError(
                f"a cosine schedule needs total_steps above warmup_steps ({self.warmup_steps}); got {self.total_steps}"
            )
        if self.schedule not in ("constant", "cosine"):
            raise ValueError(f"OptimizerConfig.schedule is {self.schedule!r}; choose constant or cosine")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"OptimizerConfig.clip_norm is {self.clip_norm}; give a number above 0, or None for none")

    def rate(self, step: ArrayLike) -> Array:
        """The learning rate of an optimizer step, counted from 0."""
        warm = jnp.minimum(1.0, (jnp.asarray(step) + 1) / max(self.warmup_steps, 1))
        if self.schedule == "constant":
            return self.learning_rate * warm
        span = (self.total_steps or 0) - self.warmup_steps
        progress = jnp.clip((jnp.asarray(step) - self.warmup_steps) / span, 0.0, 1.0)
        cosine = self.final_fraction + (1 - self.final_fraction) * 0.5 * (1 + jnp.cos(jnp.pi * progress))
        return self.learning_rate * warm * cosine


@dataclass(frozen=True, slots=True)
class LearnerConfig:
    """Everything a :class:`~palaestra.learners.learner.Learner` needs beside the model."""

    optimizer: OptimizerConfig
    shape: PackingShape
    """The one shape of packed arrays. On a CPU about 1,000 slots a chunk are fastest: more leave the caches."""
    loss: PolicyLossConfig = field(default_factory=ClippedLossConfig)
    aggregation: Aggregation = "token-mean"
    norm_tokens: int | None = None
    """The constant length that ``token-sum-norm`` divides by."""
    entropy_coefficient: float = 0.0
    """The bonus ``coefficient * mean entropy`` is subtracted from the policy loss."""
    kl: KlConfig | None = None
    temperature: float = 1.0
    """The sampler's temperature: log-probs are those of log_softmax(logits / temperature)."""
    minibatches: int = 1
    """Optimizer steps per update."""
    old_logprobs: Literal["behaviour", "recomputed"] = "behaviour"
    """``behaviour`` takes the engine's log-probs as the old ones, exact when the engine computes what the learner does;
    ``recomputed`` has the learner compute them before the first optimizer step of an update."""
    mismatch_cap_absolute: float | None = None
    """With recomputed old log-probs: weigh each token by min(exp(old - behaviour), cap), as 2.0."""
    logit_chunk_tokens: int = 512
    """Tokens whose logits exist at one time."""

    def __post_init__(self) -> None:
        if self.aggregation not in AGGREGATIONS:
            raise ValueError(f"unknown aggregation {self.aggregation!r}; choose one of {', '.join(AGGREGATIONS)}")
        if self.aggregation == "token-sum-norm" and self.norm_tokens is None:
            raise ValueError("the aggregation token-sum-norm needs norm_tokens: the constant length to divide by")
        if self.old_logprobs not in ("behaviour", "recomputed"):
            raise ValueError(f"unknown old_logprobs {self.old_logprobs!r}; choose behaviour or recomputed")
        if not self.temperature > 0:
            raise ValueError(f"temperature is {self.temperature}; training needs one above 0 (0 is for evaluation)")
        for name in ("minibatches", "logit_chunk_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"LearnerConfig.{name} is {getattr(self, name)}; give at least 1")
        if self.mismatch_cap_absolute is not None and self.old_logprobs != "recomputed":
            raise ValueError(
                "mismatch_cap_absolute compares old with behaviour log-probs, which are the same here; "
                'set old_logprobs="recomputed" or leave the cap out'
            )
