"""Environment steps per second with a trivial program, beside bare fork + exec of the same interpreter.

Everything is measured for the same time in one run, the bare side before and after, and the table prints it all:

    python benchmarks/env_steps.py --seconds 5

A step here is ``AsyncAgentEnv.step`` with one ``python`` block: parse, run in the cell, render the observation. The
bare side starts the same python3 with the same flags on the same line without any sandbox, one a core. An episode is
``reset`` (a new cell) and one ``step`` with a whole program that is run on visible cases and graded on hidden ones.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rich.console import Console
from rich.table import Table

from palaestra.envs.async_env import AsyncAgentEnv
from palaestra.envs.sandboxes import BackendName, SandboxPool, open_pool
from palaestra.envs.sandboxes.interpreter import find_interpreter
from palaestra.envs.tasks.task import FunctionCase, FunctionGrader, Task
from palaestra.envs.tasks.task_set import TaskSet

LINE = "print(6 * 7)"
ACTION = f"```python\n{LINE}\n```"
SOLUTION = "def f(x):\n    return x + 42\n"
TASK = Task(
    id="trivial",
    kind="benchmark",
    instruction="Print 42.",
    grader=FunctionGrader(
        entry_point="f", visible=(FunctionCase.of(1, expected=43),), hidden=(FunctionCase.of(2, expected=44),)
    ),
    reference={"solution.py": SOLUTION},
)


async def env_steps_per_s(pool: SandboxPool, *, envs: int, interpreter: str, seconds: float) -> float:
    """Steps a second of ``envs`` environments on one pool, each stepping as soon as it has its answer."""

    async def step(env: AsyncAgentEnv) -> None:
        observation, *_ = await env.step(ACTION)
        if "42" not in observation:
            raise RuntimeError(f"the program did not print 42:\n{observation}")

    made = [_env(pool, interpreter=interpreter, max_turns=10**9) for _ in range(envs)]
    for env in made:
        await env.reset(seed=0)
    return await _rate(step, made, seconds)


async def episodes_per_s(pool: SandboxPool, *, envs: int, interpreter: str, seconds: float) -> float:
    """Whole episodes a second, of one program each."""

    async def episode(env: AsyncAgentEnv) -> None:
        await env.reset(seed=0)
        _, reward, *_ = await env.step(SOLUTION)
        if reward != 1.0:
            raise RuntimeError(f"the right program got the reward {reward}")

    options = {"action_format": "program", "feedback": "last_line", "interpreter": interpreter}
    return await _rate(episode, [_env(pool, **options) for _ in range(envs)], seconds)


def _env(pool: SandboxPool, **options: Any) -> AsyncAgentEnv:
    return AsyncAgentEnv(TaskSet.of([TASK]), sandboxes=pool, **options)


async def _rate(call: Callable[[AsyncAgentEnv], Awaitable[None]], envs: list[AsyncAgentEnv], seconds: float) -> float:
    done = 0
    started = time.perf_counter()

    async def again_and_again(env: AsyncAgentEnv) -> None:
        nonlocal done
        while time.perf_counter() - started < seconds:
            await call(env)
            done += 1

    try:
        await asyncio.gather(*map(again_and_again, envs))
        return done / (time.perf_counter() - started)
    finally:
        for env in envs:
            await env.close()


def bare_per_s(*, at_once: int, seconds: float) -> float:
    """The interpreter and the flags of a cell, by fork and exec, ``at_once`` of them under way."""
    interpreter = str(find_interpreter(as_other_user=os.getuid() == 0).executable)
    command = [interpreter, "-s", "-B", "-c", LINE]
    environment = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
    started = time.perf_counter()

    def again_and_again() -> int:
        done = 0
        while time.perf_counter() - started < seconds:
            output = subprocess.run(command, capture_output=True, check=True, env=environment).stdout
            if output != b"42\n":
                raise RuntimeError(f"the bare program printed {output!r}")
            done += 1
        return done

    with ThreadPoolExecutor(at_once) as threads:
        done = sum(future.result() for future in [threads.submit(again_and_again) for _ in range(at_once)])
    return done / (time.perf_counter() - started)


async def measure(backend: BackendName, seconds: float) -> list[tuple[str, float, float]]:
    """(what, times a second, times the bare side's)."""
    rows: list[tuple[str, float, float]] = []
    cores = os.cpu_count() or 1
    async with await open_pool(backend=backend, warm=2) as pool:
        for envs in (1, 64):
            at_once = min(envs, cores)
            before = await asyncio.to_thread(bare_per_s, at_once=at_once, seconds=seconds)
            rates: list[tuple[str, float]] = []
            for interpreter in ("new", "fork"):
                rate = await env_steps_per_s(pool, envs=envs, interpreter=interpreter, seconds=seconds)
                rates.append((f"{envs} envs: step, interpreter={interpreter}", rate))
                rate = await episodes_per_s(pool, envs=envs, interpreter=interpreter, seconds=seconds)
                rates.append((f"{envs} envs: episode of one program, interpreter={interpreter}", rate))
            after = await asyncio.to_thread(bare_per_s, at_once=at_once, seconds=seconds)
            bare = (before + after) / 2
            rows.append((f"bare fork + exec, {at_once} at once, before and after", bare, 1.0))
            rows += [(what, rate, rate / bare) for what, rate in rates]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--backend", default="auto", choices=["auto", "podman", "bubblewrap"])
    arguments = parser.parse_args()
    title = f"Python {sys.version.split()[0]}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    table = Table(title=title, title_justify="left")
    for heading in ("what", "per s", "of bare"):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    for what, rate, share in asyncio.run(measure(arguments.backend, arguments.seconds)):
        table.add_row(what, f"{rate:.0f}", f"{share:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
