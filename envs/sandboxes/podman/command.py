"""Podman's command line, for what takes minutes: pulling and building images.

The API could do both, but a client that gives up on it stops nothing: the service goes on pulling. A process can be
ended at its deadline, or when its caller is cancelled, and what it prints meanwhile is progress.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
from collections import deque
from collections.abc import Callable

from palaestra.envs.errors import SandboxUnavailable
from palaestra.envs.sandboxes.images.claims import scratch_folder
from palaestra.envs.sandboxes.podman.service import cure, end_process, environment
from palaestra.envs.sandboxes.waiting import to_the_end

_LINES_KEPT = 20
_LINE_BYTES = 4096


class PodmanFailed(SandboxUnavailable):
    """A command of Podman's failed; ``output`` is the end of what it printed."""

    def __init__(self, problem: str, output: str) -> None:
        errors = [line for line in output.splitlines() if line.startswith("Error")]
        super().__init__(f"{problem}: {errors[-1] if errors else output}{cure(output)}")
        self.output = output


async def run_podman(*arguments: str, timeout_s: float, on_line: Callable[[str], None]) -> None:
    """Run ``podman ARGUMENTS``, and hand on each line that it prints to stdout or stderr.

    However it ends, so have the processes that it started, and what it downloaded and did not keep is gone. Raises
    ``PodmanFailed``.
    """
    program = shutil.which("podman")
    if program is None:
        raise SandboxUnavailable("there is no podman command; run: apt-get install podman crun uidmap")
    with scratch_folder() as folder:
        await _run(program, arguments, timeout_s, on_line, {**environment(), "TMPDIR": str(folder)})


async def _run(
    program: str,
    arguments: tuple[str, ...],
    timeout_s: float,
    on_line: Callable[[str], None],
    variables: dict[str, str],
) -> None:
    process = await asyncio.create_subprocess_exec(
        program,
        *arguments,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=variables,
        start_new_session=True,  # a group of its own, to be ended as a whole
    )
    last: deque[str] = deque(maxlen=_LINES_KEPT)

    def keep(line: str) -> None:
        last.append(line)
        on_line(line)

    try:
        async with asyncio.timeout(timeout_s):
            assert process.stdout is not None
            await _read_lines(process.stdout, keep)
            status = await process.wait()
    except TimeoutError:
        problem = f"`podman {arguments[0]}` did not end within {timeout_s:.0f} s"
        raise PodmanFailed(problem, "\n".join(last)) from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await to_the_end(asyncio.create_task(end_process(process)))
    if status != 0:
        raise PodmanFailed(f"`podman {arguments[0]}` failed", "\n".join(last))


async def _read_lines(stream: asyncio.StreamReader, on_line: Callable[[str], None]) -> None:
    rest = b""
    while data := await stream.read(_LINE_BYTES):
        *lines, rest = (rest + data).replace(b"\r", b"\n").split(b"\n")
        if len(rest) > _LINE_BYTES:
            lines, rest = [*lines, rest], b""
        for line in lines:
            if line.strip():
                on_line(line.decode("utf-8", "replace").strip())
    if rest.strip():
        on_line(rest.decode("utf-8", "replace").strip())
