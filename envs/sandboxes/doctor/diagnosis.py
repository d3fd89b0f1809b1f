"""Tries every backend of this machine and puts together what was found."""

from __future__ import annotations

import asyncio

from palaestra.envs.errors import SandboxDied, SandboxUnavailable
from palaestra.envs.sandboxes.backends import (
    ENVIRONMENT_VARIABLE,
    BackendName,
    allow_many_descriptors,
    candidates,
    open_pool,
)
from palaestra.envs.sandboxes.cgroups import Delegation, find_delegation
from palaestra.envs.sandboxes.doctor.limits import SPEC, measure_limits
from palaestra.envs.sandboxes.doctor.machine import examine_machine
from palaestra.envs.sandboxes.doctor.report import BackendReport, Check, Report
from palaestra.envs.sandboxes.doctor.rootless_podman import examine_podman
from palaestra.envs.sandboxes.podman.service import PodmanService

_BACKENDS: tuple[BackendName, ...] = ("podman", "bubblewrap")


async def diagnose() -> Report:
    """Try everything; takes some seconds, most of them CPU seconds that a limit is tried with."""
    allow_many_descriptors()
    delegation = await asyncio.to_thread(find_delegation)
    machine = examine_machine(delegation)
    backends = tuple([await _examine(name, delegation) for name in _BACKENDS])
    chosen, reason = choose({backend.name for backend in backends if backend.works})
    return Report(chosen, reason, machine, backends)


def choose(working: set[str]) -> tuple[str | None, str]:
    """What ``open_pool()`` takes where these backends work, and why."""
    order = candidates("auto")
    chosen = next((name for name in order if name in working), None)
    if len(order) == 1:
        reason = f"the environment variable {ENVIRONMENT_VARIABLE} names {order[0]}"
        reason += "" if chosen else ", which does not work here"
    elif chosen == "podman":
        reason = "rootless Podman works here, and comes first"
    elif chosen:
        reason = "rootless Podman does not work here (see its problem), and bubblewrap does"
    else:
        reason = "no backend works here; each one's problem says what to do"
    return chosen, reason


async def _examine(name: BackendName, delegation: Delegation) -> BackendReport:
    checks: tuple[Check, ...] = ()
    try:
        async with await open_pool(SPEC, backend=name) as pool:
            sandbox = await pool.acquire()
            try:
                checks = await measure_limits(sandbox, delegation)
            finally:
                await sandbox.close()
    except (SandboxUnavailable, SandboxDied) as error:
        problem = str(error).partition("\n")[2] or str(error)
        return BackendReport(name, problem, await _explanation(name))
    return BackendReport(name, None, (*checks, *await _explanation(name)))


async def _explanation(name: BackendName) -> tuple[Check, ...]:
    """What Podman says of itself; nothing where it does not answer, which its problem tells better."""
    if name != "podman":
        return ()
    try:
        service = PodmanService()
        try:
            return await examine_podman(service)
        finally:
            await service.close()
    except SandboxUnavailable:
        return ()
