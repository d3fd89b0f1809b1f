"""Supervised training on token rows: the warm start before reinforcement, and plain fine-tuning."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from palaestra.envs.errors import UsageError
from palaestra.learners.learner import Learner, Metrics
from palaestra.learners.rows import TokenRow


async def train_supervised(
    learner: Learner,
    rows: Sequence[TokenRow],
    *,
    steps: int,
    tokens_per_step: int,
    seed: int,
    on_step: Callable[[int, Metrics], None] = lambda step, metrics: None,
) -> None:
    """``steps`` optimizer steps over the rows, in a new order each epoch that depends only on ``seed``.

    One step takes as many whole rows as ``tokens_per_step`` holds (context tokens count too); a multiple of the slots
    of the learner's chunk, less a few per cent that packing loses, wastes least. ``on_step`` gets the step (from 1) and
    its metrics.
    """
    if not rows:
        raise UsageError("there is nothing to train on: no token rows were given")
    endless = batches(rows, tokens_per_step, np.random.default_rng(seed))
    for step in range(1, steps + 1):
        on_step(step, learner.supervised_update(next(endless)))
        await asyncio.sleep(0)  # an interrupt is taken between two steps


def batches(rows: Sequence[TokenRow], tokens: int, rng: np.random.Generator) -> Iterator[list[TokenRow]]:
    """Endless batches of whole rows, each of at most ``tokens`` tokens (a longer row is a batch of its own)."""
    batch: list[TokenRow] = []
    used = 0
    while True:
        for index in rng.permutation(len(rows)):
            row = rows[int(index)]
            if batch and used + len(row.ids) > tokens:
                yield batch
                batch, used = [], 0
            batch.append(row)
            used += len(row.ids)
