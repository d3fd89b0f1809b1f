"""Judge a solution by a check program, in a cell that holds the declared artefacts and nothing else."""

from __future__ import annotations

import ast
import builtins

from palaestra.envs.errors import GraderFault
from palaestra.envs.grading import drivers
from palaestra.envs.grading.blame import blame_the_grader_if_a_noop_fails
from palaestra.envs.grading.outcome import ending
from palaestra.envs.grading.verdict import CaseResult
from palaestra.envs.sandboxes.protocol import Python, Sandbox
from palaestra.envs.tasks.task import ScriptGrader, Task


async def run_script_check(task: Task, grader: ScriptGrader, sandbox: Sandbox, *, timeout_s: float) -> CaseResult:
    """Run the check against the solution that lies in the cell, which must be fresh. Raises ``GraderFault``."""
    names = free_names(task.id, grader)
    result = await sandbox.run(
        # Always a new interpreter: what the judge knows must not have been prepared by anything that ran before.
        Python(drivers.source("encode", "decode", "script_check"), interpreter="new"),
        timeout_s=timeout_s,
        stdin=repr((task.solution_path, grader.entry_point, grader.check, names)).encode("utf-8", "surrogatepass"),
        result_kib=8,
    )
    lines = result.result.decode("utf-8", "replace").splitlines()
    fault = next((line for line in lines if line.startswith("fault ")), None)
    if fault is not None:
        raise GraderFault(f"task {task.id!r}: {fault.removeprefix('fault ')}; correct the task's grader.check")
    if not lines or lines[0] != "ready":
        await blame_the_grader_if_a_noop_fails(task, sandbox, result, timeout_s)
    if lines == ["ready", "passed"]:
        return CaseResult("check", "passed")
    if lines and lines[-1].startswith("failed "):
        return CaseResult("check", "wrong" if lines[-1] == "failed AssertionError" else "error", "the check failed")
    status, why = ending(result, timeout_s)
    return CaseResult("check", status, why)


def free_names(task_id: str, grader: ScriptGrader) -> tuple[str, ...]:
    """The names a check reads and nobody gives it: functions of the solution. Raises ``GraderFault``."""
    try:
        tree = ast.parse(grader.check)
    except SyntaxError as error:
        raise GraderFault(f"task {task_id!r}: grader.check is not valid Python: {error}") from None
    given = set(dir(builtins)) | {"candidate", "__name__"}
    read: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else given).add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            given.add(node.name)
        elif isinstance(node, ast.arg):
            given.add(node.arg)
        elif isinstance(node, ast.alias):
            given.add((node.asname or node.name).split(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            given.add(node.name)
    return tuple(sorted(read - given))
