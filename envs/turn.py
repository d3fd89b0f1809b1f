"""One turn: carry out what the agent said and tell what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from palaestra.envs import observations
from palaestra.envs.actions import RunPython, RunShell, Submit, WriteFile, check_text, parse_blocks
from palaestra.envs.episode_cell import EpisodeCell
from palaestra.envs.errors import CellFull
from palaestra.envs.grading.function_cases import HASH_SEED
from palaestra.envs.grading.grade import run_visible
from palaestra.envs.grading.outcome import CasesRun
from palaestra.envs.grading.verdict import Verdict
from palaestra.envs.options import EnvOptions
from palaestra.envs.sandboxes.protocol import Command, ExecResult, Python, Shell

_SESSION = "episode"
"""Of all shell commands of an episode: what one leaves (working directory, variables) the next one finds, in later
turns too. A replaced cell begins a new one."""


@dataclass(slots=True)
class TurnReport:
    """What a turn came to."""

    observations: list[str] = field(default_factory=list)
    commands: list[ExecResult] = field(default_factory=list)
    """The agent's own, in order."""
    visible: CasesRun | None = None
    """The run of the visible cases on the solution as it lies in the cell at the end of the turn."""
    handed_in: bool = False
    verdict: Verdict | None = None
    parse_error: str | None = None

    @property
    def executions(self) -> list[ExecResult]:
        """Everything that ran before grading: the agent's commands, then the visible cases."""
        return [*self.commands, *(self.visible.executions if self.visible is not None else ())]


async def play_blocks(text: str, cell: EpisodeCell, options: EnvOptions) -> TurnReport:
    """Carry out the actions of a message in order; run the visible cases if a file was written or the solution changed.

    Raises ``ParseError`` before anything is executed.
    """
    report = TurnReport()
    wrote = False
    actions = parse_blocks(text)
    await _mend(cell, report, options)
    for action in actions:
        match action:
            case WriteFile(path, body):
                wrote |= await _write(cell, path, body, report, options)
            case RunPython(code):
                await _run(cell, Python(code, interpreter=options.interpreter), "python", report, options)
            case RunShell(command):
                label = command.strip().split("\n", 1)[0]
                await _run(cell, Shell(command, session=_SESSION), label, report, options)
            case Submit():
                report.handed_in = True
    if not report.handed_in and (wrote or (report.commands and await cell.solution_changed())):
        await _show_visible(cell, report, options)
    return report


async def play_program(text: str, cell: EpisodeCell, options: EnvOptions) -> TurnReport:
    """The text becomes the solution, behind the task's prelude; passing every visible case hands it in."""
    check_text(text)
    report = TurnReport()
    await _mend(cell, report, options)
    prelude = cell.task.prelude
    if prelude and not prelude.endswith("\n"):
        prelude += "\n"
    if await _write(cell, cell.task.solution_path, prelude + text, report, options):
        await _show_visible(cell, report, options)
        report.handed_in = report.visible is None or (report.visible.started and report.visible.all_passed)
    return report


async def _write(cell: EpisodeCell, path: str, body: str, report: TurnReport, options: EnvOptions) -> bool:
    """Whether it could be written."""
    try:
        try:
            await cell.write(path, body.encode())
        except CellFull:
            if not cell.sandbox.broken:
                raise
            # The cell was lost, which says nothing of the file.
            await _mend(cell, report, options)
            await cell.write(path, body.encode())
    except CellFull as error:
        if options.feedback == "last_line":
            report.observations.append(f"OSError: {error}")
        else:
            report.observations.append(f"$ write {path}\n[not written: {error}]")
        return False
    return True


async def _run(cell: EpisodeCell, command: Command, label: str, report: TurnReport, options: EnvOptions) -> None:
    timeout_s = cell.task.limits.step_s if options.step_s is None else options.step_s
    result = await cell.sandbox.run(command, timeout_s=timeout_s, env=HASH_SEED)
    report.commands.append(result)
    report.observations.append(observations.execution(label, result, timeout_s))
    await _mend(cell, report, options)


async def _mend(cell: EpisodeCell, report: TurnReport, options: EnvOptions) -> None:
    """Replace a cell that is lost, whether a command broke it, a file request, or something outside of any turn."""
    if not cell.sandbox.broken:
        return
    left_out = await cell.renew()
    if options.action_format == "blocks":  # a program stands alone, and its observation is that of its own run
        report.observations.append("[the sandbox was replaced; what programs had written is gone]")
        report.observations += observations.not_restored(left_out)


async def _show_visible(cell: EpisodeCell, report: TurnReport, options: EnvOptions) -> None:
    if not cell.task.grader.visible:
        return
    await _mend(cell, report, options)
    run = await run_visible(cell.task, cell.sandbox, interpreter=options.interpreter, step_s=options.step_s)
    report.visible = run
    shown = observations.visible_cases if options.feedback == "terminal" else observations.last_line
    report.observations.append(shown(run))
    await _mend(cell, report, options)
