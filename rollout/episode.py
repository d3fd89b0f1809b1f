"""One episode, driven from its first prompt to its reward.

The states are a table; a transition that is not in it is a bug and raises.

How an episode ends
-------------------
===================  ============================================  ==============================  ===========
ending               when                                          reward                          trained on?
===================  ============================================  ==============================  ===========
``graded``           the environment ended it                      the verdict's                   yes
``truncated``        an action reached ``max_action_tokens``       0, without running the action   yes
                     and ``truncated_action="zero"``
``context``          no room is left in ``max_context_tokens``     the verdict on what is there    yes
``failed``           infrastructure failed, retries are spent      None                            no
===================  ============================================  ==============================  ===========
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, Protocol

from palaestra.envs.errors import GraderFault, InfrastructureError, UsageError
from palaestra.rollout.chat import ChatFormat
from palaestra.rollout.engines.protocol import Engine, FinishReason, SamplingParams
from palaestra.rollout.trajectory import Trajectory

_log = logging.getLogger(__name__)


class EpisodeState(StrEnum):
    QUEUED = "queued"
    ACQUIRING = "acquiring"
    GENERATING = "generating"
    EXECUTING = "executing"
    GRADING = "grading"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


_S = EpisodeState
TRANSITIONS: Mapping[EpisodeState, frozenset[EpisodeState]] = {
    _S.QUEUED: frozenset({_S.ACQUIRING, _S.FAILED, _S.CANCELLED}),
    _S.ACQUIRING: frozenset({_S.GENERATING, _S.ACQUIRING, _S.FAILED, _S.CANCELLED}),
    _S.GENERATING: frozenset({_S.EXECUTING, _S.GRADING, _S.ACQUIRING, _S.FAILED, _S.CANCELLED}),
    _S.EXECUTING: frozenset({_S.GENERATING, _S.GRADING, _S.ACQUIRING, _S.FAILED, _S.CANCELLED}),
    _S.GRADING: frozenset({_S.DONE, _S.ACQUIRING, _S.FAILED, _S.CANCELLED}),
    _S.DONE: frozenset(),
    _S.FAILED: frozenset(),
    _S.CANCELLED: frozenset(),
}
"""Back to acquiring is a retry: everything of the attempt is thrown away."""

Ending = Literal["graded", "truncated", "context", "failed"]
StepReturn = tuple[str, float, bool, bool, dict[str, Any]]


class EpisodeEnv(Protocol):
    """What an episode needs of its environment; ``AsyncAgentEnv`` is one."""

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]: ...

    async def step(self, action: str) -> StepReturn: ...

    async def conclude(self) -> StepReturn:
        """End the episode now and grade what is there."""

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class EpisodeOptions:
    """The rules of an episode that the rollout sets; turn and execution limits are the environment's."""

    max_action_tokens: int
    """Sampled tokens of one action, its stop id included."""
    max_context_tokens: int
    """Tokens of the whole episode; at most what engine and learner hold."""
    temperature: float = 1.0
    truncated_action: Literal["zero", "run"] = "zero"
    """What an action cut off by ``max_action_tokens`` means: the episode ends with reward 0, or it is run as it is."""
    retries: int = 2
    """Fresh attempts after an infrastructure failure."""
    timeout_s: float | None = None
    """A longer episode, its retries and all its waiting included, is ended as failed."""

    def __post_init__(self) -> None:
        for name in ("max_action_tokens", "max_context_tokens"):
            if getattr(self, name) < 1:
                raise UsageError(f"EpisodeOptions.{name} is {getattr(self, name)}; give at least 1")
        if self.retries < 0:
            raise UsageError(f"EpisodeOptions.retries is {self.retries}; give 0 or more")


@dataclass(frozen=True, slots=True)
class EpisodeSpec:
    """Which attempt at which task. The id is the caller's and is unique among what runs."""

    episode_id: str
    task_id: str
    kind: str
    seed: int
    """Decides every sampled token, together with weights and observations."""


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """One turn as text, for display and for later reading; training never looks here."""

    action: str
    observation: str
    """What the environment answered, before the chat format cut it; "" when the action was not run."""
    finish_reason: FinishReason
    sampled_tokens: int
    executed: bool = True
    """False for an action that was cut off and so never run."""


