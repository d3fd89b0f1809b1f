"""``gymnasium.make("AgentCode-v0")``: one environment, synchronous."""

from __future__ import annotations

from typing import Any

import gymnasium
from gymnasium.error import ClosedEnvironmentError

from palaestra.envs import loop
from palaestra.envs.async_env import AsyncAgentEnv, StepResult
from palaestra.envs.errors import UsageError
from palaestra.envs.options import EnvOptions
from palaestra.envs.shared_pools import PoolLease
from palaestra.envs.spaces import UnicodeText
from palaestra.envs.tasks.load import resolve
from palaestra.envs.tasks.task_set import TaskSet

OWN_ARGUMENTS = ("tasks", "backend", "render_mode")


class AgentEnv(gymnasium.Env[str, str]):
    """An agent writes and runs code in a sandbox and is judged by tests.

    Observation and action are text. The first observation is the task; every further one is only what is new. See
    :class:`~palaestra.envs.async_env.AsyncAgentEnv`, whose facade this is, for rewards, endings and failures.

    Args:
        tasks: None or ``"builtin"`` for the tasks that come with Palaestra, a ``TaskSet``, ``"humaneval:PATH"``, or
            the path of a JSONL file of tasks.
        backend: ``"auto"``, ``"podman"`` or ``"bubblewrap"``; see ``palaestra doctor``.
        render_mode: ``"ansi"`` makes ``render()`` return the episode so far.
        options: The fields of :class:`~palaestra.envs.options.EnvOptions`. An unknown one is a ``UsageError``.

    >>> env = gymnasium.make("AgentCode-v0")                                     # doctest: +SKIP
    >>> observation, info = env.reset(seed=0)                                    # doctest: +SKIP
    >>> answer = "```python path=solution.py\\n...\\n```\\n<submit/>"              # doctest: +SKIP
    >>> observation, reward, terminated, truncated, info = env.step(answer)      # doctest: +SKIP
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi"], "render_fps": 1}  # noqa: RUF012 - as Gymnasium declares it

    def __init__(
        self,
        tasks: TaskSet | str | None = None,
        *,
        backend: str = "auto",
        render_mode: str | None = None,
        **options: Any,
    ) -> None:
        checked = EnvOptions.of(options, also=OWN_ARGUMENTS)
        if render_mode not in (None, "ansi"):
            raise UsageError(f"render_mode={render_mode!r} is not one of None, 'ansi'")
        self.render_mode = render_mode
        self.observation_space = UnicodeText(checked.max_observation_chars)
        self.action_space = UnicodeText(checked.max_action_chars)
        self._lease = PoolLease(backend)
        self._core = AsyncAgentEnv(resolve(tasks), sandboxes=self._lease, **options)
        self._closed = False

    @property
    def tasks(self) -> TaskSet:
        return self._core.tasks

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self._check_open("reset")
        return loop.run(self._core.reset(seed=seed, options=options))

    def step(self, action: str) -> StepResult:
        self._check_open("step")
        return loop.run(self._core.step(action))

    def render(self) -> str | None:
        """The episode so far, as text; None without a render mode."""
        self._check_open("render")
        return self._core.render() if self.render_mode == "ansi" else None

    def close(self) -> None:
        """Give the cell back, and the pool where no other environment uses it. Idempotent."""
        if not self._closed:
            self._closed = True
            if loop.is_running():  # else nothing was ever opened, or the process is at its end and closed it all
                loop.run(self._close())

    async def _close(self) -> None:
        try:
            await self._core.close()
        finally:
            await self._lease.release()

    def _check_open(self, method: str) -> None:
        if self._closed:
            raise ClosedEnvironmentError(f"{method}() was called after close(); make a new environment")
