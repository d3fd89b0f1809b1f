"""Many episodes at once, in groups, within limits.

Invariants
----------
* Every dispatched episode comes out exactly once: in its group, done or failed, or in ``GroupStream.cancelled``.
* A failing episode takes no other one down; it comes out with ``failure`` set and no reward.
* No queue is unbounded: groups that run, and finished ones that nobody has taken, share one limit.
* With an ``AdmissionControl``: ``accepted + running + group_size <= (max_staleness + version + 1) * batch_episodes``.
* Leaving the stream leaves nothing running.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from palaestra.envs.errors import InfrastructureError, UsageError
from palaestra.rollout.admission import AdmissionControl
from palaestra.rollout.chat import ChatFormat
from palaestra.rollout.engines.protocol import Engine
from palaestra.rollout.episode import (
    EpisodeEnv,
    EpisodeOptions,
    EpisodeResult,
    EpisodeSpec,
    StageGates,
    TransitionHook,
    derive_seed,
    run_episode,
)

_log = logging.getLogger(__name__)


class TaskRef(Protocol):
    """What the scheduler needs of a task."""

    @property
    def id(self) -> str: ...

    @property
    def kind(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Group:
    """The finished episodes of one task that share a baseline."""

    index: int
    """Order of dispatch, from 0."""
    task_id: str
    kind: str
    results: tuple[EpisodeResult, ...]

    @property
    def graded(self) -> tuple[EpisodeResult, ...]:
        """The episodes that have a reward; the others belong to no baseline and are not trained on."""
        return tuple(result for result in self.results if result.reward is not None)

    @property
    def zero_variance(self) -> bool:
        """Whether all rewards are the same (by maximum and minimum: no rounding), so that nothing can be learned."""
        rewards = [result.reward for result in self.graded if result.reward is not None]
        return len(rewards) < 2 or max(rewards) == min(rewards)


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """How much may be under way at once."""

    max_episodes: int
    """Episodes of running groups, and of finished ones that wait to be taken."""
    max_executing: int = 32
    """Episodes inside the environment (reset, step, grading)."""
    max_generating: int | None = None
    """Episodes inside the engine; None leaves it to the engine's own queue."""
    max_failures: int = 64
    """Failed episodes in a row, over all groups, after which the stream ends with the last cause as an error."""

    def __post_init__(self) -> None:
        for name in ("max_episodes", "max_executing", "max_failures"):
            if getattr(self, name) < 1:
                raise UsageError(f"SchedulerLimits.{name} is {getattr(self, name)}; give at least 1")


@dataclass(slots=True)
class SchedulerStats:
    """Counts since the stream began."""

    episodes_dispatched: int = 0
    episodes_graded: int = 0
    episodes_failed: int = 0
    episodes_cancelled: int = 0
    groups_kept: int = 0
    groups_zero_variance: int = 0
    groups_failed: int = 0
    """Fewer than two of their episodes were graded (always so with a group size of 1)."""


@dataclass(frozen=True, slots=True)
class Scheduler:
    """Drives groups of episodes.

    >>> scheduler = Scheduler(engine, chat, make_env, options, SchedulerLimits(max_episodes=192))   # doctest: +SKIP
    >>> async with scheduler.run_groups(tasks, group_size=8, groups=24, seed=step) as groups:       # doctest: +SKIP
    ...     async for group in groups: ...
    """

    engine: Engine
    chat: ChatFormat
    make_env: Callable[[], EpisodeEnv]
    options: EpisodeOptions
    limits: SchedulerLimits
    on_transition: TransitionHook | None = None

    def run_groups(
        self,
        tasks: Iterable[TaskRef],
        *,
        group_size: int,
        groups: int | None = None,
        seed: int = 0,
        refill: bool = False,
        max_extra_groups: int = 0,
        admission: AdmissionControl | None = None,
    ) -> GroupStream:
        """A stream of finished groups, in the order they finish; enter it with ``async with``.

        Tasks are drawn from ``tasks`` as there is room, until ``groups`` were dispatched (None: until the tasks end).
        With ``refill``, a group without variance is dropped: it still comes out, but does not count towards
        ``groups``, and another task is drawn for it, at most ``max_extra_groups`` times. Everything that is sampled
        follows from ``seed``, the order of the tasks and the weights.
        """
        if group_size < 1 or group_size > self.limits.max_episodes:
            raise UsageError(
                f"group_size is {group_size}, which must be at least 1 and at most max_episodes "
                f"({self.limits.max_episodes})"
            )
        if refill and groups is None:
            raise UsageError("refill=True needs a number of groups to fill up to; give groups=")
        if admission is not None:
            admission.check(group_size)
        return GroupStream(
            self,
            iter(tasks),
            group_size=group_size,
            groups=groups,
            seed=seed,
            refill=refill,
            extra_groups=max_extra_groups,
            admission=admission,
        )


