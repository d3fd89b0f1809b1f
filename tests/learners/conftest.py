"""Small real parts that the learner tests share."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from palaestra.learners.batching import PackingShape
from palaestra.learners.config import LearnerConfig, OptimizerConfig
from palaestra.learners.models.config import DecoderConfig
from palaestra.learners.models.decoder import Decoder
from palaestra.learners.rows import TokenRow

MakeRow = Callable[..., TokenRow]


@pytest.fixture(scope="session")
def golden() -> dict[str, Any]:
    """Arrays drawn once with torch, and what TRL and verl make of them."""
    return json.loads((Path(__file__).parent / "fixtures" / "golden.json").read_text())


@pytest.fixture
def x64() -> Iterator[None]:
    """Float64 for one test."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.fixture(scope="session")
def tiny_config() -> DecoderConfig:
    return DecoderConfig(
        vocab_size=23,
        hidden_size=8,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=4,
        intermediate_size=12,
        suppressed_ids=(0,),
        zero_output_projections=False,
        embedding_init_std=0.5,
    )


@pytest.fixture
def tiny_model(tiny_config: DecoderConfig) -> Decoder:
    return Decoder(tiny_config, rngs=nnx.Rngs(0))


@pytest.fixture
def tiny_learner_config() -> LearnerConfig:
    return LearnerConfig(OptimizerConfig(1e-2), PackingShape(row_tokens=16, rows_per_chunk=2))


@pytest.fixture
def make_row() -> MakeRow:
    """A row of a given length, otherwise drawn from a seed: ids 1..22, two given tokens first, about half sampled."""

    def make(seed: int, length: int = 9, **changes: Any) -> TokenRow:
        rng = np.random.default_rng(seed)
        mask = (rng.random(length) < 0.5).astype(np.float32)
        mask[:2] = 0
        mask[2:3] = 1
        values: dict[str, Any] = {
            "ids": rng.integers(1, 23, length).astype(np.int32),
            "mask": mask,
            "behaviour_logprobs": np.where(mask > 0, -rng.random(length) * 3, 0).astype(np.float32),
            "versions": np.where(mask > 0, 0, -1).astype(np.int32),
            "advantage": float(rng.normal()),
        }
        return TokenRow(**(values | changes))

    return make
