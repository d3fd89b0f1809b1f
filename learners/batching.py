"""Ragged token rows to packed arrays of one fixed shape, so that nothing is compiled again after the first batch.

Several trajectories share a packed row; segment ids keep them apart and positions restart in each. Packing is
best-fit decreasing, deterministic. A batch is cut into chunks of ``[rows_per_chunk, row_tokens]``; the last one is
filled up with empty rows, which cost time and change nothing.

Invariants: every sampled token with its behaviour log-prob, advantage and weight stands in exactly one place; no
padding stands inside a trajectory; where mask is 0, log-prob, advantage and weight are 0 whatever the input held.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from palaestra.learners.aggregation import Aggregation, denominator, token_weight
from palaestra.learners.rows import TokenRow

PADDING_SEGMENT = 0


class PackedChunk(NamedTuple):
    """Arrays of shape [rows_per_chunk, row_tokens]. A NamedTuple, so that JAX takes it as it is."""

    ids: NDArray[np.int32]
    positions: NDArray[np.int32]
    """Place in the trajectory, from 0."""
    segment_ids: NDArray[np.int32]
    """1, 2, ... for the trajectories of a packed row; 0 for padding."""
    mask: NDArray[np.float32]
    behaviour_logprobs: NDArray[np.float32]
    advantages: NDArray[np.float32]
    weights: NDArray[np.float32]
    """What the token's loss counts, see ``aggregation``; 0 where mask is 0."""


class Place(NamedTuple):
    """Where a trajectory went: ``chunks[chunk].ids[row, start:start + length]``."""

    source: int
    """Index into the rows given to :func:`pack`."""
    chunk: int
    row: int
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class PackedBatch:
    chunks: tuple[PackedChunk, ...]
    places: tuple[Place, ...]
    denominator: float
    """Of the whole batch; 0 where it holds no sampled token."""
    tokens: int
    """Sampled tokens that are trained on."""
    empty_rows: int
    """Rows left out: no sampled token, or row_weight 0."""

    @property
    def fill(self) -> float:
        """Share of the packed slots that hold a token of a trajectory."""
        slots = sum(chunk.ids.size for chunk in self.chunks)
        return sum(place.length for place in self.places) / slots if slots else 0.0


@dataclass(frozen=True, slots=True)
class PackingShape:
    """``row_tokens`` is the longest trajectory that fits; ``rows_per_chunk`` rows go through the model at once."""

    row_tokens: int
    rows_per_chunk: int

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) < 1:
                raise ValueError(f"PackingShape.{field.name} is {getattr(self, field.name)}; give at least 1")


def pack(
    rows: Sequence[TokenRow],
    shape: PackingShape,
    *,
    aggregation: Aggregation = "token-mean",
    norm_tokens: int | None = None,
    keep_empty: bool = False,
) -> PackedBatch:
    """Pack rows for one optimizer step.

    ``keep_empty`` also packs rows on which nothing is trained, to compute log-probs of every row. Raises
    ``ValueError`` naming the row that is longer than ``row_tokens``, has a mask other than 0 and 1, a sampled first
    token (nothing stands before it), a negative weight, or an advantage or log-prob that is not finite.
    """
    for index, row in enumerate(rows):
        _check(index, row, shape)
    sampled = [int(row.mask.sum()) for row in rows]
    trained = [n > 0 and row.row_weight > 0 for n, row in zip(sampled, rows, strict=True)]
    kept = [i for i, row in enumerate(rows) if trained[i] or (keep_empty and len(row.ids))]
    places, packed_rows = _place([(i, len(rows[i].ids)) for i in kept], shape)
    chunks = tuple(_empty_chunk(shape) for _ in range(-(-packed_rows // shape.rows_per_chunk)))
    segments = dict.fromkeys(((place.chunk, place.row) for place in places), PADDING_SEGMENT)
    for place in places:
        segments[place.chunk, place.row] += 1
        row = rows[place.source]
        weight = token_weight(aggregation, sampled[place.source], row.row_weight) if trained[place.source] else 0.0
        _write(chunks[place.chunk], place, row, segments[place.chunk, place.row], weight)
    return PackedBatch(
        chunks=chunks,
        places=places,
        denominator=denominator(aggregation, sampled, [row.row_weight for row in rows], norm_tokens=norm_tokens),
        tokens=sum(n for n, used in zip(sampled, trained, strict=True) if used),
        empty_rows=len(rows) - sum(trained),
    )


def _place(lengths: Sequence[tuple[int, int]], shape: PackingShape) -> tuple[tuple[Place, ...], int]:
    """Best-fit decreasing: the longest first, each into the fullest packed row that still holds it."""
    places: list[Place] = []
    free: list[tuple[int, int]] = []  # (free slots, packed row), sorted
    opened = 0
    for index, length in sorted(lengths, key=lambda item: (-item[1], item[0])):
        at = bisect_left(free, (length, 0))
        if at == len(free):
            slots, packed_row = shape.row_tokens, opened
            opened += 1
        else:
            slots, packed_row = free.pop(at)
        chunk, row = divmod(packed_row, shape.rows_per_chunk)
        places.append(Place(index, chunk, row, shape.row_tokens - slots, length))
        insort(free, (slots - length, packed_row))
    return tuple(places), opened


def _write(chunk: PackedChunk, place: Place, row: TokenRow, segment: int, weight: float) -> None:
    at = np.s_[place.row, place.start : place.start + place.length]
    sampled = row.mask > 0
    chunk.ids[at] = row.ids
    chunk.positions[at] = np.arange(place.length)
    chunk.segment_ids[at] = segment
    chunk.mask[at] = sampled
    chunk.behaviour_logprobs[at] = np.where(sampled, row.behaviour_logprobs, 0.0)
    chunk.advantages[at] = np.where(sampled, row.advantage, 0.0)
    chunk.weights[at] = np.where(sampled, weight, 0.0)


def _empty_chunk(shape: PackingShape) -> PackedChunk:
    size = (shape.rows_per_chunk, shape.row_tokens)
    ids, positions, segment_ids = (np.zeros(size, np.int32) for _ in range(3))
    mask, behaviour_logprobs, advantages, weights = (np.zeros(size, np.float32) for _ in range(4))
    return PackedChunk(ids, positions, segment_ids, mask, behaviour_logprobs, advantages, weights)


def _check(index: int, row: TokenRow, shape: PackingShape) -> None:
    length = len(row.ids)
    if length > shape.row_tokens:
        raise ValueError(
            f"row {index} has {length} tokens, a packed row holds {shape.row_tokens}; raise row_tokens or shorten the "
            "trajectory (nothing is cut off silently)"
        )
    sampled = row.mask == 1
    if not (sampled | (row.mask == 0)).all():
        raise ValueError(f"row {index} has mask values other than 0 and 1; weigh a row through row_weight")
    if length and sampled[0]:
        raise ValueError(f"row {index} has mask 1 on its first token, which nothing stands before; start with a prompt")
    if not np.isfinite(row.row_weight) or row.row_weight < 0:
        raise ValueError(f"row {index} has row_weight {row.row_weight}; give 0 (masked out) or a positive number")
    if row.row_weight > 0 and sampled.any():
        if not np.isfinite(row.advantage):
            raise ValueError(f"row {index} has advantage {row.advantage}; an ungraded row gets row_weight 0 instead")
        if not np.isfinite(row.behaviour_logprobs[sampled]).all():
            raise ValueError(f"row {index} has a behaviour log-prob that is not finite on a sampled token")
