"""A set of tasks: by id, by kind, sampled with a seed. Tasks are made when asked for, so a set may be endless-ish."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from palaestra.envs.errors import UsageError
from palaestra.envs.tasks.task import Task


@dataclass(frozen=True, slots=True)
class TaskEntry:
    """A task that is known by id and kind, and made on demand. ``make()`` returns the same task every time."""

    id: str
    kind: str
    make: Callable[[], Task]


class TaskSet:
    """An ordered, immutable set of tasks.

    >>> tasks = TaskSet.of([task])                                       # doctest: +SKIP
    >>> tasks.sample(np.random.default_rng(0)).id                        # doctest: +SKIP
    """

    def __init__(self, entries: Iterable[TaskEntry], *, name: str = "tasks") -> None:
        self.name = name
        self._entries: dict[str, TaskEntry] = {}
        for entry in entries:
            if entry.id in self._entries:
                raise UsageError(f"task set {name!r}: the id {entry.id!r} occurs twice")
            self._entries[entry.id] = entry
        if not self._entries:
            raise UsageError(f"task set {name!r} is empty")
        self._ids = tuple(self._entries)
        kinds: dict[str, list[str]] = {}
        for entry in self._entries.values():
            kinds.setdefault(entry.kind, []).append(entry.id)
        self._by_kind: Mapping[str, tuple[str, ...]] = {kind: tuple(ids) for kind, ids in kinds.items()}

    @classmethod
    def of(cls, tasks: Iterable[Task], *, name: str = "tasks") -> TaskSet:
        """A set of tasks that already exist."""
        return cls((TaskEntry(task.id, task.kind, lambda task=task: task) for task in tasks), name=name)  # type: ignore[misc]

    def __len__(self) -> int:
        return len(self._ids)

    def __iter__(self) -> Iterator[Task]:
        return (entry.make() for entry in self._entries.values())

    def __contains__(self, task_id: object) -> bool:
        return task_id in self._entries

    @property
    def ids(self) -> tuple[str, ...]:
        return self._ids

    @property
    def kinds(self) -> Mapping[str, tuple[str, ...]]:
        """Kind to the ids of that kind, in order."""
        return self._by_kind

    def entry(self, task_id: str) -> TaskEntry:
        """Id and kind of a task, without making it; an unknown id is a ``UsageError`` that names the nearest one."""
        entry = self._entries.get(task_id)
        if entry is None:
            near = difflib.get_close_matches(task_id, self._ids, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; the first is {self._ids[0]!r}"
            raise UsageError(f"task set {self.name!r} has no task {task_id!r}{hint}")
        return entry

    def get(self, task_id: str) -> Task:
        """The task with that id; an unknown id is a ``UsageError`` that names the nearest one."""
        return self.entry(task_id).make()

    def sample(self, rng: np.random.Generator) -> Task:
        """One task, every id equally likely."""
        return self._entries[self._ids[int(rng.integers(len(self._ids)))]].make()

    def select(self, *, kinds: Iterable[str] | None = None, limit: int | None = None) -> TaskSet:
        """The tasks of these kinds, the first ``limit`` of them; unknown kinds are a ``UsageError``."""
        wanted = set(self._by_kind if kinds is None else kinds)
        if unknown := wanted - set(self._by_kind):
            raise UsageError(f"unknown task kinds {sorted(unknown)}; this set has {sorted(self._by_kind)}")
        chosen = [entry for entry in self._entries.values() if entry.kind in wanted]
        return TaskSet(chosen[:limit], name=self.name)

    def shuffled(self, seed: int) -> TaskSet:
        """The same tasks in an order that depends only on ``seed``."""
        order = np.random.default_rng(seed).permutation(len(self._ids))
        return TaskSet((self._entries[self._ids[int(i)]] for i in order), name=self.name)
