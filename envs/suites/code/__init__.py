"""Tasks about code: the built-in ones, and the repair lines of the demo (in ``repair_lines``).

One module a kind; each ends with its ``FAMILIES``. How they are written stands in ``authoring``.
"""

from __future__ import annotations

from palaestra.envs.errors import UsageError
from palaestra.envs.suites.code import (
    algorithm,
    check,
    compute,
    parse,
    program,
    repair,
    repair_pitfalls,
    transform,
    write,
)
from palaestra.envs.suites.code.authoring import Family
from palaestra.envs.tasks.task_set import TaskSet

FAMILIES: tuple[Family, ...] = (
    *write.FAMILIES,
    *repair.FAMILIES,
    *repair_pitfalls.FAMILIES,
    *parse.FAMILIES,
    *compute.FAMILIES,
    *transform.FAMILIES,
    *algorithm.FAMILIES,
    *program.FAMILIES,
    *check.FAMILIES,
)


def builtin(*, seeds: int = 4) -> TaskSet:
    """The built-in tasks of AgentCode-v0: every fixed one, and ``seeds`` (1..1000) of each generator.

    Ids are stable: ``write/roman``, ``parse/duration-002``. A larger ``seeds`` only adds tasks.
    """
    if not 1 <= seeds <= 1000:
        raise UsageError(f"seeds of each generator must lie in 1..1000, got {seeds}")
    return TaskSet((entry for family in FAMILIES for entry in family.entries(seeds)), name="builtin")
