"""Continuous batching: requests join and leave between chunks of decode steps. Synchronous; ``JaxEngine`` gives it a
thread.

Static shapes only: rows are padded to a bucket of ``EngineShapes.row_buckets`` and the cache is read up to a bucket of
``column_buckets``, so that a few programs serve every batch and stragglers run in a small one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import jax
import numpy as np
from flax import nnx
from numpy.typing import NDArray

from palaestra.envs.errors import UsageError
from palaestra.learners.models.decoder import Decoder
from palaestra.rollout.engines import kv_cache
from palaestra.rollout.engines.programs import DecodeRows, programs_of
from palaestra.rollout.engines.protocol import FinishReason, Generation, SamplingParams
from palaestra.rollout.engines.slots import SlotTable

_T = TypeVar("_T")

_DECODE_OVERHEAD_ROWS = 24
_PREFILL_OVERHEAD_ROWS = 4
"""What a program costs beside its rows, in rows; measured for the smallest models on CPU, where it is largest."""


@dataclass(frozen=True, slots=True)
class EngineShapes:
    """The static shapes that the engine compiles for."""

    max_slots: int
    """Requests that decode at once, and prefixes that are kept; as many as there are concurrent episodes."""
    max_tokens: int
    """Longest sequence, prompt and completion together."""
    row_buckets: tuple[int, ...] = ()
    """Batch sizes, ascending; empty: ``max_slots`` and steps of 2.5 down from it (16, 32, 80, 192)."""
    column_buckets: tuple[int, ...] = ()
    """How much of the cache a program reads, ascending; empty: half and all of ``max_tokens``."""
    prefill_width: int = 32
    """Prompt tokens that one prefill computes; longer prompts take several."""
    decode_chunk: int = 8
    """Decode steps between two chances to join or leave."""
    max_stop_ids: int = 4

    def __post_init__(self) -> None:
        for name in ("max_slots", "max_tokens", "prefill_width", "decode_chunk", "max_stop_ids"):
            if getattr(self, name) < 1:
                raise UsageError(f"EngineShapes.{name} is {getattr(self, name)}; give at least 1")
        for name, largest, default in (
            ("row_buckets", self.max_slots, _row_buckets(self.max_slots)),
            ("column_buckets", self.max_tokens, tuple(sorted({(self.max_tokens + 1) // 2, self.max_tokens}))),
        ):
            buckets = getattr(self, name) or default
            if list(buckets) != sorted(set(buckets)) or buckets[0] < 1 or buckets[-1] != largest:
                raise UsageError(f"EngineShapes.{name} is {buckets}; give ascending sizes that end with {largest}")
            object.__setattr__(self, name, tuple(buckets))


def _row_buckets(max_slots: int) -> tuple[int, ...]:
    """Steps of about 2.5: fewer programs than halves, and at most 2.5 times the rows that are needed."""
    sizes = [max_slots]
    while sizes[0] > 16:
        sizes.insert(0, -(-sizes[0] * 2 // 5 // 4) * 4)  # in fours, for the vector units
    return tuple(sizes)


def bucket_for(size: int, buckets: Sequence[int]) -> int:
    """The smallest bucket that holds ``size``."""
    return next(bucket for bucket in buckets if bucket >= size)


def cover(rows: int, buckets: Sequence[int], overhead_rows: int) -> list[int]:
    """Batch sizes that hold ``rows`` together: one bucket, or several where that computes fewer rows in all.

    ``overhead_rows`` is what another batch costs beside its rows, in rows. 100 rows in buckets of 32, 80 and 192 are
    80 + 32 rather than 192.
    """
    one = [bucket_for(rows, buckets)] if rows <= buckets[-1] else None
    fitting = [bucket for bucket in buckets if bucket < rows]
    if not fitting:
        return [bucket_for(rows, buckets)]
    several = [fitting[-1], *cover(rows - fitting[-1], buckets, overhead_rows)]
    if one is not None and one[0] <= sum(several) + overhead_rows * (len(several) - 1):
        return one
    return several


def _parts(items: Sequence[_T], buckets: Sequence[int], overhead_rows: int) -> Iterator[tuple[int, Sequence[_T]]]:
    """The items in order, cut into batches: ``(bucket, items of it)``."""
    start = 0
    for rows in cover(len(items), buckets, overhead_rows) if items else ():
        yield rows, items[start : start + rows]
        start += rows


@dataclass(slots=True, eq=False)
class Request:
    """One ``generate`` call inside the engine."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    budget: int
    """Tokens it may draw: max_new_tokens, or what the context leaves."""
    owner: Any = None
    """Whom to tell; opaque here."""
    slot: int = -1
    finish_reason: FinishReason | None = None
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def generation(self) -> Generation:
        """The result; ``finish_reason`` must be set."""
        assert self.finish_reason is not None
        return Generation(tuple(self.ids), tuple(self.logprobs), tuple(self.versions), self.finish_reason)


