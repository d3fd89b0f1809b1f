"""The parts of a vector environment: a slot for each environment, and the way home for its replies."""

from __future__ import annotations

import asyncio
import concurrent.futures
import math
import threading
from collections import deque
from dataclasses import dataclass
from typing import Any

from gymnasium.error import NoAsyncCallError, ResetNeeded
from gymnasium.vector import AutoresetMode

from palaestra.envs.async_env import AsyncAgentEnv, StepResult
from palaestra.envs.errors import InfrastructureError, UsageError


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to one action that was sent."""

    env_id: int
    observation: str
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]


class Slot:
    """One environment with its autoreset. Only the loop thread steps it."""

    def __init__(self, env: AsyncAgentEnv, mode: AutoresetMode) -> None:
        self.env, self.mode = env, mode
        self.observation = ""
        self._episode_over = True
        self._started = False
        self._running: asyncio.Task[Any] | None = None
        self._failure: dict[str, Any] | None = None
        """The info of a reset that failed; the step that follows reports it."""

    def check_ready(self, env_id: int) -> None:
        if not self._started:
            raise ResetNeeded(f"environment {env_id} was never reset; call reset() first")
        if self._episode_over and self.mode == AutoresetMode.DISABLED:
            raise ResetNeeded(f"the episode of environment {env_id} is over; reset it through options['reset_mask']")

    async def reset(self, seed: int | None, options: dict[str, Any]) -> dict[str, Any]:
        self._failure = None
        try:
            self.observation, info = await self.env.reset(seed=seed, options=options)
        except InfrastructureError as error:
            self.observation, info = "", self.env.failure_info(error)
            self._failure = info
        self._episode_over, self._started = False, True
        return info

    async def step(self, action: str) -> StepResult:
        self._running = asyncio.current_task()
        try:
            return await self._step(action)
        finally:
            self._running = None

    async def close(self) -> None:
        """Cancel the step under way, wait until it has ended, give the cell back."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])
        await self.env.close()

    async def _step(self, action: str) -> StepResult:
        if self._episode_over:
            info = await self.reset(None, {})
            return self.observation, 0.0, False, False, info
        if self._failure is not None:
            result: StepResult = "", math.nan, False, True, self._failure
            self._failure = None
        else:
            result = await self.env.step(action)
        self.observation, reward, terminated, truncated, info = result
        self._episode_over = terminated or truncated
        if self._episode_over and self.mode == AutoresetMode.SAME_STEP:
            final = {"final_obs": self.observation, "final_info": info}
            info = {**await self.reset(None, {}), **final}
        return self.observation, reward, terminated, truncated, info


class Replies:
    """Between the loop thread, where steps end, and the caller's, where they are taken.

    Each number sent is in exactly one of ``outstanding`` and ``waiting`` until it is taken.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.outstanding: dict[int, concurrent.futures.Future[StepResult]] = {}
        self.waiting: deque[tuple[int, concurrent.futures.Future[StepResult]]] = deque()

    def expect(self, env_id: int, future: concurrent.futures.Future[StepResult]) -> None:
        with self._changed:
            self.outstanding[env_id] = future
        future.add_done_callback(lambda done: self._arrived(env_id, done))

    def _arrived(self, env_id: int, future: concurrent.futures.Future[StepResult]) -> None:
        with self._changed:
            del self.outstanding[env_id]
            self.waiting.append((env_id, future))
            self._changed.notify_all()

    def take(self, min_ready: int, timeout_s: float | None) -> list[Reply]:
        with self._changed:
            sent = len(self.outstanding) + len(self.waiting)
            if not sent:
                raise NoAsyncCallError("recv() without a send(): nothing is under way", "recv")
            if not 1 <= min_ready <= sent:
                raise UsageError(f"min_ready must be between 1 and the {sent} that are under way, got {min_ready}")
            self._changed.wait_for(lambda: len(self.waiting) >= min_ready, timeout_s)
            broken = next((item for item in self.waiting if item[1].exception() is not None), None)
            if broken is not None:
                self.waiting.remove(broken)
                broken[1].result()
            taken, self.waiting = self.waiting, deque()
        return [Reply(env_id, *future.result()) for env_id, future in taken]