@dataclass(frozen=True, slots=True)
class EpisodeResult:
    """A finished episode. ``reward`` is None exactly when nothing was graded, which is when ``failure`` is set."""

    spec: EpisodeSpec
    ending: Ending
    trajectory: Trajectory
    reward: float | None
    passed: bool
    instruction: str
    turns: tuple[TurnRecord, ...]
    failure: str | None = None
    attempts: int = 1
    generating_s: float = 0.0
    executing_s: float = 0.0
    grading_s: float = 0.0

    @classmethod
    def of_failure(cls, spec: EpisodeSpec, failure: str) -> EpisodeResult:
        """An episode of which nothing is left but why it failed."""
        return cls(spec, "failed", Trajectory(), None, False, "", (), failure)

    @property
    def pass_turn(self) -> int | None:
        """The turn (from 1) whose action passed; None when none did."""
        return sum(turn.executed for turn in self.turns) if self.passed else None

    @property
    def truncated_actions(self) -> int:
        """Actions that were cut off by a token limit."""
        return sum(turn.finish_reason == "length" for turn in self.turns)


@dataclass(frozen=True, slots=True)
class StageGates:
    """Limits on how many episodes are in a stage at once; each is entered with ``async with``."""

    generating: AbstractAsyncContextManager[Any] = field(default_factory=nullcontext)
    executing: AbstractAsyncContextManager[Any] = field(default_factory=nullcontext)


TransitionHook = Callable[[EpisodeSpec, EpisodeState, EpisodeState], None]


class IllegalTransition(RuntimeError):
    """The driver of an episode is at fault."""


class StateMachine:
    """The state of one episode; ``to`` allows what ``TRANSITIONS`` holds and tells the hook."""

    def __init__(self, spec: EpisodeSpec, on_transition: TransitionHook | None = None) -> None:
        self.state = EpisodeState.QUEUED
        self._spec, self._on_transition = spec, on_transition

    def to(self, state: EpisodeState) -> None:
        before = self.state
        if state not in TRANSITIONS[before]:
            raise IllegalTransition(f"episode {self._spec.episode_id}: {before} -> {state} is not a transition")
        self.state = state
        if self._on_transition is not None:
            self._on_transition(self._spec, before, state)


class _ReportedFailure(InfrastructureError):
    """What the environment put into ``info["failure"]``."""


async def run_episode(
    spec: EpisodeSpec,
    *,
    make_env: Callable[[], EpisodeEnv],
    engine: Engine,
    chat: ChatFormat,
    options: EpisodeOptions,
    gates: StageGates | None = None,
    on_transition: TransitionHook | None = None,
) -> EpisodeResult:
    """Drive one episode to its end, with fresh attempts after infrastructure failures.

    Every attempt has an environment of its own, which is closed whatever happens. ``UsageError`` is the caller's and
    passes through, as does cancellation; an infrastructure failure that outlives its retries is a result.
    """
    machine = StateMachine(spec, on_transition)
    try:
        async with asyncio.timeout(options.timeout_s) as deadline:
            for attempt in range(1, options.retries + 2):
                run = _Attempt(spec, engine, chat, options, gates or StageGates(), machine)
                try:
                    return await run.drive(make_env, attempt)
                except InfrastructureError as error:
                    failure = str(error) if type(error) is _ReportedFailure else f"{type(error).__name__}: {error}"
                    _log.warning(
                        "episode %s, attempt %d of %d: %s", spec.episode_id, attempt, options.retries + 1, failure
                    )
            machine.to(EpisodeState.FAILED)
            return run.result("failed", attempts=attempt, failure=failure)
    except BaseException as error:
        timed_out = isinstance(error, TimeoutError) and deadline.expired()
        machine.to(EpisodeState.FAILED if isinstance(error, Exception) else EpisodeState.CANCELLED)
        if timed_out:
            return run.result(
                "failed", attempts=attempt, failure=f"TimeoutError: it took more than {options.timeout_s:g} s"
            )
        raise


