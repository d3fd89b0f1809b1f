"""Remove what killed processes have left of their sandboxes, and nothing of those that live."""

from __future__ import annotations

import asyncio

from rich.console import Console

from palaestra.envs.errors import SandboxUnavailable
from palaestra.envs.sandboxes.podman.service import PodmanService
from palaestra.envs.sandboxes.reap import Reaped, reap


def run_gc(console: Console, *, dry_run: bool) -> int:
    """Reap and say what was. Returns the exit code: 1 if Podman is here and its containers could not be looked at."""
    reaped, problem = asyncio.run(_reap(dry_run))
    show_reaped(reaped, console, dry_run=dry_run)
    if problem is not None:
        console.print(f"Podman's containers were not looked at: {problem}", highlight=False, markup=False)
    return 0 if problem is None else 1


async def _reap(dry_run: bool) -> tuple[Reaped, SandboxUnavailable | None]:
    try:
        podman = PodmanService()
    except SandboxUnavailable:  # not installed, or not for this user: there are no containers of ours
        return await reap(dry_run=dry_run), None
    try:
        return await reap(podman, dry_run=dry_run), None
    except SandboxUnavailable as error:
        return await reap(dry_run=dry_run), error
    finally:
        await podman.close()


def show_reaped(reaped: Reaped, console: Console, *, dry_run: bool) -> None:
    """One line for each thing, then the sum."""
    verb = "would remove" if dry_run else "removed"
    kinds = {"container": reaped.containers, "folder": reaped.folders, "control group": reaped.groups}
    for kind, names in kinds.items():
        for name in names:
            console.print(f"{verb} {kind} {name}", highlight=False, markup=False, soft_wrap=True)
    for name in reaped.unknown:
        text = f"left alone container {name}: its owner cannot be seen from here; if it is gone: podman rm -f {name}"
        console.print(text, highlight=False, markup=False, soft_wrap=True)
    counts = ", ".join(f"{len(names)} {kind}s" for kind, names in kinds.items())
    gone = f"{verb} {counts} and {reaped.processes} processes of runs that are gone"
    console.print(f"{gone}; left alone {reaped.live} hosts of runs that live", highlight=False, soft_wrap=True)
