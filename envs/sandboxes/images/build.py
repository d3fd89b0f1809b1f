"""Building an image from a Containerfile, so that one that is stopped leaves nothing.

``podman build`` that is killed leaves the container that it works in, and with an OCI runtime also the processes of the
step that ran. So steps run in a chroot, in the process group that is killed, and every build carries a mark, by which
what it left in Podman's storage is found. Podman writes build arguments, used or not, into the notes that it keeps of a
working container.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

from palaestra.envs.errors import ImageUnavailable
from palaestra.envs.sandboxes.images.pull import pull_cure
from palaestra.envs.sandboxes.podman.command import PodmanFailed, run_podman

_MARK = "PALAESTRA_BUILD"
_CLEANING_S = 60.0
_log = logging.getLogger(__name__)


async def build_image(
    file: Path,
    context: Path,
    name: str,
    arguments: Sequence[str],
    *,
    timeout_s: float,
    on_line: Callable[[str], None],
) -> None:
    """``podman build``; ``arguments`` are ``NAME=VALUE``. Raises ``ImageUnavailable`` with the cure.

    Its steps have the machine's network, which needs no set-up, as a network of Podman's would.
    """
    mark = secrets.token_hex(12)
    options = ["--isolation=chroot", "--network=host", f"--file={file}", f"--tag={name}"]
    options += [f"--build-arg={argument}" for argument in (f"{_MARK}={mark}", *arguments)]

    def show(line: str) -> None:
        if _MARK not in line:  # Podman's warning that no step used it
            on_line(line)

    try:
        await run_podman("build", *options, str(context), timeout_s=timeout_s, on_line=show)
    except BaseException as error:
        await asyncio.shield(asyncio.create_task(_remove_working_container(mark)))
        if isinstance(error, PodmanFailed):
            known = pull_cure(f"{error}\n{error.output}")
            raise ImageUnavailable(f"{name} could not be built: {error}{known}") from error
        raise


async def _remove_working_container(mark: str) -> None:
    """What cannot be removed is logged: why the build ended is what its caller has to know."""
    try:
        (storage,) = await _lines("info", "--format={{.Store.GraphRoot}}/{{.Store.GraphDriverName}}-containers")
        for container in await _lines("ps", "--all", "--external", "--no-trunc", "--format={{.ID}}"):
            if mark in _notes(Path(storage, container, "userdata", "buildah.json")):
                await _lines("rm", "--force", container)
    except PodmanFailed as error:
        _log.warning("what a build left could not be removed: %s", error)


def _notes(file: Path) -> str:
    try:
        return file.read_text("utf-8", "replace")
    except FileNotFoundError:  # no working container of a build's
        return ""


async def _lines(*arguments: str) -> list[str]:
    """What the command printed, without what Podman logged meanwhile."""
    lines: list[str] = []
    await run_podman(*arguments, timeout_s=_CLEANING_S, on_line=lines.append)
    return [line for line in lines if not line.startswith('time="')]
