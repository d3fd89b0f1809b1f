"""What an inference engine promises: token ids in, token ids and behaviour log-probs out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample. Temperature 0 is greedy and for evaluation only (its log-probs are those at temperature 1)."""

    max_new_tokens: int
    temperature: float = 1.0
    stop_ids: tuple[int, ...] = ()
    """Ids that end the generation; the stop id itself is part of the output."""
    seed: int = 0
    """The same prompt, weights, parameters and seed give the same ids, whatever else is in the batch."""


@dataclass(frozen=True, slots=True)
class Generation:
    """One completion. All three sequences have the same length, one entry a sampled token."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Behaviour log-prob: log_softmax(logits / temperature)[id], before any filter."""
    versions: tuple[int, ...]
    """The weight version each token was sampled with."""
    finish_reason: FinishReason


class Engine(Protocol):
    """An engine. ``generate`` may be called many times at once; the engine batches."""

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingParams) -> Generation:
        """Continue the prompt. A prompt that leaves no room for one token, or an id outside the vocabulary, is a
        ``UsageError``; a failure of the engine is an ``EngineError``."""

    async def update_weights(self, params: Any, version: int) -> None:
        """Take new weights; on return every later token is sampled with them and no stale cache is left."""

    async def status(self) -> EngineStatus: ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class EngineStatus:
    version: int
    running: int
    waiting: int
    tokens_sampled: int
    busy_s: float
    """Seconds in which the engine was computing."""
