"""Supervised training on token rows: the warm start before reinforcement, and plain fine-tuning."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from palaestra.envs.errors import UsageError
from palaestra.learners.learner import Learner, Metrics
from palaestra.learners.rows import TokenRow


def train_supervised(
    learner: Learner,
    rows: Sequence[TokenRow],
    *,
    steps: int,
    seed: int,
    on_step: Callable[[int, Metrics], None] = lambda step, metrics: None,
) -> None:
    """``steps`` optimizer steps over the rows, in a new order each epoch that depends only on ``seed``.

    One step takes as many whole rows as fill one chunk of the learner's packing shape, so that every step costs the
    same and compiles once. ``on_step`` gets the step (from 1) and its metrics.
    """
    if not rows:
        raise UsageError("there is nothing to train on: no token rows were given")
    shape = learner.config.shape
    endless = batches(rows, shape.row_tokens * shape.rows_per_chunk, np.random.default_rng(seed))
    for step in range(1, steps + 1):
        on_step(step, learner.supervised_update(next(endless)))


def batches(rows: Sequence[TokenRow], slots: int, rng: np.random.Generator) -> Iterator[list[TokenRow]]:
    """Endless batches of rows whose tokens fill about ``slots``; packing loses a few per cent, which is left free."""
    room = int(slots * 0.93)
    batch: list[TokenRow] = []
    used = 0
    while True:
        for index in rng.permutation(len(rows)):
            row = rows[int(index)]
            if batch and used + len(row.ids) > room:
                yield batch
                batch, used = [], 0
            batch.append(row)
            used += len(row.ids)
