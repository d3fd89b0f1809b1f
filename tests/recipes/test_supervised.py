"""Supervised training: every row once an epoch, batches that fill a chunk, and a loss that falls."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from flax import nnx

from palaestra.envs.errors import UsageError
from palaestra.learners.batching import PackingShape
from palaestra.learners.config import LearnerConfig, OptimizerConfig
from palaestra.learners.learner import Learner
from palaestra.learners.models.config import DecoderConfig
from palaestra.learners.models.decoder import Decoder
from palaestra.learners.rows import TokenRow
from palaestra.recipes.supervised import batches, train_supervised


def row(first: int, length: int) -> TokenRow:
    mask = np.ones(length, np.float32)
    mask[0] = 0
    zeros = np.zeros(length, np.float32)
    return TokenRow(np.arange(first, first + length, dtype=np.int32) % 16, mask, zeros, np.zeros(length, np.int32))


def tiny_learner(shape: PackingShape) -> Learner:
    config = DecoderConfig(
        vocab_size=16,
        hidden_size=16,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        intermediate_size=16,
    )
    return Learner(Decoder(config, nnx.Rngs(0)), LearnerConfig(OptimizerConfig(0.02), shape))


def test_an_epoch_holds_every_row_once_and_the_next_one_in_another_order() -> None:
    rows = [row(i, 5) for i in range(10)]
    drawn = [int(r.ids[0]) for batch in islice(batches(rows, 40, np.random.default_rng(0)), 20) for r in batch]
    first, second = drawn[:10], drawn[10:20]
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second


def test_a_batch_stays_within_its_slots_unless_one_row_alone_is_longer() -> None:
    rows = [row(i, 3 + i) for i in range(12)]
    for batch in islice(batches(rows, 30, np.random.default_rng(1)), 50):
        assert sum(len(r.ids) for r in batch) <= 30


async def test_the_loss_falls_on_a_sequence_that_can_be_learned() -> None:
    losses: list[float] = []
    learner = tiny_learner(PackingShape(row_tokens=16, rows_per_chunk=4))
    rows = [row(i, 8) for i in range(16)]
    await train_supervised(
        learner,
        rows,
        steps=60,
        tokens_per_step=60,
        seed=0,
        on_step=lambda step, metrics: losses.append(metrics["loss"]),
    )
    assert len(losses) == learner.step == 60
    assert losses[-1] < 0.2 < losses[0]


async def test_nothing_to_train_on_is_an_error() -> None:
    with pytest.raises(UsageError, match="nothing to train on"):
        await train_supervised(
            tiny_learner(PackingShape(row_tokens=16, rows_per_chunk=4)), [], steps=1, tokens_per_step=60, seed=0
        )
