"""Small real tasks, and real sandboxes to run them in.

A module's tests share one pool and its event loop: ``pytestmark = pytest.mark.asyncio(loop_scope="module")``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, settings

from palaestra.envs.sandboxes import open_pool
from palaestra.envs.sandboxes.protocol import Sandbox, SandboxPool
from palaestra.envs.tasks.task import FunctionCase, FunctionGrader, Limits, ScriptGrader, StdioCase, StdioGrader, Task
from palaestra.envs.tasks.task_set import TaskSet

# A busy machine is no finding.
settings.register_profile("no timing", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("no timing")

RIGHT = "def add(a, b):\n    return a + b\n"
WRONG = "def add(a, b):\n    return a - b\n"


def function_task(**changes: Any) -> Task:
    """Add two things; the file in the cell subtracts them. Keyword arguments change fields of the task."""
    grader = FunctionGrader(
        entry_point="add",
        visible=(FunctionCase.of(1, 2, expected=3), FunctionCase.of("a", "b", expected="ab")),
        hidden=(FunctionCase.of(40, 2, expected=42), FunctionCase.of([1], [2], expected=[1, 2])),
    )
    fields: dict[str, Any] = {
        "id": "add",
        "kind": "repair",
        "instruction": "Repair add(a, b) in solution.py.",
        "files": {"solution.py": WRONG},
        "reference": {"solution.py": RIGHT},
        "grader": grader,
        "limits": Limits(step_s=5.0),
    }
    return Task(**{**fields, **changes})


def stdio_task(**changes: Any) -> Task:
    fields: dict[str, Any] = {
        "id": "double",
        "kind": "program",
        "instruction": "Read numbers, one a line, and print each doubled.",
        "reference": {"solution.py": "import sys\nfor line in sys.stdin:\n    print(2 * int(line))\n"},
        "grader": StdioGrader(
            visible=(StdioCase(stdin="1\n2\n", stdout="2\n4\n"),), hidden=(StdioCase(stdin="70\n", stdout="140"),)
        ),
        "limits": Limits(step_s=5.0),
    }
    return Task(**{**fields, **changes})


SCRIPT_CHECK = """
SECRET = 987654321

def check(candidate):
    assert candidate(2, 3) == 5
    assert candidate('x', 'y') == 'xy'
    assert candidate(SECRET, 1) == SECRET + 1
"""


def script_task(**changes: Any) -> Task:
    grader = ScriptGrader(entry_point="add", check=changes.pop("check", SCRIPT_CHECK))
    return function_task(**{"id": "checked", "kind": "check", "grader": grader, **changes})


@pytest.fixture
def make_function_task() -> Callable[..., Task]:
    return function_task


@pytest.fixture
def make_stdio_task() -> Callable[..., Task]:
    return stdio_task


@pytest.fixture
def make_script_task() -> Callable[..., Task]:
    return script_task


@pytest.fixture
def three_tasks() -> TaskSet:
    """One task of each kind of grader: ``add``, ``double`` and ``checked``."""
    return TaskSet.of([function_task(), stdio_task(), script_task()], name="three")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[SandboxPool]:
    async with await open_pool() as opened:
        yield opened


@pytest_asyncio.fixture(loop_scope="module")
async def cell(pool: SandboxPool) -> AsyncIterator[Sandbox]:
    sandbox = await pool.acquire()
    yield sandbox
    await sandbox.close()
