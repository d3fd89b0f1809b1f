"""What tests of every part share: sandbox backends, and counts that ``--soak`` multiplies.

``backend`` runs a test once on every sandbox backend. One that does not work on this machine is skipped, unless
PALAESTRA_REQUIRE_BACKENDS (a comma-separated list, as CI sets it) names it: then the test fails.
"""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from palaestra.envs.errors import SandboxUnavailable
from palaestra.envs.sandboxes import BackendName, open_pool


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="ten times the counts of the tests marked soak")


@pytest.fixture(scope="session")
def soak_factor(request: pytest.FixtureRequest) -> int:
    """10 under ``--soak``, else 1: what a test marked ``soak`` multiplies its counts with."""
    return 10 if request.config.getoption("--soak") else 1


async def _probe(name: BackendName) -> str | None:
    try:
        await (await open_pool(backend=name)).close()
    except SandboxUnavailable as error:
        return str(error)
    return None


@pytest.fixture(scope="session", params=["bubblewrap", "podman"])
def backend(request: pytest.FixtureRequest) -> BackendName:
    """The name of a backend that works on this machine."""
    return _required(request.param)


@pytest.fixture(scope="session")
def podman() -> BackendName:
    """``"podman"``, where it works."""
    return _required("podman")


def _required(name: BackendName) -> BackendName:
    with ThreadPoolExecutor(1) as thread:
        problem = thread.submit(asyncio.run, _probe(name)).result()
    if problem is not None:
        required = os.environ.get("PALAESTRA_REQUIRE_BACKENDS", "").split(",")
        (pytest.fail if name in required else pytest.skip)(problem.partition("\n")[2] or problem)
    return name
