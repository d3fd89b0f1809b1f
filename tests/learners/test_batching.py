from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from palaestra.learners.aggregation import AGGREGATIONS, Aggregation, denominator
from palaestra.learners.batching import PackedBatch, PackedChunk, PackingShape, pack
from palaestra.learners.rows import TokenRow

SHAPE = PackingShape(row_tokens=12, rows_per_chunk=3)

ragged = settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def token_rows(draw: st.DrawFn) -> list[TokenRow]:
    """Ragged rows whose ids are all different, so that a token can be recognised anywhere."""
    rows = []
    for number in range(draw(st.integers(0, 9))):
        length = draw(st.integers(0, SHAPE.row_tokens))
        mask = np.array(draw(st.lists(st.booleans(), min_size=length, max_size=length)), np.float32).reshape(length)
        mask[:1] = 0
        ids = np.arange(length, dtype=np.int32) + 100 * number
        rows.append(
            TokenRow(
                ids=ids,
                mask=mask,
                behaviour_logprobs=-(ids + 0.5).astype(np.float32),
                versions=np.zeros(length, np.int32),
                advantage=draw(st.floats(-2, 2, width=32)),
                row_weight=draw(st.sampled_from([0.0, 0.5, 1.0, 2.0])),
            )
        )
    return rows


def slots(batch: PackedBatch) -> list[dict[str, Any]]:
    """Every slot of every chunk, as a record."""
    return [
        {name: getattr(chunk, name)[place] for name in PackedChunk._fields} | {"chunk": number, "row": place[0]}
        for number, chunk in enumerate(batch.chunks)
        for place in np.ndindex(*chunk.ids.shape)
    ]


def trained_rows(rows: list[TokenRow]) -> list[TokenRow]:
    return [row for row in rows if row.mask.sum() and row.row_weight > 0]


@ragged
@given(token_rows())
def test_every_sampled_token_stands_in_exactly_one_place_with_what_belongs_to_it(rows: list[TokenRow]) -> None:
    found = [
        (int(slot["ids"]), float(slot["behaviour_logprobs"]), float(slot["advantages"]), float(slot["weights"]))
        for slot in slots(pack(rows, SHAPE))
        if slot["weights"] > 0
    ]
    expected = [
        (int(row.ids[t]), float(row.behaviour_logprobs[t]), float(np.float32(row.advantage)), row.row_weight)
        for row in trained_rows(rows)
        for t in np.flatnonzero(row.mask)
    ]
    assert sorted(found) == sorted(expected)


@ragged
@given(token_rows())
def test_a_trajectory_stands_in_one_piece_and_counts_its_positions_from_zero(rows: list[TokenRow]) -> None:
    pieces: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    for slot in slots(pack(rows, SHAPE)):
        if slot["segment_ids"] > 0:
            key = (slot["chunk"], slot["row"], int(slot["segment_ids"]))
            pieces.setdefault(key, []).append((int(slot["positions"]), int(slot["ids"])))
    expected = [list(enumerate(row.ids.tolist())) for row in trained_rows(rows)]
    assert sorted(pieces.values()) == sorted(expected)


@ragged
@given(token_rows())
def test_padding_is_zero_and_stands_only_at_the_end_of_a_packed_row(rows: list[TokenRow]) -> None:
    for chunk in pack(rows, SHAPE).chunks:
        padding = chunk.segment_ids == 0
        assert (np.diff(padding.astype(int), axis=1) >= 0).all()
        for name in ("ids", "positions", "mask", "behaviour_logprobs", "advantages", "weights"):
            assert (getattr(chunk, name)[padding] == 0).all()


@ragged
@given(token_rows())
def test_counts_and_places_account_for_every_row(rows: list[TokenRow]) -> None:
    batch = pack(rows, SHAPE)
    trained = trained_rows(rows)
    assert batch.empty_rows == len(rows) - len(trained)
    assert batch.tokens == sum(int(row.mask.sum()) for row in trained)
    used = [i for i, row in enumerate(rows) if row.mask.sum() and row.row_weight > 0]
    assert sorted(place.source for place in batch.places) == used
    for place in batch.places:
        packed = batch.chunks[place.chunk].ids[place.row, place.start : place.start + place.length]
        np.testing.assert_array_equal(packed, rows[place.source].ids)