class _Attempt:
    """One attempt at an episode: its environment, its trajectory and its clock."""

    def __init__(
        self,
        spec: EpisodeSpec,
        engine: Engine,
        chat: ChatFormat,
        options: EpisodeOptions,
        gates: StageGates,
        machine: StateMachine,
    ) -> None:
        self._spec, self._engine, self._chat, self._options = spec, engine, chat, options
        self._gates, self._machine = gates, machine
        self._trajectory = Trajectory()
        self._turns: list[TurnRecord] = []
        self._instruction = ""
        self._seconds = {EpisodeState.GENERATING: 0.0, EpisodeState.EXECUTING: 0.0, EpisodeState.GRADING: 0.0}

    async def drive(self, make_env: Callable[[], EpisodeEnv], attempt: int) -> EpisodeResult:
        """Run to the end, or raise ``InfrastructureError``."""
        self._machine.to(EpisodeState.ACQUIRING)
        env = make_env()
        try:
            async with self._gates.executing:
                self._instruction, info = await env.reset(seed=self._spec.seed, options={"task_id": self._spec.task_id})
            _raise_failure(info)
            self._trajectory.append_given(self._chat.opening(self._instruction))
            if len(self._trajectory.ids) >= self._options.max_context_tokens:
                raise UsageError(
                    f"the prompt of task {self._spec.task_id} has {len(self._trajectory.ids)} tokens and "
                    f"max_context_tokens is {self._options.max_context_tokens}, so nothing could be answered; raise "
                    "it, or lower ChatFormat.max_prompt_tokens"
                )
            ended = None
            while ended is None:
                ended = await self._turn(env)
        finally:
            await env.close()
        ending, reward, passed = ended
        self._machine.to(EpisodeState.DONE)
        return self.result(ending, reward=reward, passed=passed, attempts=attempt)

    async def _turn(self, env: EpisodeEnv) -> tuple[Ending, float, bool] | None:
        """Generate an action and execute it; the end of the episode, or None when it goes on."""
        options, room = self._options, self._options.max_context_tokens - len(self._trajectory.ids)
        self._machine.to(EpisodeState.GENERATING)
        budget = min(options.max_action_tokens, room)
        async with self._gates.generating:
            started = time.perf_counter()
            generation = await self._engine.generate(self._trajectory.ids, self._sampling(budget))
            self._seconds[EpisodeState.GENERATING] += time.perf_counter() - started
        self._trajectory.append_sampled(generation)
        action = self._chat.action_text(generation.ids)
        sampled = len(generation.ids)
        out_of_room = (
            sampled < options.max_action_tokens
        )  # the context ended, ours or the engine's, not the action's limit
        if generation.finish_reason == "length" and (out_of_room or _is_zero(options)):
            self._turns.append(TurnRecord(action, "", "length", sampled, executed=False))
            if out_of_room:
                return await self._conclude(env)
            self._machine.to(EpisodeState.GRADING)
            return "truncated", 0.0, False

        self._machine.to(EpisodeState.EXECUTING)
        async with self._gates.executing:
            started = time.perf_counter()
            observation, _, terminated, truncated, info = await env.step(action)
            self._seconds[EpisodeState.EXECUTING] += time.perf_counter() - started
        _raise_failure(info)
        self._turns.append(TurnRecord(action, observation, generation.finish_reason, sampled))
        if terminated or truncated:
            self._machine.to(EpisodeState.GRADING)
            return "graded", *_graded(info, self._spec)
        given = self._chat.observation(observation)
        if len(self._trajectory.ids) + len(given) >= options.max_context_tokens:
            return await self._conclude(env)
        self._trajectory.append_given(given)
        return None

    async def _conclude(self, env: EpisodeEnv) -> tuple[Ending, float, bool]:
        """The context is full: grade what is there."""
        self._machine.to(EpisodeState.GRADING)
        async with self._gates.executing:
            started = time.perf_counter()
            *_, info = await env.conclude()
            self._seconds[EpisodeState.GRADING] += time.perf_counter() - started
        _raise_failure(info)
        return "context", *_graded(info, self._spec)

    def _sampling(self, budget: int) -> SamplingParams:
        return SamplingParams(
            max_new_tokens=budget,
            temperature=self._options.temperature,
            stop_ids=self._chat.stop_ids,
            seed=derive_seed(self._spec.seed, len(self._turns)),
        )

    def result(
        self,
        ending: Ending,
        *,
        attempts: int,
        reward: float | None = None,
        passed: bool = False,
        failure: str | None = None,
    ) -> EpisodeResult:
        """What is known of this attempt, as the episode's result."""
        return EpisodeResult(
            spec=self._spec,
            ending=ending,
            trajectory=self._trajectory,
            reward=reward,
            passed=passed,
            instruction=self._instruction,
            turns=tuple(self._turns),
            failure=failure,
            attempts=attempts,
            generating_s=self._seconds[EpisodeState.GENERATING],
            executing_s=self._seconds[EpisodeState.EXECUTING],
            grading_s=self._seconds[EpisodeState.GRADING],
        )


def derive_seed(*parts: int | str) -> int:
    """A seed of 63 bits that depends on every part and on their order."""
    digest = hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _is_zero(options: EpisodeOptions) -> bool:
    return options.truncated_action == "zero"


def _raise_failure(info: Mapping[str, Any]) -> None:
    """An environment reports infrastructure failures as data; here they end the attempt."""
    if info["failure"] is not None:
        raise _ReportedFailure(f"{info['failure']}: {info['failure_message']}")


def _graded(info: Mapping[str, Any], spec: EpisodeSpec) -> tuple[float, bool]:
    reward, verdict = info["reward"], info["verdict"]
    if reward is None or verdict is None:
        raise GraderFault(f"task {spec.task_id}: the episode ended without a verdict; the environment must grade it")
    return float(reward), bool(verdict.passed)
