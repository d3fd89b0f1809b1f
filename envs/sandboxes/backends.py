"""Choosing a backend: what is configured, else rootless Podman where it works, else bubblewrap."""

from __future__ import annotations

import logging
import os
import resource
from typing import Literal, get_args

from palaestra.envs.errors import ImageUnavailable, SandboxUnavailable, UsageError
from palaestra.envs.sandboxes.bubblewrap import BubblewrapBackend
from palaestra.envs.sandboxes.host import Backend
from palaestra.envs.sandboxes.podman.backend import PodmanBackend
from palaestra.envs.sandboxes.pool import Pool
from palaestra.envs.sandboxes.protocol import SandboxSpec

BackendName = Literal["auto", "podman", "bubblewrap"]
ENVIRONMENT_VARIABLE = "PALAESTRA_SANDBOX"
_DEFAULT_SPEC = SandboxSpec()
_DESCRIPTORS = 65_536
_log = logging.getLogger(__name__)


async def open_pool(
    spec: SandboxSpec = _DEFAULT_SPEC,
    *,
    backend: BackendName = "auto",
    cells_per_host: int = 256,
    warm: int = 0,
    idle_s: float = 60.0,
    acquire_s: float = 180.0,
) -> Pool:
    """A pool of cells with the limits of ``spec``, its first host running.

    ``backend="auto"`` takes what the environment variable ``PALAESTRA_SANDBOX`` names, else Podman where it works,
    else bubblewrap. ``cells_per_host=1`` gives every cell a host of its own. ``warm`` cells are kept ready. A
    host after the first in which no cell was in use for ``idle_s`` seconds is closed. An ``acquire`` that takes longer
    than ``acquire_s`` seconds raises ``SandboxUnavailable``.
    Raises ``SandboxUnavailable``, with the cure, where none works.

    >>> pool = await open_pool()                                              # doctest: +SKIP
    >>> sandbox = await pool.acquire()                                        # doctest: +SKIP
    >>> (await sandbox.run(Python("print(6 * 7)"), timeout_s=5)).stdout       # doctest: +SKIP
    b'42\\n'
    """
    if cells_per_host < 1 or warm < 0:
        raise UsageError(f"cells_per_host must be at least 1 and warm not negative: {cells_per_host}, {warm}")
    if not idle_s >= 0 or not acquire_s > 0:
        raise UsageError(f"idle_s must not be negative, and acquire_s above 0: {idle_s}, {acquire_s}")
    allow_many_descriptors()
    problems = []
    for name in candidates(backend, spec):
        try:
            pool = Pool(
                make_backend(name, spec),
                spec,
                cells_per_host=cells_per_host,
                warm=warm,
                idle_s=idle_s,
                acquire_s=acquire_s,
            )
            try:
                await pool.start()
            except BaseException:
                await pool.close()
                raise
        except ImageUnavailable:  # it would be missing on any backend
            raise
        except SandboxUnavailable as error:
            problems.append(f"{name}: {error}")
            _log.info("sandbox backend %s does not work here: %s", name, error)
        else:
            return pool
    raise SandboxUnavailable("no sandbox backend works on this machine.\n" + "\n".join(problems))


def allow_many_descriptors() -> None:
    """Raise this process's soft limit of open files towards its hard one: every cell takes at least one.

    The usual soft limit of 1,024 is only for programs that call select(2); asyncio does not.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(_DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def candidates(backend: str, spec: SandboxSpec = _DEFAULT_SPEC) -> tuple[str, ...]:
    """The backends to try, in order; only Podman for what needs containers."""
    asked = os.environ.get(ENVIRONMENT_VARIABLE, "auto") or "auto" if backend == "auto" else backend
    names = get_args(BackendName)
    if asked not in names:
        raise UsageError(f"unknown sandbox backend {asked!r}; choose one of {', '.join(names)}")
    if asked != "auto":
        return (asked,)
    return ("podman", "bubblewrap") if spec.image is None and spec.runtime is None else ("podman",)


def make_backend(name: str, spec: SandboxSpec) -> Backend:
    """The backend of that name. Raises ``SandboxUnavailable`` when this machine lacks what it needs."""
    if name == "podman":
        return PodmanBackend(spec)
    for option, value in (("image", spec.image), ("runtime", spec.runtime)):
        if value is not None:
            raise SandboxUnavailable(
                f"SandboxSpec.{option}={value!r} needs Podman: bubblewrap has this machine's files and no others; "
                "run as an ordinary user with Podman (`palaestra doctor` says what it still needs here)"
            )
    return BubblewrapBackend(spec)
