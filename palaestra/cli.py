"""The ``palaestra`` program: names and options; the work is in ``palaestra.commands``.

Exit codes: 0 when all went well, 1 when the work was done and found wanting, 2 for a request that cannot be met
(with one message that says what to do), 130 after an interrupt.
"""

from __future__ import annotations

import difflib
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import gymnasium
import typer
from rich.console import Console

from palaestra.envs import AGENT_CODE
from palaestra.envs.errors import PalaestraError, UsageError
from palaestra.envs.tasks.load import resolve
from palaestra.envs.tasks.task_set import TaskSet

app = typer.Typer(
    name="palaestra",
    help="Train language-model agents by reinforcement on tasks that really execute.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
tasks_app = typer.Typer(help="Look at task sets and check them.", no_args_is_help=True)
app.add_typer(tasks_app, name="tasks")
image_app = typer.Typer(help="Make, list and remove the container images of sandboxes.", no_args_is_help=True)
app.add_typer(image_app, name="image")

TasksOption = Annotated[str, typer.Option("--tasks", help="builtin, humaneval:PATH, or the path of a .jsonl file")]
BackendOption = Annotated[str, typer.Option("--backend", help="auto, podman or bubblewrap")]
LimitOption = Annotated[int | None, typer.Option("--limit", min=1, help="Only the first so many tasks")]
ConcurrencyOption = Annotated[int, typer.Option("--concurrency", min=1, help="Tasks under way at once")]
BUILT_TAG = "localhost/palaestra:latest"
_CONCURRENCY = 2 * (os.cpu_count() or 2)


def command(target: typer.Typer, name: str) -> Callable[[Callable[..., int | None]], Callable[..., int | None]]:
    """Register a function as a command: what it returns is the exit code, and errors become one message each."""

    def register(function: Callable[..., int | None]) -> Callable[..., int | None]:
        @functools.wraps(function)
        def run(*arguments: Any, **options: Any) -> None:
            stderr = Console(stderr=True)
            try:
                code = function(*arguments, **options)
            except KeyboardInterrupt:
                stderr.print("interrupted")
                code = 130
            except PalaestraError as error:
                stderr.print(f"error: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
                code = 2
            raise typer.Exit(code or 0)

        target.command(name)(run)
        return function

    return register


@command(app, "eval")
def eval_command(
    agent: Annotated[str, typer.Option("--agent", help="reference or empty")],
    env: Annotated[str, typer.Option("--env", help="The environment")] = AGENT_CODE,
    tasks: TasksOption = "builtin",
    backend: BackendOption = "auto",
    limit: LimitOption = None,
    concurrency: ConcurrencyOption = _CONCURRENCY,
) -> int:
    """Run an agent over a task set in sandboxes and count what passes."""
    from palaestra.commands.eval import run_eval

    _check_env(env)
    chosen = _tasks(tasks, limit)
    return run_eval(chosen, agent, backend=backend, concurrency=concurrency, console=_console())


@command(app, "doctor")
def doctor_command(
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object (docs/sandbox-setup.md) instead")] = False,
) -> int:
    """Show which sandbox backend is chosen, why, and which limits really hold on this machine.

    Programs in a cell try to go beyond its limits. Exit code 0 when a backend works and every promise holds in the one
    that is chosen; 1 when none works, or a promise is broken. Without delegated control groups a cell's processes
    share no limit of memory: that is a warning with its cure, and no broken promise, since SandboxSpec promises such a
    limit only where groups are delegated.
    """
    from palaestra.commands.doctor import run_doctor

    return run_doctor(_console(), as_json=json)


@command(app, "gc")
def gc_command(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would be removed")] = False,
) -> int:
    """Remove what killed processes have left: containers, folders and processes of sandboxes that nobody owns."""
    from palaestra.commands.gc import run_gc

    return run_gc(_console(), dry_run=dry_run)


@command(tasks_app, "list")
def tasks_list(tasks: TasksOption = "builtin", limit: LimitOption = None) -> None:
    """List the tasks of a set."""
    from palaestra.commands.tasks import list_tasks

    list_tasks(_tasks(tasks, limit), _console())


@command(tasks_app, "validate")
def tasks_validate(
    tasks: TasksOption = "builtin",
    backend: BackendOption = "auto",
    limit: LimitOption = None,
    concurrency: ConcurrencyOption = _CONCURRENCY,
) -> int:
    """Check that every reference passes and every untouched task fails."""
    from palaestra.commands.tasks import validate_tasks

    return validate_tasks(_tasks(tasks, limit), backend=backend, concurrency=concurrency, console=_console())


@command(image_app, "build")
def image_build(
    containerfile: Annotated[
        Path | None, typer.Option(help="Build this Containerfile; its folder is the context")
    ] = None,
    from_registry: Annotated[bool, typer.Option(help="Build Palaestra's Containerfile, on a Python image")] = False,
    tag: Annotated[str, typer.Option(help="The name of what is built from a Containerfile")] = BUILT_TAG,
    build_arg: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="An ARG of the file")] = None,
    timeout_s: Annotated[float, typer.Option(min=1, help="Deadline of the build")] = 1800.0,
) -> int:
    """Make the default image from this machine's own Python, without a registry; or build a Containerfile."""
    from palaestra.commands.image import build_containerfile, build_default_image

    if containerfile is None and not from_registry:
        if build_arg or tag != BUILT_TAG:
            raise UsageError("--tag and --build-arg are for --containerfile PATH or --from-registry")
        return build_default_image(_console())
    if containerfile is not None and from_registry:
        raise UsageError("choose one of --containerfile and --from-registry")
    return build_containerfile(containerfile, tag, build_arg or [], timeout_s, _console())


@command(image_app, "list")
def image_list() -> int:
    """List the images that Palaestra made, pulled or used."""
    from palaestra.commands.image import list_images

    return list_images(_console())


@command(image_app, "rm")
def image_rm(
    names: Annotated[list[str] | None, typer.Argument(metavar="[IMAGE]...")] = None,
    unused: Annotated[bool, typer.Option("--unused", help="All that Palaestra made or pulled and nobody uses")] = False,
) -> int:
    """Remove images; exit code 1 if one of those named is in use."""
    from palaestra.commands.image import remove_images

    return remove_images(names or [], unused, _console())


def main() -> None:
    """Entry point of the ``palaestra`` program."""
    app()


def _console() -> Console:
    return Console()


def _tasks(text: str, limit: int | None) -> TaskSet:
    return resolve(text).select(limit=limit)


def _check_env(name: str) -> None:
    if name != AGENT_CODE:
        near = difflib.get_close_matches(name, list(gymnasium.registry), n=1)
        hint = f"; did you mean {near[0]!r}?" if near and near[0] == AGENT_CODE else ""
        raise UsageError(f"unknown environment {name!r}{hint}; eval runs {AGENT_CODE}")


if __name__ == "__main__":
    main()