@ragged
@given(token_rows(), st.sampled_from(AGGREGATIONS))
def test_the_weights_and_the_denominator_are_those_of_the_aggregation(
    rows: list[TokenRow], aggregation: Aggregation
) -> None:
    batch = pack(rows, SHAPE, aggregation=aggregation, norm_tokens=7)
    trained = trained_rows(rows)
    lengths, weights = [int(row.mask.sum()) for row in trained], [row.row_weight for row in trained]
    assert batch.denominator == pytest.approx(denominator(aggregation, lengths, weights, norm_tokens=7))
    total = sum(float(chunk.weights.sum(dtype=np.float64)) for chunk in batch.chunks)
    if aggregation == "seq-mean-token-mean":
        assert total == pytest.approx(sum(weights), rel=1e-6)
    else:
        assert total == pytest.approx(sum(n * w for n, w in zip(lengths, weights, strict=True)))


@ragged
@given(token_rows())
def test_all_chunks_have_one_shape(rows: list[TokenRow]) -> None:
    for chunk in pack(rows, SHAPE).chunks:
        assert {array.shape for array in chunk} == {(SHAPE.rows_per_chunk, SHAPE.row_tokens)}


@ragged
@given(token_rows())
def test_what_stands_under_mask_zero_never_reaches_the_arrays(rows: list[TokenRow]) -> None:
    poisoned = [
        dataclasses.replace(
            row,
            behaviour_logprobs=np.where(row.mask > 0, row.behaviour_logprobs, np.nan).astype(np.float32),
            versions=np.where(row.mask > 0, row.versions, 99).astype(np.int32),
        )
        for row in rows
    ]
    for clean, dirty in zip(pack(rows, SHAPE).chunks, pack(poisoned, SHAPE).chunks, strict=True):
        for a, b in zip(clean, dirty, strict=True):
            np.testing.assert_array_equal(a, b)


def row_of(length: int, mask: list[float] | None = None, **changes: Any) -> TokenRow:
    sampled = np.array(mask if mask is not None else [0.0] + [1.0] * (length - 1), np.float32)
    zeros = np.zeros(length)
    return TokenRow(
        np.arange(length, dtype=np.int32), sampled, zeros.astype(np.float32), zeros.astype(np.int32), **changes
    )


def test_short_trajectories_fill_the_gaps_that_long_ones_leave() -> None:
    batch = pack([row_of(n) for n in (4, 8, 3, 9, 6, 6)], SHAPE)
    assert len(batch.chunks) == 1
    assert batch.fill == 1.0


def test_rows_without_a_sampled_token_are_packed_only_on_request() -> None:
    rows = [row_of(3, [0, 0, 0]), row_of(4), row_of(4, row_weight=0.0, advantage=float("nan"))]
    assert [place.source for place in pack(rows, SHAPE).places] == [1]
    kept = pack(rows, SHAPE, keep_empty=True)
    assert sorted(place.source for place in kept.places) == [0, 1, 2]
    assert kept.tokens == 3
    assert sum(float(chunk.weights.sum()) for chunk in kept.chunks) == 3


def test_nothing_to_train_on_gives_no_chunk() -> None:
    batch = pack([row_of(3, [0, 0, 0])], SHAPE)
    assert (batch.chunks, batch.tokens, batch.denominator, batch.empty_rows, batch.fill) == ((), 0, 0.0, 1, 0.0)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (row_of(13), "row 1 has 13 tokens, a packed row holds 12; raise row_tokens"),
        (row_of(3, [0, 0.5, 1]), "row 1 has mask values other than 0 and 1"),
        (row_of(3, [1, 1, 1]), "row 1 has mask 1 on its first token"),
        (row_of(3, row_weight=-1.0), "row 1 has row_weight -1.0"),
        (row_of(3, advantage=float("nan")), "row 1 has advantage nan; an ungraded row gets row_weight 0"),
    ],
)
def test_a_malformed_row_is_refused_by_its_number(row: TokenRow, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack([row_of(3), row], SHAPE)


def test_a_sampled_token_without_a_finite_log_prob_is_refused() -> None:
    row = dataclasses.replace(row_of(3), behaviour_logprobs=np.array([0, np.nan, 0], np.float32))
    with pytest.raises(ValueError, match="row 0 has a behaviour log-prob that is not finite"):
        pack([row], SHAPE)


def test_a_row_of_arrays_of_different_lengths_cannot_be_made() -> None:
    row = row_of(3)
    with pytest.raises(ValueError, match="four arrays of one shape"):
        dataclasses.replace(row, mask=np.zeros(4, np.float32))


def test_a_shape_needs_positive_sizes() -> None:
    with pytest.raises(ValueError, match="rows_per_chunk is 0; give at least 1"):
        PackingShape(4, 0)
