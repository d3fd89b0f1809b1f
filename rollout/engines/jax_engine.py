"""The embedded engine: the learner's own Flax model behind the ``Engine`` protocol, with continuous batching.

All computing happens in one worker thread, so that the event loop, which drives sandboxes, never waits for it. The
event loop hands over requests and commands; between two chunks the worker picks them up.

* Tokens drawn after ``update_weights`` returned carry the new version and were computed with the new weights. Requests
  that were running go on (their earlier keys and values stay), and each of their tokens carries its own version.
* Cancelling a ``generate`` frees its slot at the next chunk boundary.
* A failure inside the worker fails every outstanding and later request with an ``EngineError`` that carries the cause.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from palaestra.envs.errors import EngineError, UsageError
from palaestra.learners.models.decoder import Decoder
from palaestra.rollout.engines.continuous_batching import ContinuousBatcher, EngineShapes, Request
from palaestra.rollout.engines.protocol import EngineStatus, Generation, SamplingParams

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Command:
    """Work for the worker thread between two chunks."""

    work: Callable[[], None]
    done: asyncio.Future[None]


class JaxEngine:
    """An ``Engine`` over a ``Decoder``.

    >>> engine = JaxEngine(model, shapes=EngineShapes(max_slots=192, max_tokens=107))        # doctest: +SKIP
    >>> await engine.warm_up()                                                                # doctest: +SKIP
    >>> (await engine.generate([1, 9, 2], SamplingParams(max_new_tokens=18, stop_ids=(4,)))).ids   # doctest: +SKIP

    ``params`` defaults to the model's own; they are copied, so the learner may donate its buffers.
    """

    def __init__(self, model: Decoder, params: Any = None, *, shapes: EngineShapes, version: int = 0) -> None:
        own = nnx.state(model, nnx.Param)
        self._config = model.config
        if shapes.max_tokens > self._config.max_position_embeddings:
            raise UsageError(
                f"max_tokens is {shapes.max_tokens}, but the model is meant for at most "
                f"{self._config.max_position_embeddings} positions; lower EngineShapes.max_tokens"
            )
        self._shapes = shapes
        self._structure = _structure(own)
        self._batcher = ContinuousBatcher(model, self._copied(own if params is None else params), shapes, version)
        self._wake = threading.Condition()
        self._arrivals: list[Request] = []
        self._cancelled: list[Request] = []
        self._commands: list[_Command] = []
        self._closing = False
        self._failure: BaseException | None = None
        self._busy_s = 0.0
        self._outstanding: set[asyncio.Future[Any]] = set()
        self._thread = threading.Thread(target=self._work, name="palaestra-engine", daemon=True)
        self._thread.start()

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingParams) -> Generation:
        """Continue the prompt; see the protocol. The completion ends at ``max_tokens`` of the context at the latest."""
        prompt = tuple(int(i) for i in prompt_ids)
        budget = self._check(prompt, sampling)
        future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        request = Request(prompt, sampling, budget, owner=future)
        with self._wake:
            self._refuse_if_down()
            self._arrivals.append(request)
            self._outstanding.add(future)
            self._wake.notify()
        try:
            return await future
        except asyncio.CancelledError:
            with self._wake:
                self._cancelled.append(request)
                self._wake.notify()
            raise

    async def update_weights(self, params: Any, version: int) -> None:
        """Take new weights between two chunks; see the protocol. They are copied.

        A tree of another structure, shape or dtype, or a version lower than the current one, is a ``UsageError``.
        """
        copied = self._copied(params)
        if version < self._batcher.version:
            raise UsageError(f"weights of version {version} are older than the engine's, {self._batcher.version}")
        await self._between_chunks(lambda: self._batcher.set_weights(copied, version))

    async def warm_up(self) -> None:
        """Compile every program; after it nothing is compiled again, whatever arrives."""
        await self._between_chunks(self._batcher.warm_up)

    @property
    def tokens_prefilled(self) -> int:
        """Prompt tokens that were computed, so not those found in the cache or copied from another slot."""
        return self._batcher.tokens_prefilled

    async def status(self) -> EngineStatus:
        """A snapshot; ``waiting`` includes what the worker has not picked up yet. A failed engine raises."""
        with self._wake:
            if self._failure is not None:
                self._refuse_if_down()
            waiting = self._batcher.waiting + len(self._arrivals)
        return EngineStatus(
            version=self._batcher.version,
            running=self._batcher.running,
            waiting=waiting,
            tokens_sampled=self._batcher.tokens_sampled,
            busy_s=self._busy_s,
        )

    async def close(self) -> None:
        """Stop the worker after its current chunk; outstanding requests fail with ``EngineError``. Idempotent."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)

    def _check(self, prompt: tuple[int, ...], sampling: SamplingParams) -> int:
        """The tokens that the request may draw, or a ``UsageError``."""
        vocabulary, longest = self._config.vocab_size, self._shapes.max_tokens
        if not prompt:
            raise UsageError("the prompt is empty; give at least one token id")
        if bad := [i for i in prompt if not 0 <= i < vocabulary]:
            raise UsageError(f"token id {bad[0]} is outside the vocabulary 0..{vocabulary - 1}; check the tokenizer")
        if len(prompt) >= longest:
            raise UsageError(
                f"the prompt has {len(prompt)} tokens and the engine holds {longest}, so no token could follow; "
                "shorten the prompt or raise EngineShapes.max_tokens"
            )
        if sampling.max_new_tokens < 1:
            raise UsageError(f"max_new_tokens is {sampling.max_new_tokens}; give at least 1")
        if not 0 <= sampling.temperature < float("inf"):
            raise UsageError(f"temperature is {sampling.temperature}; give 0 (greedy) or a positive number")
        if bad := [i for i in sampling.stop_ids if not 0 <= i < vocabulary]:
            raise UsageError(
                f"stop id {bad[0]} is outside the vocabulary 0..{vocabulary - 1}; it could never be sampled"
            )
        if len(sampling.stop_ids) > self._shapes.max_stop_ids:
            raise UsageError(
                f"{len(sampling.stop_ids)} stop ids were given and the engine compares {self._shapes.max_stop_ids}; "
                "raise EngineShapes.max_stop_ids"
            )
        return min(sampling.max_new_tokens, longest - len(prompt))

    def _copied(self, params: Any) -> Any:
        """A copy that nobody else can donate, after a check against the model's own structure."""
        given = _structure(params)
        if given != self._structure:
            wrong = sorted(set(given.items()) ^ set(self._structure.items()))
            raise UsageError(
                f"the weights do not fit the engine's model; the first difference is {wrong[0][0]}: got "
                f"{given.get(wrong[0][0], 'nothing')}, expected {self._structure.get(wrong[0][0], 'nothing')}"
            )
        return jax.tree.map(jnp.copy, params)

    async def _between_chunks(self, work: Callable[[], None]) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with self._wake:
            self._refuse_if_down()
            self._commands.append(_Command(work, future))
            self._outstanding.add(future)
            self._wake.notify()
        await future

    def _refuse_if_down(self) -> None:
        if self._failure is not None:
            raise EngineError(f"the engine failed earlier: {self._failure!r}; make a new one") from self._failure
        if self._closing:
            raise EngineError("the engine is closed; make a new one")

    def _work(self) -> None:
        """The worker thread: one chunk after another until closed."""
        failure: BaseException | None = None
        try:
            while self._pick_up():
                started = time.perf_counter()
                ended = self._batcher.step()
                self._busy_s += time.perf_counter() - started
                self._deliver([(request.owner, request.generation()) for request in ended])
        except BaseException as error:  # noqa: BLE001 - the thread's outermost frame: every waiter is told
            _log.exception("the engine's worker failed")
            failure = error
        with self._wake:
            self._closing, self._failure = True, failure
            outstanding = list(self._outstanding)
        why = "the engine was closed" if failure is None else f"the engine failed: {failure!r}"
        self._deliver([(future, EngineError(why)) for future in outstanding])

    def _pick_up(self) -> bool:
        """Wait for work, take over arrivals, cancellations and commands; False once closed."""
        with self._wake:
            while not (self._closing or self._arrivals or self._cancelled or self._commands or self._batcher.has_work):
                self._wake.wait()
            if self._closing:
                return False
            arrivals, self._arrivals = self._arrivals, []
            cancelled, self._cancelled = self._cancelled, []
            commands, self._commands = self._commands, []
        for request in arrivals:
            self._batcher.add(request)
        for request in cancelled:
            self._batcher.cancel(request)
        for command in commands:
            command.work()
        self._deliver([(request.owner, None) for request in cancelled] + [(command.done, None) for command in commands])
        return True

    def _deliver(self, results: list[tuple[asyncio.Future[Any], Any]]) -> None:
        """Settle futures on their own event loops, one wake-up a loop. An ``EngineError`` is raised there."""
        if not results:
            return
        with self._wake:
            self._outstanding.difference_update(future for future, _ in results)
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Any], Any]]] = {}
        for future, result in results:
            by_loop.setdefault(future.get_loop(), []).append((future, result))
        for loop, settled in by_loop.items():
            try:
                loop.call_soon_threadsafe(_settle, settled)
            except RuntimeError:  # the loop is closed: nobody is waiting any more
                _log.debug("%d results came after their event loop had closed", len(settled))


def _settle(results: list[tuple[asyncio.Future[Any], Any]]) -> None:
    """Give each waiting future its result; those that were cancelled meanwhile are left alone."""
    for future, result in results:
        if future.done():
            continue
        if isinstance(result, EngineError):
            future.set_exception(result)
        else:
            future.set_result(result)


def _structure(params: Any) -> dict[str, str]:
    """Path to ``dtype[shape]`` of every array of a parameter tree."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {jax.tree_util.keystr(path): f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves}
