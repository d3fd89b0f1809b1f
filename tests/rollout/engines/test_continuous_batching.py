from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from palaestra.learners.models.decoder import Decoder
from palaestra.rollout.engines.continuous_batching import ContinuousBatcher, EngineShapes, Request, bucket_for, cover
from palaestra.rollout.engines.protocol import SamplingParams
from palaestra.rollout.engines.slots import SlotTable
from palaestra.rollout.weights import score


def request(prompt: tuple[int, ...], tokens: int, seed: int = 0) -> Request:
    return Request(prompt, SamplingParams(max_new_tokens=tokens, seed=seed), budget=tokens)


def finish(batcher: ContinuousBatcher) -> list[Request]:
    ended = []
    while batcher.has_work:
        ended += batcher.step()
    return ended


@pytest.fixture
def batcher(model: Decoder, shapes: EngineShapes) -> ContinuousBatcher:
    return ContinuousBatcher(model, nnx.state(model, nnx.Param), shapes, version=0)


def test_a_running_request_survives_new_weights_and_each_token_carries_its_version(
    batcher: ContinuousBatcher, other_params: Any
) -> None:
    long = request((257, 1, 258), 11)
    batcher.add(long)
    batcher.step()
    batcher.set_weights(other_params, 1)
    finish(batcher)
    assert long.versions == [0] * 4 + [1] * 7
    assert len(long.ids) == len(long.logprobs) == 11


@pytest.mark.parametrize("kind", ["continued", "copied"])
def test_keys_and_values_of_older_weights_are_never_reused(
    model: Decoder, batcher: ContinuousBatcher, shapes: EngineShapes, other_params: Any, kind: str
) -> None:
    old = request((257, 1, 2, 3, 258), 11)
    batcher.add(old)
    batcher.step()
    batcher.set_weights(other_params, 1)
    if kind == "continued":
        finish(batcher)
    prompt = (*old.prompt, *old.ids[:4], 259, 258) if kind == "copied" else (*old.prompt, *old.ids, 259, 258)
    prompt = old.prompt if kind == "copied" else prompt
    new = request(prompt, 6, seed=5)
    batcher.add(new)
    finish(batcher)

    cold = ContinuousBatcher(model, other_params, shapes, version=1)
    expected = request(prompt, 6, seed=5)
    cold.add(expected)
    finish(cold)
    assert new.ids == expected.ids
    np.testing.assert_allclose(new.logprobs, expected.logprobs, atol=1e-6)


def test_a_request_joins_while_others_are_running(batcher: ContinuousBatcher) -> None:
    first, second = request((257, 1, 258), 12), request((257, 2, 258), 3)
    batcher.add(first)
    batcher.step()
    batcher.add(second)
    assert batcher.step() == [second]
    assert batcher.running == 1
    assert finish(batcher) == [first]


def test_requests_beyond_the_slots_wait_in_order(batcher: ContinuousBatcher) -> None:
    requests = [request((257, i, 258), 4, seed=i) for i in range(8)]
    for one in requests:
        batcher.add(one)
    assert batcher.step() == requests[:6]
    assert batcher.waiting == 2
    assert batcher.step() == requests[6:]


def test_cancelling_removes_waiting_and_running_requests_and_ignores_ended_ones(batcher: ContinuousBatcher) -> None:
    requests = [request((257, i, 258), 12, seed=i) for i in range(8)]
    for one in requests:
        batcher.add(one)
    batcher.step()
    for one in requests[1:]:
        batcher.cancel(one)
    assert (batcher.running, batcher.waiting) == (1, 0)
    assert finish(batcher) == requests[:1]
    batcher.cancel(requests[0])


def test_a_prompt_longer_than_one_prefill_takes_several(batcher: ContinuousBatcher) -> None:
    one = request((257, *range(30), 258), 4)
    batcher.add(one)
    finish(batcher)
    assert batcher.tokens_prefilled == 31
    assert len(one.ids) == 4


@pytest.mark.parametrize(("size", "bucket"), [(1, 3), (3, 3), (4, 6), (6, 6)])
def test_a_batch_takes_the_smallest_bucket_that_holds_it(size: int, bucket: int) -> None:
    assert bucket_for(size, (3, 6)) == bucket


@pytest.mark.parametrize(
    ("rows", "overhead", "batches"),
    [(100, 24, [80, 32]), (100, 200, [192]), (40, 40, [80]), (40, 4, [32, 16]), (192, 24, [192]), (7, 0, [16])],
)
def test_rows_are_split_over_buckets_where_that_computes_less(rows: int, overhead: int, batches: list[int]) -> None:
    assert cover(rows, (16, 32, 80, 192), overhead) == batches


