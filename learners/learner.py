"""The learner: a decoder's weights, an optimizer, and the ways to change them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax import Array
from numpy.typing import NDArray

from palaestra.learners import programs
from palaestra.learners.batching import PackedBatch, PackedChunk, pack
from palaestra.learners.config import LearnerConfig
from palaestra.learners.models.decoder import Decoder
from palaestra.learners.models.parameters import Params, copy_tree, fingerprint, named_leaves
from palaestra.learners.objectives import ChunkSums
from palaestra.learners.rows import TokenRow

Metrics = dict[str, float]
"""See :meth:`Learner.update` for the keys."""


class LearnerState(NamedTuple):
    """Everything that an update changes. ``params`` and ``optimizer`` are pytrees of arrays."""

    params: Params
    optimizer: Any
    step: int
    version: int


class _StepReport(NamedTuple):
    sums: ChunkSums
    gradient_norm: float
    learning_rate: float
    tokens: int


class Learner:
    """Holds a decoder's weights and improves them, one batch of token rows at a time.

    * A batch is one whole: its chunks add up to one gradient under the batch's own denominator, so that the result does
      not depend on how rows are ordered, packed or cut, up to float32 rounding.
    * ``step`` counts optimizer steps and drives the learning rate; ``version`` counts versions of the weights, one an
      update.
    * After the first update nothing is compiled again, whatever the lengths of the rows.
    * A batch without a trained token changes nothing; neither does a gradient that is not finite.

    Not for concurrent use: one caller at a time.
    """

    def __init__(
        self, model: Decoder, config: LearnerConfig, *, reference: Decoder | None = None, version: int = 0
    ) -> None:
        """Copies the model's weights. ``reference`` is the frozen model of ``config.kl``; by default the weights as
        they are now."""
        if reference is not None and config.kl is None:
            raise ValueError("a reference model is used only by a KL term; set LearnerConfig.kl or leave it out")
        self.config = config
        self._spec = model.config
        params = copy_tree(nnx.state(model, nnx.Param))
        self._state = LearnerState(params, programs.fresh_optimizer(config.optimizer, params), 0, version)
        self._reference: Params = None
        if config.kl is not None:
            self._reference = copy_tree(nnx.state(model if reference is None else reference, nnx.Param))

    @property
    def step(self) -> int:
        """Optimizer steps so far."""
        return self._state.step

    @property
    def version(self) -> int:
        """Version of the weights; what an engine is told with them."""
        return self._state.version

    def update(self, rows: Sequence[TokenRow]) -> Metrics:
        """One policy-gradient update: ``config.minibatches`` optimizer steps (one by default), version + 1.

        Returns, as means over trained tokens where nothing else is said:

        * ``loss``, what was minimised; ``entropy`` in nats; ``reference_kl`` where ``config.kl`` is set
        * ``k3``, KL(behaviour || current) before the first optimizer step: near 0 where the sampler had these weights
        * ``clip_fraction``, the share of tokens whose gradient the clip took away
        * ``grad_norm`` before clipping and ``learning_rate``, both of the last optimizer step
        * ``tokens``, ``rows``, ``empty_rows`` (no sampled token, or row_weight 0), ``fill`` (share of packed slots in
          use), ``optimizer_steps`` (0 where there was nothing to train on), ``step``, ``version``

        Raises ``ValueError`` for a malformed row (see ``batching.pack``), and ``FloatingPointError`` for a loss or
        gradient that is not finite, whose optimizer step is not taken; minibatches before it were, under a new version.
        """
        batches = [self._pack(rows[i :: self.config.minibatches]) for i in range(self.config.minibatches)]
        extras = [
            [(self._old_logprobs(chunk), self._reference_logprobs(chunk)) for chunk in batch.chunks]
            for batch in batches
        ]
        reports: list[_StepReport] = []
        try:
            for batch, extra in zip(batches, extras, strict=True):
                if batch.tokens:
                    reports.append(self._optimizer_step(batch, programs.add_policy_gradient, extra))
        except FloatingPointError:
            if reports:  # the weights are no longer those of the version, so no engine may be taken to have them
                self._state = self._state._replace(version=self._state.version + 1)
            raise
        return self._finish(batches, reports)

    def supervised_update(self, rows: Sequence[TokenRow]) -> Metrics:
        """One optimizer step on the cross-entropy of the masked tokens, version + 1. Metrics and errors as in
        :meth:`update`; ``k3`` and ``clip_fraction`` mean nothing here and are left out."""
        batch = self._pack(rows)
        nothing: list[tuple[Any, ...]] = [()] * len(batch.chunks)
        reports = [self._optimizer_step(batch, programs.add_supervised_gradient, nothing)] if batch.tokens else []
        metrics = self._finish([batch], reports)
        return {name: value for name, value in metrics.items() if name not in ("k3", "clip_fraction")}

    def logprobs(self, rows: Sequence[TokenRow]) -> list[NDArray[np.float32]]:
        """For each row, [T] log-probs of its tokens under the current weights, masked or not; 0 at the first token."""
        self._check_ids(rows)
        batch = pack(rows, self.config.shape, keep_empty=True)
        found = [np.asarray(self._chunk_logprobs(self._state.params, chunk)) for chunk in batch.chunks]
        result = [np.zeros(len(row.ids), np.float32) for row in rows]
        for place in batch.places:
            result[place.source][:] = found[place.chunk][place.row, place.start : place.start + place.length]
            result[place.source][0] = 0.0
        return result

    def params(self) -> Params:
        """A copy of the weights (``nnx.State``), for an engine: later updates leave it alone."""
        return copy_tree(self._state.params)

    def model(self) -> Decoder:
        """A decoder with a copy of the weights."""
        return programs.assemble(self._spec, self.params())

    def fingerprint(self) -> str:
        """Of the exact weights; see ``models.parameters.fingerprint``."""
        return fingerprint(self._state.params)

    def state(self) -> LearnerState:
        """A copy of everything that updates change."""
        params, optimizer = copy_tree((self._state.params, self._state.optimizer))
        return LearnerState(params, optimizer, self._state.step, self._state.version)

    def load_state(self, state: LearnerState) -> None:
        """Go on from a state, bit for bit. Raises ``ValueError`` where it belongs to another model or optimizer."""
        ours, theirs = ((s.params, s.optimizer) for s in (self._state, state))
        if _signature(ours) != _signature(theirs):
            raise ValueError(
                "the state belongs to another model or optimizer; build the learner with the configuration it was "
                "saved with"
            )
        params, optimizer = copy_tree(theirs)
        self._state = LearnerState(params, optimizer, state.step, state.version)

    def _check_ids(self, rows: Sequence[TokenRow]) -> None:
        """Under jit an id outside the vocabulary is not seen: it would be clamped, or train on nothing."""
        vocabulary = self._spec.vocab_size
        for index, row in enumerate(rows):
            outside = row.ids[(row.ids < 0) | (row.ids >= vocabulary)]
            if outside.size:
                raise ValueError(
                    f"row {index} has token id {outside[0]}, outside the model's vocabulary 0..{vocabulary - 1}; "
                    "check that tokenizer and model belong together"
                )

    def _pack(self, rows: Sequence[TokenRow]) -> PackedBatch:
        self._check_ids(rows)
        config = self.config
        return pack(rows, config.shape, aggregation=config.aggregation, norm_tokens=config.norm_tokens)

    def _old_logprobs(self, chunk: PackedChunk) -> Any:
        if self.config.old_logprobs == "behaviour":
            return chunk.behaviour_logprobs
        return self._chunk_logprobs(self._state.params, chunk)

    def _reference_logprobs(self, chunk: PackedChunk) -> Any:
        """Without a KL term nothing reads them, and the behaviour log-probs stand in."""
        if self._reference is None:
            return chunk.behaviour_logprobs
        return self._chunk_logprobs(self._reference, chunk)

    def _chunk_logprobs(self, params: Params, chunk: PackedChunk) -> Array:
        config = self.config
        logprobs: Array = programs.chunk_logprobs(
            self._spec,
            params,
            chunk,
            temperature=config.temperature,
            logit_chunk_tokens=config.logit_chunk_tokens,
        )
        return logprobs

    def _optimizer_step(
        self,
        batch: PackedBatch,
        add_gradient: Callable[..., tuple[Params, ChunkSums]],
        extras: Sequence[tuple[Any, ...]],
    ) -> _StepReport:
        state = self._state
        gradient, sums = programs.fresh_accumulators(state.params)
        denominator = np.float32(batch.denominator)
        for chunk, extra in zip(batch.chunks, extras, strict=True):
            gradient, sums = add_gradient(
                self._spec, self.config, state.params, gradient, sums, chunk, denominator, *extra
            )
        sums, norm = jax.device_get((sums, programs.gradient_norm(gradient)))
        if not (math.isfinite(norm) and math.isfinite(sums.loss)):
            raise FloatingPointError(
                f"loss ({float(sums.loss)}) or gradient norm ({float(norm)}) of optimizer step {state.step} is not "
                "finite; the step was not taken. Look at the log-probs and advantages, or lower the learning rate"
            )
        rate = float(self.config.optimizer.rate(state.step))
        params, optimizer = programs.apply_gradient(self.config.optimizer, state.params, state.optimizer, gradient)
        self._state = LearnerState(params, optimizer, state.step + 1, state.version)
        return _StepReport(sums, float(norm), rate, batch.tokens)

    def _finish(self, batches: Sequence[PackedBatch], reports: Sequence[_StepReport]) -> Metrics:
        if reports:
            self._state = self._state._replace(version=self._state.version + 1)
        tokens = sum(report.tokens for report in reports)

        def token_mean(name: str) -> float:
            return sum(float(getattr(report.sums, name)) for report in reports) / max(tokens, 1)

        rows = sum(len(batch.places) + batch.empty_rows for batch in batches)
        metrics = {
            "loss": sum(float(report.sums.loss) for report in reports) / max(len(reports), 1),
            "entropy": token_mean("entropy"),
            "k3": float(reports[0].sums.k3) / reports[0].tokens if reports else 0.0,
            "clip_fraction": token_mean("clipped"),
            "grad_norm": reports[-1].gradient_norm if reports else 0.0,
            "learning_rate": reports[-1].learning_rate if reports else 0.0,
            "tokens": float(tokens),
            "rows": float(rows),
            "empty_rows": float(sum(batch.empty_rows for batch in batches)),
            "fill": float(np.mean([batch.fill for batch in batches])),
            "optimizer_steps": float(len(reports)),
            "step": float(self.step),
            "version": float(self.version),
        }
        if self.config.kl is not None:
            metrics["reference_kl"] = token_mean("reference_kl")
        return metrics


def _signature(tree: Any) -> dict[str, tuple[Any, Any]]:
    return {name: (leaf.shape, leaf.dtype) for name, leaf in named_leaves(tree).items()}