class ContinuousBatcher:
    """Requests in, finished requests out, one chunk a ``step``. Not thread-safe: one thread owns it."""

    def __init__(self, model: Decoder, params: Any, shapes: EngineShapes, version: int) -> None:
        graphdef, _ = nnx.split(model, nnx.Param)
        config = model.config
        self.shapes, self.version, self.params = shapes, version, params
        self._programs = programs_of(graphdef)
        self._cache = kv_cache.allocate(
            layers=config.num_layers,
            slots=shapes.max_slots,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            columns=shapes.max_tokens,
            margin=max(shapes.prefill_width, shapes.decode_chunk),
            dtype=np.dtype(np.float32),
        )
        self._slots = SlotTable(shapes.max_slots, shapes.max_tokens)
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self.tokens_sampled = 0
        self.tokens_prefilled = 0

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether ``step`` would do anything."""
        return bool(self._running or self._waiting)

    def add(self, request: Request) -> None:
        """Queue a request; it joins at the next step with a free slot."""
        self._waiting.append(request)

    def cancel(self, request: Request) -> None:
        """Drop a request wherever it is; its slot is free at once. Unknown ones are ignored: they have ended."""
        if request in self._running:
            self._running.remove(request)
            self._slots.release(request.slot)
        elif request in self._waiting:
            self._waiting.remove(request)

    def set_weights(self, params: Any, version: int) -> None:
        """Later tokens use these; cached prefixes are dropped; running requests go on with their cache."""
        self.params, self.version = params, version
        self._slots.forget()

    def step(self) -> list[Request]:
        """Admit what fits, decode one chunk and return the requests that ended in it."""
        self._admit()
        for rows, part in _parts(self._running, self.shapes.row_buckets, _DECODE_OVERHEAD_ROWS):
            self._decode(part, rows)
        ended = [request for request in self._running if request.finish_reason]
        if ended:
            self._running = [request for request in self._running if not request.finish_reason]
            for request in ended:
                self._slots.release(request.slot)
        return ended

    def warm_up(self) -> None:
        """Compile every program by running it on the scratch slot."""
        shapes, scratch = self.shapes, self.shapes.max_slots
        for rows in shapes.row_buckets:
            slots = np.full(rows, scratch, np.int32)
            zeros = np.zeros(rows, np.int32)
            for columns in shapes.column_buckets:
                ids = np.zeros((rows, shapes.prefill_width), np.int32)
                self._cache = self._programs.prefill(self.params, self._cache, slots, zeros, ids, columns=columns)
                self._run_decode([], rows, columns)
                self._cache = self._programs.fork(self._cache, slots, slots, columns=columns)
        jax.block_until_ready(self._cache)

    def _admit(self) -> None:
        """Give waiting requests slots, then bring all of the prompt but its last token into the cache.

        A request continues an idle slot that holds the start of its prompt; failing that it takes the slot that was
        used longest ago, and copies the prompt from a slot that holds it, where one does (the others of its group).
        """
        missing: list[tuple[Request, tuple[int, ...]]] = []
        forks: list[tuple[Request, int]] = []
        while self._waiting and (seat := self._seat(self._waiting[0], forks)) is not None:
            request = self._waiting.popleft()
            context = request.prompt[:-1]
            request.slot, source, keep = seat
            self._slots.take(request.slot, keep=keep)
            if source is not None:
                forks.append((request, source))
            elif keep < len(context):
                missing.append((request, context[keep:]))
            self._slots.extend(request.slot, context[keep:])
            self._running.append(request)
        self._prefill(missing)
        self._fork(forks)

    def _seat(self, request: Request, forks: list[tuple[Request, int]]) -> tuple[int, int | None, int] | None:
        """``(slot, slot to copy the prompt from, tokens kept in place)``; None when no slot can be had now."""
        context = request.prompt[:-1]
        slot = self._slots.continuation(context)
        if slot is not None:
            return slot, None, self._slots.length(slot)
        source = self._slots.holder(context)
        copied_to = {forked.slot: origin for forked, origin in forks}
        if source is not None:
            source = copied_to.get(source, source)  # copies of one round all read what was there before it
        pinned = {origin for _, origin in forks}
        slot = self._slots.least_recent(pinned if source is None else pinned | {source})
        if slot is not None:
            return slot, source, 0
        if source is not None and source not in pinned and not self._slots.is_busy(source):
            return source, None, len(context)
        return None

    def _prefill(self, missing: list[tuple[Request, tuple[int, ...]]]) -> None:
        """Compute the given tokens, ``prefill_width`` a row and round, and write them behind what their slots keep."""
        shapes, width = self.shapes, self.shapes.prefill_width
        todo = [(request.slot, len(request.prompt) - 1 - len(ids), ids) for request, ids in missing]
        while todo:
            for rows, part in _parts(todo, shapes.row_buckets, _PREFILL_OVERHEAD_ROWS):
                slots, starts = np.full(rows, shapes.max_slots, np.int32), np.zeros(rows, np.int32)
                ids = np.zeros((rows, width), np.int32)
                for row, (slot, start, new) in enumerate(part):
                    slots[row], starts[row], ids[row, : len(new[:width])] = slot, start, new[:width]
                columns = bucket_for(int(starts.max()), shapes.column_buckets)
                self._cache = self._programs.prefill(self.params, self._cache, slots, starts, ids, columns=columns)
            self.tokens_prefilled += sum(len(new[:width]) for _, _, new in todo)
            todo = [(slot, start + width, new[width:]) for slot, start, new in todo if len(new) > width]

    def _fork(self, forks: list[tuple[Request, int]]) -> None:
        """Copy whole prompts between slots."""
        if not forks:
            return
        shapes = self.shapes
        rows = bucket_for(len(forks), shapes.row_buckets)
        sources, targets = np.full(rows, shapes.max_slots, np.int32), np.full(rows, shapes.max_slots, np.int32)
        for row, (request, source) in enumerate(forks):
            sources[row], targets[row] = source, request.slot
        columns = bucket_for(max(len(request.prompt) - 1 for request, _ in forks), shapes.column_buckets)
        self._cache = self._programs.fork(self._cache, sources, targets, columns=columns)

    def _decode(self, requests: Sequence[Request], rows: int) -> None:
        """Draw up to ``decode_chunk`` tokens for these requests, in a batch of ``rows``, and note what they drew."""
        columns = bucket_for(max(self._slots.length(request.slot) for request in requests), self.shapes.column_buckets)
        ids, logprobs, counts, stopped = self._run_decode(requests, rows, columns)
        for row, request in enumerate(requests):
            count = int(counts[row])
            drawn = ids[:count, row].tolist()
            last = request.ids[-1] if request.ids else request.prompt[-1]
            self._slots.extend(request.slot, [last, *drawn[:-1]])
            request.ids += drawn
            request.logprobs += logprobs[:count, row].tolist()
            request.versions += [self.version] * count
            self.tokens_sampled += count
            if stopped[row]:
                request.finish_reason = "stop"
            elif len(request.ids) == request.budget:
                request.finish_reason = "length"

    def _run_decode(self, requests: Sequence[Request], rows: int, columns: int) -> tuple[NDArray[Any], ...]:
        """Run the decode program on these requests, padded to ``rows``; the four arrays of ``DecodedChunk``."""
        shapes = self.shapes
        batch = DecodeRows(
            slots=np.full(rows, shapes.max_slots, np.int32),
            lengths=np.zeros(rows, np.int32),
            last_ids=np.zeros(rows, np.int32),
            seeds=np.zeros((rows, 2), np.uint32),
            drawn=np.zeros(rows, np.int32),
            remaining=np.zeros(rows, np.int32),
            temperatures=np.ones(rows, np.float32),
            stop_ids=np.full((rows, shapes.max_stop_ids), -1, np.int32),
        )
        for row, request in enumerate(requests):
            sampling = request.sampling
            batch.slots[row] = request.slot
            batch.lengths[row] = self._slots.length(request.slot)
            batch.last_ids[row] = request.ids[-1] if request.ids else request.prompt[-1]
            batch.seeds[row] = (sampling.seed >> 32) & 0xFFFFFFFF, sampling.seed & 0xFFFFFFFF
            batch.drawn[row] = len(request.ids)
            batch.remaining[row] = request.budget - len(request.ids)
            batch.temperatures[row] = sampling.temperature
            batch.stop_ids[row, : len(sampling.stop_ids)] = sampling.stop_ids
        self._cache, chunk = self._programs.decode(
            self.params, self._cache, batch, columns=columns, steps=shapes.decode_chunk
        )
        return tuple(np.asarray(array) for array in chunk)
