"""The environment itself: one episode at a time in one cell, awaitable. Everything else is a facade over it.

Rewards and failures, in the words of ``palaestra.envs.errors``: what the agent did to its cell is an observation;
an ungraded turn is worth 0.0; the graded turn, the last of its episode, is worth what the verdict says; a failure of
the infrastructure ends the episode with ``truncated=True``, a reward of NaN and ``info["failure"]``.

``terminated`` means that the agent handed in (``<submit/>``, or a program that passed every visible test).
``truncated`` means that the turn limit ended the episode (it is then graded as it stands), or a failure did.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
from gymnasium.error import ClosedEnvironmentError, ResetNeeded

from palaestra.envs import observations
from palaestra.envs.actions import ParseError
from palaestra.envs.attribution import FATAL_ATTEMPTS
from palaestra.envs.episode_cell import EpisodeCell
from palaestra.envs.errors import CellFull, InfrastructureError, SandboxDied, UsageError
from palaestra.envs.grading.grade import grade
from palaestra.envs.grading.verdict import CaseResult, Verdict
from palaestra.envs.options import EnvOptions
from palaestra.envs.sandboxes.protocol import SandboxPool
from palaestra.envs.tasks.task import Limits, Task
from palaestra.envs.tasks.task_set import TaskSet
from palaestra.envs.turn import TurnReport, play_blocks, play_program

PoolSource = Callable[[Limits, str | None], Awaitable[SandboxPool]]
StepResult = tuple[str, float, bool, bool, dict[str, Any]]

_FATAL_VERDICT = Verdict(
    passed=False, reward=0.0, cases=(CaseResult("solution", "limit", "grading it brought its sandbox down, twice"),)
)


class AsyncAgentEnv:
    """An agent environment for one event loop; thousands may share a pool.

    Args:
        tasks: What ``reset`` draws from.
        sandboxes: A pool, whose spec then holds for every task, or a function from limits and image to a pool: the
            task's, with the ``step_s`` that applies.
        options: The fields of :class:`~palaestra.envs.options.EnvOptions`. An unknown one is a ``UsageError``.
    """

    def __init__(self, tasks: TaskSet, *, sandboxes: SandboxPool | PoolSource, **options: Any) -> None:
        self.tasks = tasks
        self.options = EnvOptions.of(options)
        self._sandboxes = sandboxes
        self._rng = np.random.default_rng()
        self._cell: EpisodeCell | None = None
        self._task: Task | None = None
        self._actions: list[str] = []
        self._since = 0
        self._visible_passed = 0
        self._transcript: list[str] = []
        self._over = True
        self._closed = False
        self.ever_entered = False
        """Whether a reset ever got a cell: a later failure to get one is then not this machine's nature."""

    @property
    def task(self) -> Task | None:
        """The task of the current episode."""
        return self._task

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Begin an episode in a fresh cell.

        ``seed`` decides the task, and those of later resets without one; ``options={"task_id": ...}`` names it.
        Raises ``UsageError`` for an unknown option or task, ``InfrastructureError`` where no cell can be had.
        """
        if self._closed:
            raise ClosedEnvironmentError("reset() was called after close(); make a new environment")
        if seed is not None:
            self._rng = np.random.default_rng(seed)
        task = self._choose(options or {})
        await self._end()
        self._task, self._actions, self._visible_passed = task, [], 0
        self._since = FATAL_ATTEMPTS.now()
        self._cell = await self._enter_cell(task)
        self._over, self.ever_entered = False, True
        observation = observations.first(task, action_format=self.options.action_format, feedback=self.options.feedback)
        observation = observations.shorten(observation, self.options.max_observation_chars)
        self._transcript = [f"--- task {task.id}\n{observation}"]
        return observation, self._info(TurnReport())

    async def step(self, action: str) -> StepResult:
        """Carry out one action. Returns observation, reward, terminated, truncated, info; see the module."""
        self._check_running("step")
        if not isinstance(action, str):
            raise TypeError(f"an action is a str, got {type(action).__name__}")
        self._actions.append(action)
        return await self._advance(action)

    async def conclude(self) -> StepResult:
        """End the episode now and grade what is there, for a caller whose own budget (context, time) is spent.

        It counts as a truncation. Returns and raises what ``step`` does.
        """
        self._check_running("conclude")
        return await self._advance(None)

    def render(self) -> str:
        """The episode so far, as text."""
        return "\n".join(self._transcript)

    async def close(self) -> None:
        """Give the cell back. Idempotent; the pool is the caller's."""
        self._closed = True
        await self._end()

    # One episode's parts.

    def _check_running(self, method: str) -> None:
        if self._closed:
            raise ClosedEnvironmentError(f"{method}() was called after close(); make a new environment")
        if self._over or self._task is None:
            raise ResetNeeded(f"{method}() needs an episode; call reset() first")

    async def _advance(self, action: str | None) -> StepResult:
        """Play an action, or with None only grade; whatever ends the episode gives its cell back."""
        report = TurnReport()
        try:
            if action is not None:
                report = await self._play(action)
            if action is None or report.handed_in or self._last_turn:
                report.verdict = await self._grade(report)
        except InfrastructureError as error:
            await self._end()
            return self._failed(report, error)
        except BaseException:
            # Cancelled, or a bug: half a turn was carried out, and the episode cannot go on from there.
            await self._end()
            raise
        if report.verdict is not None:
            await self._end()
        return self._told(action or "", report)

    @property
    def _last_turn(self) -> bool:
        assert self._task is not None
        return len(self._actions) >= (self._task.limits.turns or self.options.max_turns)

    def _choose(self, options: dict[str, Any]) -> Task:
        unknown = sorted(set(options) - {"task_id"})
        if unknown:
            raise UsageError(f"reset() got unknown options {unknown}; it takes 'task_id'")
        task_id = options.get("task_id")
        return self.tasks.sample(self._rng) if task_id is None else self.tasks.get(task_id)

    async def _enter_cell(self, task: Task) -> EpisodeCell:
        """A cell with the task's files; one that dies on the way is replaced once."""
        if callable(self._sandboxes):
            step_s = task.limits.step_s if self.options.step_s is None else self.options.step_s
            pool = await self._sandboxes(task.limits.model_copy(update={"step_s": step_s}), task.image)
        else:
            pool = self._sandboxes
        cell = EpisodeCell(pool, task)
        try:
            try:
                await cell.enter()
            except SandboxDied:
                await cell.leave()
                await cell.enter()
        except CellFull as error:
            await cell.leave()
            raise UsageError(f"the files of task {task.id!r} do not fit in its cell: {error}") from None
        except BaseException:
            await cell.leave()
            raise
        return cell

    async def _leave_cell(self) -> None:
        cell, self._cell = self._cell, None
        if cell is not None:
            await cell.leave()

    async def _end(self) -> None:
        self._over = True
        await self._leave_cell()

    async def _play(self, action: str) -> TurnReport:
        assert self._cell is not None
        try:
            if len(action) > self.options.max_action_chars:
                raise ParseError(
                    f"The answer has {len(action)} characters; at most {self.options.max_action_chars} are taken."
                )
            play = play_blocks if self.options.action_format == "blocks" else play_program
            return await play(action, self._cell, self.options)
        except ParseError as error:
            first_line = str(error) if self.options.feedback == "terminal" else str(error).split("\n", 1)[0]
            return TurnReport(observations=[first_line], parse_error=str(error))
        except SandboxDied:
            if not self._is_agents_doing():
                raise
            left_out = await self._cell.replace()
            said = ["OSError: the program broke its sandbox; a new one holds the files."]
            return TurnReport(observations=said + observations.not_restored(left_out))

    async def _grade(self, report: TurnReport) -> Verdict:
        assert self._cell is not None
        assert self._task is not None
        try:
            # The agent did nothing to a cell that was lost between turns: what it wrote is judged all the same.
            lost = self._cell.sandbox.broken
            if lost:
                await self._cell.renew()
            return await grade(
                self._task,
                self._cell.sandbox,
                interpreter=self.options.interpreter,
                step_s=self.options.step_s,
                visible=None if lost else report.visible,
            )
        except SandboxDied:
            if not self._is_agents_doing():
                raise
            return _FATAL_VERDICT

    def _is_agents_doing(self) -> bool:
        assert self._task is not None
        return FATAL_ATTEMPTS.is_agents_doing(self._task.id, self._actions, since=self._since)

    def failure_info(self, error: InfrastructureError, report: TurnReport | None = None) -> dict[str, Any]:
        """The info of a turn, or of a reset, that failed."""
        info = self._info(report or TurnReport())
        return {**info, "failure": type(error).__name__, "failure_message": str(error)}

    def _told(self, action: str, report: TurnReport) -> StepResult:
        """The turn as ``step`` returns it."""
        parts = list(report.observations)
        if report.verdict is not None and self.options.feedback == "terminal":
            parts.append(observations.graded(report.verdict))
        observation = observations.shorten(observations.join(parts), self.options.max_observation_chars)
        self._transcript.append(f"--- turn {len(self._actions)}, action\n{action}\n--- observation\n{observation}")
        info = self._info(report)
        graded = report.verdict is not None
        reward = 0.0 if info["reward"] is None else info["reward"]
        return observation, reward, graded and report.handed_in, graded and not report.handed_in, info

    def _failed(self, report: TurnReport, error: InfrastructureError) -> StepResult:
        info = self.failure_info(error, report)
        self._transcript.append(f"--- turn {len(self._actions)} failed: {type(error).__name__}: {error}")
        return "", math.nan, False, True, info

    def _info(self, report: TurnReport) -> dict[str, Any]:
        """The schema is the same from reset on; what doesn't apply is None, 0 or ""."""
        assert self._task is not None
        executions = report.executions
        last = (report.commands or executions)[-1] if executions else None
        if report.visible is not None:
            self._visible_passed = report.visible.passed
        reward = None
        if report.verdict is not None:
            discount = max(0.0, 1.0 - self.options.turn_penalty * (len(self._actions) - 1))
            reward = report.verdict.reward * discount
        return {
            "task_id": self._task.id,
            "kind": self._task.kind,
            "turn": len(self._actions),
            "exit_code": None if last is None else last.exit_code,
            "signal": None if last is None else last.signal,
            "killed_by": None if last is None else last.killed_by,
            "timed_out": any(result.timed_out for result in executions),
            "stdout": "".join(result.stdout_text for result in executions),
            "stderr": "".join(result.stderr_text for result in executions),
            "stdout_dropped_bytes": sum(result.stdout_dropped_bytes for result in executions),
            "stderr_dropped_bytes": sum(result.stderr_dropped_bytes for result in executions),
            "wall_s": float(sum(result.wall_s for result in executions)),
            "executions": len(executions),
            "visible_passed": self._visible_passed,
            "visible_total": len(self._task.grader.visible),
            "reward": reward,
            "verdict": report.verdict,
            "failure": None,
            "failure_message": None,
            "parse_error": report.parse_error,
        }
