"""What the learner is given: token rows. Ragged lists in; padding is private to ``batching``."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class TokenRow:
    """One trajectory (or one branch of it), token-exact.

    ``mask[t] == 1`` if and only if ``ids[t]`` came out of the sampler (the stop token included); for supervised rows,
    if it is a target. Row fields where mask is 0 are never read: changing them changes nothing.
    """

    ids: NDArray[np.int32]
    """[T] token ids."""
    mask: NDArray[np.float32]
    """[T] 0 or 1."""
    behaviour_logprobs: NDArray[np.float32]
    """[T] log-probability of ids[t] given ids[:t] under the engine, at sampling time; 0 where mask is 0."""
    versions: NDArray[np.int32]
    """[T] weight version that sampled the token; -1 where mask is 0."""
    advantage: float = 0.0
    """Broadcast over the row's sampled tokens."""
    row_weight: float = 1.0
    """0 masks the row out entirely (infrastructure failure)."""

    def __post_init__(self) -> None:
        shapes = {self.ids.shape, self.mask.shape, self.behaviour_logprobs.shape, self.versions.shape}
        if len(shapes) != 1 or self.ids.ndim != 1:
            raise ValueError(f"a token row needs four arrays of one shape [T]; got {sorted(shapes)}")