class GroupStream:
    """The running side of ``Scheduler.run_groups``: an async iterator of groups and an async context manager."""

    def __init__(
        self,
        scheduler: Scheduler,
        tasks: Iterator[TaskRef],
        *,
        group_size: int,
        groups: int | None,
        seed: int,
        refill: bool,
        extra_groups: int,
        admission: AdmissionControl | None,
    ) -> None:
        self.stats = SchedulerStats()
        self.cancelled: tuple[EpisodeSpec, ...] = ()
        """After leaving: the episodes that were dispatched and whose group was not taken."""
        self._scheduler, self._tasks, self._group_size, self._seed = scheduler, tasks, group_size, seed
        self._wanted, self._refill, self._extra_groups = groups, refill, extra_groups
        self._admission = admission
        limits = scheduler.limits
        generating = nullcontext() if limits.max_generating is None else asyncio.Semaphore(limits.max_generating)
        self._gates = StageGates(generating=generating, executing=asyncio.Semaphore(limits.max_executing))
        self._room = asyncio.Semaphore(limits.max_episodes // group_size)
        self._open: dict[int, tuple[EpisodeSpec, ...]] = {}  # groups that nobody has taken yet
        self._ready: deque[Group] = deque()  # bounded by _room: a group's place is free when it is taken
        self._groups: set[asyncio.Task[None]] = set()
        self._dispatcher: asyncio.Task[None] | None = None
        self._dropped = 0
        self._failures_in_a_row = 0
        self._error: BaseException | None = None
        self._changed = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._dispatcher = asyncio.create_task(self._dispatch(), name="palaestra-dispatch")
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        """Cancel what still runs and wait until it is gone."""
        assert self._dispatcher is not None
        tasks = [self._dispatcher, *self._groups]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.cancelled = tuple(spec for specs in self._open.values() for spec in specs)
        self.stats.episodes_cancelled = len(self.cancelled)
        if self._admission is not None:
            await self._admission.settle(len(self.cancelled), accepted=False)
        self._open.clear()

    def __aiter__(self) -> AsyncIterator[Group]:
        return self

    async def __anext__(self) -> Group:
        """The next finished group. ``UsageError`` of an episode, and too many failures in a row, are raised here."""
        if self._dispatcher is None:
            raise UsageError("enter the stream first: async with scheduler.run_groups(...) as groups")
        while self._error is not None or not self._ready:
            if self._error is not None:
                raise self._error
            if self._dispatcher.done() and not self._groups:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        group = self._ready.popleft()
        del self._open[group.index]
        self._room.release()
        if self._admission is not None:
            await self._admission.settle(self._group_size, accepted=not self._drops(group))
        return group

    def _drops(self, group: Group) -> bool:
        return self._refill and group.zero_variance

    async def _dispatch(self) -> None:
        """Start groups while there is room for them and need of them; the last thing it does is wake the consumer."""
        index = 0
        try:
            while await self._needs_another(index):
                await self._room.acquire()
                if self._admission is not None:
                    await self._admission.admit(self._group_size)
                started = False
                try:
                    if self._error is None and (task := next(self._tasks, None)) is not None:
                        self._start(index, task)
                        started = True
                finally:
                    if not started and self._admission is not None:
                        await self._admission.settle(self._group_size, accepted=False)
                if not started:
                    return
                index += 1
        except Exception as error:  # noqa: BLE001 - handed to the consumer, who raises it
            self._error = error
        finally:
            self._changed.set()

    async def _needs_another(self, dispatched: int) -> bool:
        """Whether to start one more group; waits while that depends on groups that still run."""
        if self._wanted is None:
            return True
        while dispatched >= self._wanted + min(self._dropped, self._extra_groups):
            if not self._groups:
                return False
            await asyncio.wait(self._groups, return_when=asyncio.FIRST_COMPLETED)
        return True

    def _start(self, index: int, task: TaskRef) -> None:
        specs = tuple(
            EpisodeSpec(
                episode_id=f"{task.id}#{self._seed}.{index}.{member}",
                task_id=task.id,
                kind=task.kind,
                seed=derive_seed(self._seed, index, task.id, member),
            )
            for member in range(self._group_size)
        )
        self._open[index] = specs
        self.stats.episodes_dispatched += len(specs)
        running = asyncio.create_task(self._run_group(index, task, specs), name=f"palaestra-group-{index}")
        self._groups.add(running)
        running.add_done_callback(self._group_ended)

    def _group_ended(self, task: asyncio.Task[None]) -> None:
        self._groups.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._error = task.exception()
        self._changed.set()

    async def _run_group(self, index: int, task: TaskRef, specs: tuple[EpisodeSpec, ...]) -> None:
        async with asyncio.TaskGroup() as episodes:
            running = [episodes.create_task(self._run_one(spec)) for spec in specs]
        group = Group(index, task.id, task.kind, tuple(episode.result() for episode in running))
        if not group.zero_variance:
            self.stats.groups_kept += 1
        elif len(group.graded) >= 2:
            self.stats.groups_zero_variance += 1
        else:
            self.stats.groups_failed += 1
        self._dropped += self._drops(group)
        self._ready.append(group)

    async def _run_one(self, spec: EpisodeSpec) -> EpisodeResult:
        """One episode; whatever goes wrong is in its result. ``UsageError`` ends the stream as well."""
        scheduler = self._scheduler
        try:
            result = await run_episode(
                spec,
                make_env=scheduler.make_env,
                engine=scheduler.engine,
                chat=scheduler.chat,
                options=scheduler.options,
                gates=self._gates,
                on_transition=scheduler.on_transition,
            )
        except Exception as error:  # noqa: BLE001 - recorded as a failure without reward, counted and logged
            if isinstance(error, UsageError):
                self._stop(error)
            else:
                _log.exception("episode %s failed", spec.episode_id)
            result = EpisodeResult.of_failure(spec, f"{type(error).__name__}: {error}")
        self._count(result)
        return result

    def _count(self, result: EpisodeResult) -> None:
        if result.reward is not None:
            self.stats.episodes_graded += 1
            self._failures_in_a_row = 0
            return
        self.stats.episodes_failed += 1
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= self._scheduler.limits.max_failures:
            self._stop(
                InfrastructureError(
                    f"{self._failures_in_a_row} episodes in a row failed; the last cause was {result.failure}"
                )
            )

    def _stop(self, error: Exception) -> None:
        self._error = self._error or error
        self._changed.set()
