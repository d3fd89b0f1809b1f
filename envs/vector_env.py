"""``gymnasium.make_vec("AgentCode-v0", num_envs=N)``: many environments on one loop thread and one pool.

* ``step`` keeps Gymnasium's contract in all three autoreset modes.
* ``send`` and ``recv`` let whoever is ready go on: a straggler blocks nobody. Every action sent is answered exactly
  once, with the number of the environment it belongs to; a ``recv`` that times out loses nothing.
* A failure of the infrastructure is a reply of its environment alone (reward NaN, truncated); the next episode there
  gets a new cell.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from palaestra.envs import loop
from palaestra.envs.agent_env import OWN_ARGUMENTS
from palaestra.envs.async_env import AsyncAgentEnv, StepResult
from palaestra.envs.errors import UsageError
from palaestra.envs.options import EnvOptions
from palaestra.envs.shared_pools import PoolLease
from palaestra.envs.spaces import UnicodeText
from palaestra.envs.tasks.load import resolve
from palaestra.envs.tasks.task_set import TaskSet
from palaestra.envs.vector_slots import Replies, Reply, Slot

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
VectorStep = tuple[tuple[str, ...], Floats, Bools, Bools, dict[str, Any]]

_DTYPES: Mapping[str, type] = {
    "turn": np.int64,
    "timed_out": np.bool_,
    "stdout_dropped_bytes": np.int64,
    "stderr_dropped_bytes": np.int64,
    "wall_s": np.float64,
    "executions": np.int64,
    "visible_passed": np.int64,
    "visible_total": np.int64,
}
"""Of the infos that are a number or bool in every environment; the rest may be None somewhere."""


class AgentVectorEnv(VectorEnv[tuple[str, ...], Sequence[str], Any]):
    """Many agent environments. Observations and actions are tuples of ``str``, rewards float64 ``[num_envs]``.

    Args:
        num_envs: How many.
        autoreset_mode: ``NEXT_STEP`` (the default), ``SAME_STEP`` or ``DISABLED``, as in Gymnasium. With ``SAME_STEP``
            the infos hold ``final_obs`` and ``final_info``.
        tasks, backend, options: As for :class:`~palaestra.envs.agent_env.AgentEnv`.
    """

    def __init__(
        self,
        num_envs: int = 1,
        tasks: TaskSet | str | None = None,
        *,
        backend: str = "auto",
        render_mode: str | None = None,
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
        **options: Any,
    ) -> None:
        checked = EnvOptions.of(options, also=(*OWN_ARGUMENTS, "num_envs", "autoreset_mode"))
        if num_envs < 1:
            raise UsageError(f"num_envs must be at least 1, got {num_envs}")
        if render_mode not in (None, "ansi"):
            raise UsageError(f"render_mode={render_mode!r} is not one of None, 'ansi'")
        self.num_envs = num_envs
        self.render_mode = render_mode
        self.autoreset_mode = AutoresetMode(autoreset_mode)
        self.metadata = {"render_modes": ["ansi"], "autoreset_mode": self.autoreset_mode}
        self.single_observation_space = UnicodeText(checked.max_observation_chars)
        self.single_action_space = UnicodeText(checked.max_action_chars)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._lease = PoolLease(backend)
        task_set = resolve(tasks)
        self._slots = [
            Slot(AsyncAgentEnv(task_set, sandboxes=self._lease, **options), self.autoreset_mode)
            for _ in range(num_envs)
        ]
        self._replies = Replies()

    # Gymnasium's contract.

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[tuple[str, ...], dict[str, Any]]:
        """Reset all environments, or those of ``options["reset_mask"]`` (bool ``[num_envs]``).

        An int seed gives environment ``i`` the seed ``seed + i``. The other options go to every reset.
        """
        self._check_idle("reset")
        options = dict(options or {})
        mask = _checked_mask(options.pop("reset_mask", None), self.num_envs)
        seeds = self._seeds(seed)
        super().reset(seed=seed if isinstance(seed, int) else None)
        chosen = [index for index in range(self.num_envs) if mask[index]]

        async def reset_all() -> list[dict[str, Any]]:
            return await asyncio.gather(*(self._slots[i].reset(seeds[i], options) for i in chosen))

        infos: dict[str, Any] = {}
        for index, info in zip(chosen, loop.run(reset_all()), strict=True):
            infos = self._add_info(infos, info, index)
        return tuple(slot.observation for slot in self._slots), infos

    def step(self, actions: Sequence[str]) -> VectorStep:
        """One action each. In ``NEXT_STEP`` mode the action of an environment whose episode is over is ignored."""
        self._check_idle("step")
        if isinstance(actions, str) or len(actions) != self.num_envs:
            raise UsageError(f"step() takes {self.num_envs} actions, got {actions!r:.100}")
        for index in range(self.num_envs):
            self._slots[index].check_ready(index)

        async def step_all() -> list[StepResult]:
            return await asyncio.gather(*(slot.step(action) for slot, action in zip(self._slots, actions, strict=True)))

        infos: dict[str, Any] = {}
        results = loop.run(step_all())
        for index, result in enumerate(results):
            infos = self._add_info(infos, result[4], index)
        return (
            tuple(result[0] for result in results),
            np.array([result[1] for result in results], dtype=np.float64),
            np.array([result[2] for result in results], dtype=np.bool_),
            np.array([result[3] for result in results], dtype=np.bool_),
            infos,
        )

    def render(self) -> tuple[str, ...] | None:
        """The episodes so far, as texts; None without a render mode."""
        return tuple(slot.env.render() for slot in self._slots) if self.render_mode == "ansi" else None

    def close_extras(self, **kwargs: Any) -> None:
        if loop.is_running():  # else nothing was ever opened, or the process is at its end and closed it all
            loop.run(self._close())

    # Whoever is ready goes on.

    def send(self, actions: Sequence[str], env_ids: Sequence[int]) -> None:
        """Start one step in each of these environments; each may have one under way. ``recv`` brings the answers."""
        self._check_open("send")
        if isinstance(actions, str) or len(actions) != len(env_ids):
            raise UsageError(f"send() takes one action an environment: {len(actions)} actions, {len(env_ids)} env_ids")
        if len(set(env_ids)) != len(env_ids):
            raise UsageError(f"send() got an environment twice: {list(env_ids)}")
        for env_id in env_ids:
            if not 0 <= env_id < self.num_envs:
                raise UsageError(f"there is no environment {env_id}; there are {self.num_envs}")
            if env_id in self._replies.outstanding:
                raise AlreadyPendingCallError(f"environment {env_id} has a step under way; recv() it first", "send")
            self._slots[env_id].check_ready(env_id)
        for action, env_id in zip(actions, env_ids, strict=True):
            self._replies.expect(env_id, loop.submit(self._slots[env_id].step(action)))

    def recv(self, min_ready: int = 1, timeout_s: float | None = None) -> list[Reply]:
        """All replies that are there, once ``min_ready`` of them are or ``timeout_s`` have passed (fewer, then).

        Raises what a step raised that is neither the agent's doing nor the infrastructure's.
        """
        self._check_open("recv")
        return self._replies.take(min_ready, timeout_s)

    # Inside.

    async def _close(self) -> None:
        try:
            await asyncio.gather(*(slot.close() for slot in self._slots))
        finally:
            await self._lease.release()

    def _seeds(self, seed: int | Sequence[int | None] | None) -> Sequence[int | None]:
        if seed is None:
            return [None] * self.num_envs
        if isinstance(seed, int):
            return [seed + index for index in range(self.num_envs)]
        if len(seed) != self.num_envs:
            raise UsageError(f"seed takes an int or {self.num_envs} of them, got {len(seed)}")
        return seed

    def _check_open(self, method: str) -> None:
        if self.closed:
            raise ClosedEnvironmentError(f"{method}() was called after close(); make a new environment")

    def _check_idle(self, method: str) -> None:
        self._check_open(method)
        if self._replies.outstanding or self._replies.waiting:
            raise AlreadyPendingCallError(f"{method}() needs every sent action answered; recv() the rest first", method)

    def _add_info(self, vector_infos: dict[str, Any], env_info: dict[str, Any], env_num: int) -> dict[str, Any]:
        """Gymnasium's layout (an array and a mask ``_key`` a key); a value that may be None makes an object array."""
        for key, value in env_info.items():
            if isinstance(value, dict):
                vector_infos[key] = self._add_info(vector_infos.get(key, {}), value, env_num)
            else:
                if key not in vector_infos:
                    dtype = _DTYPES.get(key, object)
                    vector_infos[key] = np.full(self.num_envs, None if dtype is object else 0, dtype=dtype)
                vector_infos[key][env_num] = value
            vector_infos.setdefault(f"_{key}", np.zeros(self.num_envs, dtype=np.bool_))[env_num] = True
        return vector_infos


def _checked_mask(mask: Any, num_envs: int) -> Bools:
    if mask is None:
        return np.ones(num_envs, dtype=np.bool_)
    if not isinstance(mask, np.ndarray) or mask.shape != (num_envs,) or mask.dtype != np.bool_ or not mask.any():
        raise UsageError(f"options['reset_mask'] must be a bool array of shape ({num_envs},) with a True, got {mask!r}")
    return mask
