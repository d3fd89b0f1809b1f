"""Learner to engine: hand over the weights, then prove that they arrived.

A sync that silently did nothing lets training go on against a policy that no longer samples. So after every push the
engine samples a few tokens of a probe prompt, and its log-probs must be those of the weights that were pushed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from numpy.typing import NDArray

from palaestra.envs.errors import EngineError
from palaestra.learners.models.decoder import Decoder, packed_attention
from palaestra.rollout.engines.protocol import Engine, SamplingParams


@dataclass(frozen=True, slots=True)
class WeightProbe:
    """What the check asks of the engine, and the model that answers for the learner."""

    model: Decoder
    """Gives the structure; its own parameters are not used."""
    prompt_ids: tuple[int, ...]
    tokens: int = 8
    """Tokens that the engine samples for it."""
    tolerance: float = 1e-3
    """Largest difference of a log-prob, nats. Float32 gives about 1e-5."""


async def push(params: Any, version: int, engine: Engine, probe: WeightProbe) -> float:
    """Give the engine the learner's weights; on return they are what it samples with.

    Returns the largest difference between the engine's and the learner's log-probs over the probe, nats. Raises
    ``EngineError`` when the engine does not report the version, or when its log-probs are not the learner's.
    """
    await engine.update_weights(params, version)
    reported = (await engine.status()).version
    if reported != version:
        raise EngineError(f"weights of version {version} were pushed, and the engine reports version {reported}")
    sampled = await engine.generate(probe.prompt_ids, SamplingParams(max_new_tokens=probe.tokens, seed=version))
    if set(sampled.versions) != {version}:
        seen = sorted(set(sampled.versions))
        raise EngineError(f"weights of version {version} were pushed, and the engine still sampled with {seen}")
    expected = score(probe.model, params, probe.prompt_ids, sampled.ids)
    difference = float(np.abs(expected - np.asarray(sampled.logprobs, np.float32)).max())
    if not difference <= probe.tolerance:
        raise EngineError(
            f"after pushing version {version} the engine's log-probs differ from the learner's by {difference:.3g} "
            f"nats (at most {probe.tolerance:g}): the update did not reach the weights it samples with"
        )
    return difference


def score(model: Decoder, params: Any, prompt_ids: Sequence[int], ids: Sequence[int]) -> NDArray[np.float32]:
    """The learner's log-prob of each of ``ids`` after the prompt, [len(ids)] float32, by one teacher-forced pass."""
    graphdef, _ = nnx.split(model, nnx.Param)
    row = np.asarray([[*prompt_ids, *ids]], np.int32)
    logprobs: Array = _forward(graphdef)(params, row)
    return np.asarray(logprobs)[len(prompt_ids) - 1 :]


@lru_cache(maxsize=8)
def _forward(graphdef: nnx.GraphDef[Decoder]) -> Callable[[Any, NDArray[np.int32]], Array]:
    """Log-probs of ids[0, 1:] under the model, [T-1]; compiled once a length."""

    def logprobs(params: Any, ids_1t: Array) -> Array:
        model = nnx.merge(graphdef, params)
        positions = jnp.arange(ids_1t.shape[1])[None]
        hidden = model.hidden(ids_1t, positions, packed_attention(jnp.zeros_like(ids_1t)))
        scores = jax.nn.log_softmax(model.logits(hidden[:, :-1]))
        return jnp.take_along_axis(scores, ids_1t[:, 1:, None], axis=-1)[0, :, 0]

    return jax.jit(logprobs)
