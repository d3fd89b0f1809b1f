from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from flax import nnx

from palaestra.learners.checkpoints import DIGESTS_FILE, CheckpointError, Checkpoints
from palaestra.learners.config import LearnerConfig, OptimizerConfig
from palaestra.learners.learner import Learner
from palaestra.learners.models.decoder import Decoder
from palaestra.learners.models.parameters import fingerprint
from palaestra.learners.rows import TokenRow

MakeRow = Callable[..., TokenRow]


@pytest.fixture
def config(tiny_learner_config: LearnerConfig) -> LearnerConfig:
    """A schedule that moves, so that a step counted twice or lost would show."""
    optimizer = OptimizerConfig(1e-2, schedule="cosine", warmup_steps=2, total_steps=9, weight_decay=0.1)
    return dataclasses.replace(tiny_learner_config, optimizer=optimizer)


@pytest.fixture
def batches(make_row: MakeRow) -> list[list[TokenRow]]:
    return [[make_row(10 * batch + i, 5 + i) for i in range(4)] for batch in range(6)]


def train(learner: Learner, batches: list[list[TokenRow]]) -> None:
    for batch in batches:
        learner.update(batch)


def test_six_updates_equal_three_a_restart_and_three_bit_for_bit(
    tiny_model: Decoder, config: LearnerConfig, batches: list[list[TokenRow]], tmp_path: Path
) -> None:
    whole = Learner(tiny_model, config)
    train(whole, batches)

    first = Learner(tiny_model, config)
    train(first, batches[:3])
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(3, first.state(), {"position": 3, "rng": [1, 2]})

    second = Learner(Decoder(tiny_model.config, rngs=nnx.Rngs(99)), config)
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        found = checkpoints.restore(second.state())
    assert found is not None
    state, extra = found
    second.load_state(state)
    assert (second.step, second.version, extra) == (3, 3, {"position": 3, "rng": [1, 2]})
    train(second, batches[3:])
    assert fingerprint(second.state()) == fingerprint(whole.state())
    assert second.update(batches[0]) == whole.update(batches[0])


def test_an_empty_folder_has_nothing_to_restore(tiny_model: Decoder, config: LearnerConfig, tmp_path: Path) -> None:
    with Checkpoints(tmp_path / "new") as checkpoints:
        assert checkpoints.restore(Learner(tiny_model, config).state()) is None
        assert checkpoints.numbers() == []


def test_only_the_newest_checkpoints_are_kept(tiny_model: Decoder, config: LearnerConfig, tmp_path: Path) -> None:
    state = Learner(tiny_model, config).state()
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for number in (1, 4, 5):
            checkpoints.save(number, state)
        assert checkpoints.numbers() == [4, 5]
        with pytest.raises(ValueError, match="checkpoint 5 would not be the newest"):
            checkpoints.save(5, state)
        with pytest.raises(TypeError, match="not JSON serializable"):
            checkpoints.save(6, state, {"rng": np.zeros(2)})
        assert checkpoints.numbers() == [4, 5]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["4", "5"]


def largest_file(folder: Path) -> Path:
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def truncate(folder: Path) -> None:
    path = largest_file(folder)
    path.write_bytes(path.read_bytes()[:-1])


def flip_a_bit(folder: Path) -> None:
    path = largest_file(folder)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def lose_the_notes(folder: Path) -> None:
    for path in (folder / "notes").iterdir():
        path.unlink()


def die_before_the_digests(folder: Path) -> None:
    (folder / DIGESTS_FILE).unlink()


@pytest.mark.parametrize("damage", [truncate, flip_a_bit, lose_the_notes, die_before_the_digests])
def test_a_damaged_newest_checkpoint_is_set_aside_loudly_and_the_one_before_is_used(
    damage: Callable[[Path], None],
    tiny_model: Decoder,
    config: LearnerConfig,
    batches: list[list[TokenRow]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    learner = Learner(tiny_model, config)
    with Checkpoints(tmp_path) as checkpoints:
        for number in (0, 1):
            learner.update(batches[number])
            checkpoints.save(number, learner.state(), {"number": number})
    damage(tmp_path / "1")
    with Checkpoints(tmp_path) as checkpoints, caplog.at_level(logging.WARNING, "palaestra"):
        found = checkpoints.restore(learner.state())
        assert found is not None
        assert (found[0].step, found[1]) == (1, {"number": 0})
        assert re.search(r"checkpoint 1 (is damaged|was never finished).*; moved to .*damaged-1", caplog.text)
        assert (tmp_path / "damaged-1").is_dir()
        checkpoints.save(1, learner.state(), {"number": 1})
        again = checkpoints.restore(learner.state())
        assert again is not None
        assert again[0].step == 2


def test_where_every_checkpoint_is_damaged_nothing_is_pretended(
    tiny_model: Decoder, config: LearnerConfig, tmp_path: Path
) -> None:
    state = Learner(tiny_model, config).state()
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, state)
        truncate(tmp_path / "0")
        with pytest.raises(CheckpointError, match=r"all checkpoints of .* are damaged \(0\)"):
            checkpoints.restore(state)


def test_a_first_checkpoint_that_was_never_finished_counts_as_none(
    tiny_model: Decoder, config: LearnerConfig, tmp_path: Path
) -> None:
    state = Learner(tiny_model, config).state()
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, state)
        die_before_the_digests(tmp_path / "0")
        assert checkpoints.restore(state) is None
        checkpoints.save(0, state)
        assert checkpoints.restore(state) is not None


def test_a_checkpoint_of_another_model_is_an_error_and_stays_where_it_is(
    tiny_model: Decoder, config: LearnerConfig, tmp_path: Path
) -> None:
    wider = dataclasses.replace(tiny_model.config, intermediate_size=20)
    other = Learner(Decoder(wider, rngs=nnx.Rngs(0)), config)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, Learner(tiny_model, config).state())
        with pytest.raises(CheckpointError, match="belongs to another model or optimizer"):
            checkpoints.restore(other.state())
        assert checkpoints.numbers() == [0]
