"""The token-exact record of one episode."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from palaestra.learners.rows import TokenRow
from palaestra.rollout.engines.protocol import Generation


@dataclass(slots=True)
class Trajectory:
    """Ids are only ever appended: what is trained on is exactly what was sampled.

    ``mask[t] == 1`` if and only if ``ids[t]`` came out of the sampler, the stop token included.
    """

    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def append_given(self, ids: list[int]) -> None:
        """Append tokens that the environment or the template produced."""
        self.ids += ids
        self.mask += [0] * len(ids)
        self.logprobs += [0.0] * len(ids)
        self.versions += [-1] * len(ids)

    def append_sampled(self, generation: Generation) -> None:
        """Append what the engine sampled."""
        self.ids += generation.ids
        self.mask += [1] * len(generation.ids)
        self.logprobs += generation.logprobs
        self.versions += generation.versions

    @property
    def sampled_tokens(self) -> int:
        return sum(self.mask)

    def row(self, *, advantage: float = 0.0, row_weight: float = 1.0) -> TokenRow:
        """The learner's view of it."""
        return TokenRow(
            ids=np.asarray(self.ids, np.int32),
            mask=np.asarray(self.mask, np.float32),
            behaviour_logprobs=np.asarray(self.logprobs, np.float32),
            versions=np.asarray(self.versions, np.int32),
            advantage=advantage,
            row_weight=row_weight,
        )
