"""A driver that never reported: is the grader at fault, or did the submission bring its cell down?

Nothing of the agent's is loaded before a driver reports that it is ready, so a missing report in a fresh cell speaks
for a fault of ours, unless the report was lost with the cell. What a no-op reproduces is infrastructure; what a no-op
doesn't is the agent's doing.
"""

from __future__ import annotations

from palaestra.envs.errors import GraderFault
from palaestra.envs.sandboxes.protocol import ExecResult, Python, Sandbox
from palaestra.envs.tasks.task import Task


async def blame_the_grader_if_a_noop_fails(task: Task, sandbox: Sandbox, lost: ExecResult, timeout_s: float) -> None:
    """Raise ``GraderFault`` if the driver ended by itself without a report, or if a no-op doesn't run either.

    ``lost`` is the run that brought no report, in a cell that held nothing but declared artefacts. Renews the cell.
    """
    if lost.killed_by is None and lost.signal is None:
        raise GraderFault(f"task {task.id!r}: the grader's driver did not start: {lost.stderr_text[-500:]}")
    await sandbox.renew()
    noop = await sandbox.run(Python("pass"), timeout_s=timeout_s)
    if not noop.ok:
        raise GraderFault(f"task {task.id!r}: no program runs in a fresh cell: {noop.stderr_text[-500:]}")