@given(
    rows=st.integers(1, 300),
    overhead=st.integers(0, 50),
    buckets=st.sets(st.integers(1, 300), min_size=1).map(sorted),
)
def test_every_row_has_a_place_and_no_batch_is_empty(rows: int, overhead: int, buckets: list[int]) -> None:
    batches = cover(rows, buckets, overhead)
    assert set(batches) <= set(buckets)
    assert sum(batches) >= rows
    assert sum(batches[:-1]) < rows


def test_buckets_default_to_a_few_sizes() -> None:
    shapes = EngineShapes(max_slots=192, max_tokens=107)
    assert shapes.row_buckets == (16, 32, 80, 192)
    assert shapes.column_buckets == (54, 107)
    assert EngineShapes(max_slots=1, max_tokens=1).row_buckets == EngineShapes(max_slots=1, max_tokens=1).column_buckets


class TestSlotTable:
    def filled(self) -> SlotTable:
        """Slot 0 holds 1 2 3, slot 1 holds 1 2, slot 2 is in use with 1 2 3 4, slot 3 is empty."""
        table = SlotTable(4, 8)
        for slot, ids in enumerate([(1, 2, 3), (1, 2), (1, 2, 3, 4)]):
            table.take(slot, keep=0)
            table.extend(slot, ids)
        table.release(1)
        table.release(0)
        return table

    def test_the_longest_idle_start_of_the_prompt_is_continued(self) -> None:
        assert self.filled().continuation((1, 2, 3, 4)) == 0
        assert self.filled().continuation((1, 2, 9)) == 1
        assert self.filled().continuation((1, 2)) == 1
        assert self.filled().continuation((1,)) is None
        assert self.filled().continuation(()) is None

    def test_a_prompt_may_be_copied_from_a_slot_that_is_in_use(self) -> None:
        assert self.filled().holder((1, 2, 3, 4)) == 2
        assert self.filled().holder((1, 2, 3, 5)) is None
        assert self.filled().holder(()) is None

    def test_empty_slots_are_taken_first_and_then_the_one_used_longest_ago(self) -> None:
        table = self.filled()
        assert table.least_recent(set()) == 3
        assert table.least_recent({3}) == 1
        assert table.least_recent({3, 1}) == 0
        assert table.least_recent({3, 1, 0}) is None

    def test_forgotten_tokens_are_neither_continued_nor_copied(self) -> None:
        table = self.filled()
        table.forget()
        assert table.continuation((1, 2, 3)) is None
        assert table.holder((1,)) is None
        table.release(2)
        assert table.continuation((1, 2, 3, 4)) is None


def check_log_probs(model: Decoder, params: Any, requests: list[Request], length: int) -> None:
    """Each completion's log-probs are those of a forward pass over its own tokens and nothing else."""
    for one in requests:
        padding = [0] * (length - len(one.prompt) - len(one.ids))  # one length, one compilation
        expected = score(model, params, one.prompt, [*one.ids, *padding])[: len(one.ids)]
        np.testing.assert_allclose(one.logprobs, expected, atol=1e-4)


def test_a_copy_of_a_copy_in_one_round_reads_the_original(model: Decoder, batcher: ContinuousBatcher) -> None:
    """Slots are freed from the last to the first, so that the second of a group finds the first copy before it."""
    for i in range(6):
        batcher.add(request((257, 50 + i, 258), 24 - 4 * i))
    finish(batcher)
    group = [request((257, 1, 2, 3, 258), 4, seed=seed) for seed in range(4)]
    for one in group:
        batcher.add(one)
    finish(batcher)
    assert [one.slot for one in group] == [5, 4, 3, 2]
    check_log_probs(model, batcher.params, group, 48)


@pytest.mark.parametrize("seed", range(3))
def test_whatever_is_continued_copied_evicted_or_cancelled_log_probs_are_the_models(
    model: Decoder, batcher: ContinuousBatcher, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    ended: list[Request] = []
    live: list[Request] = []
    for _ in range(40):
        for _ in range(int(rng.integers(0, 5))):
            if ended and rng.random() < 0.5:
                before = ended[int(rng.integers(len(ended)))]
                prompt = (*before.prompt, *before.ids, 259, int(rng.integers(256)), 258)
            else:
                prompt = (257, *range(int(rng.integers(1, 20))), 258)
            if len(prompt) > 40:
                continue
            one = request(prompt, int(rng.integers(1, 8)), seed=int(rng.integers(1000)))
            batcher.add(one)
            live.append(one)
        if live and rng.random() < 0.2:
            batcher.cancel(live.pop(int(rng.integers(len(live)))))
        ended += batcher.step()
        live = [one for one in live if one.finish_reason is None]
    ended += finish(batcher)
    assert len(ended) > 40
    assert all(len(one.ids) == one.budget for one in ended)
    check_log_probs(model, batcher.params, ended, 48)
