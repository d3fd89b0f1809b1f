"""When an image is fetched, what is known of it, and what a registry that fails comes to."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from palaestra.envs.errors import ImageUnavailable, UsageError
from palaestra.envs.sandboxes import SandboxSpec, Shell, open_pool
from palaestra.envs.sandboxes.images.pull import pull_cure
from palaestra.envs.sandboxes.images.resolve import named_image
from palaestra.envs.sandboxes.podman.service import PodmanService


@pytest_asyncio.fixture
async def service(registry: Any) -> AsyncIterator[PodmanService]:
    opened = PodmanService()
    yield opened
    await opened.close()


async def digest(service: PodmanService, name: str, policy: Any) -> str:
    image = await named_image(service, name, policy)
    image.claim.release()
    return image.digest


def pulls_of(name: str) -> list[int]:
    """Processes of this machine that pull it."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"pull\0{name}".encode() in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def left_in_the_cache() -> list[Path]:
    return list(Path(os.environ["XDG_CACHE_HOME"]).rglob("scratch-*"))


async def test_a_missing_image_is_pulled_once_and_its_digest_is_known(registry: Any, busybox_files: Any) -> None:
    pushed = registry.push("once:1", busybox_files)
    spec = SandboxSpec(image=f"{registry.host}/once:1")
    for _ in range(2):
        async with await open_pool(spec, backend="podman") as pool:
            backend: Any = pool.backend
            assert backend.image_digest == pushed
            sandbox = await pool.acquire()
            assert (await sandbox.run(Shell("echo here"), timeout_s=30)).stdout == b"here\n"
            await sandbox.close()
    assert len({request for request in registry.requests if request.startswith("once:")}) == 1


async def test_each_policy_asks_the_registry_when_it_says(registry: Any, service: PodmanService) -> None:
    first = registry.push("moving:1", {"file": b"first"})
    name = f"{registry.host}/moving:1"
    with pytest.raises(ImageUnavailable, match="not on this machine"):
        await digest(service, name, "never")
    assert await digest(service, name, "missing") == first

    second = registry.push("moving:1", {"file": b"second"})
    asked = len(registry.requests)
    assert await digest(service, name, "never") == first
    assert await digest(service, name, "missing") == first
    assert len(registry.requests) == asked
    assert await digest(service, name, "newer") == second

    third = registry.push("moving:1", {"file": b"third"})
    assert await digest(service, name, "always") == third
    assert await digest(service, f"{registry.host}/moving@{first}", "missing") == first


async def test_only_newer_goes_on_without_the_registry(
    registry: Any, service: PodmanService, caplog: pytest.LogCaptureFixture
) -> None:
    pushed = registry.push("lonely:1", {"file": b"x"})
    name = f"{registry.host}/lonely:1"
    assert await digest(service, name, "missing") == pushed
    del registry.tags["lonely", "1"]

    with caplog.at_level(logging.WARNING):
        assert await digest(service, name, "newer") == pushed
    assert "going on with the" in caplog.text
    with pytest.raises(ImageUnavailable, match="no such repository"):
        await digest(service, name, "always")


async def test_each_refusal_comes_with_its_cure(registry: Any, service: PodmanService) -> None:
    registry.push("known:1", {"file": b"x"})
    registry.push("foreign:1", {"file": b"foreign"}, architecture="s390x")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nowhere = f"127.0.0.1:{free.getsockname()[1]}"
    for name, cure in (
        (f"{registry.host}/known:2", "no such tag"),
        (f"{registry.host}/unknown:1", "no such repository"),
        (f"{registry.host}/private/a:1", "podman login"),
        (f"{registry.host}/foreign:1", "is for s390x"),
        (f"{nowhere}/a:1", "cannot be reached"),
    ):
        with pytest.raises(ImageUnavailable, match=cure):
            await digest(service, name, "missing")


async def test_an_image_of_this_machine_is_never_looked_for_in_a_registry(service: PodmanService) -> None:
    with pytest.raises(ImageUnavailable, match="build or load it"):
        await digest(service, "localhost/palaestra-no-such-image:1", "missing")
    with pytest.raises(UsageError, match="no registry"):
        await digest(service, "localhost/palaestra-no-such-image:1", "always")


async def test_a_pull_that_stalls_ends_at_its_deadline(
    registry: Any, service: PodmanService, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.push("stalled:1", {"file": b"late"})
    registry.stall("stalled:1")
    monkeypatch.setenv("PALAESTRA_PULL_TIMEOUT_S", "1.5")
    name = f"{registry.host}/stalled:1"

    with pytest.raises(ImageUnavailable, match=r"did not end within 2 s(?s:.*)PALAESTRA_PULL_TIMEOUT_S"):
        await digest(service, name, "missing")
    assert not pulls_of(name)
    assert not await asyncio.to_thread(left_in_the_cache)


async def test_a_cancelled_pull_is_ended(registry: Any, service: PodmanService) -> None:
    registry.push("cancelled:1", {"file": b"never"})
    registry.stall("cancelled:1")
    registry.stalled.clear()
    name = f"{registry.host}/cancelled:1"
    pulling = asyncio.create_task(digest(service, name, "missing"))
    assert await asyncio.to_thread(registry.stalled.wait, 60)
    assert pulls_of(name)

    pulling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pulling
    assert not pulls_of(name)
    assert not await asyncio.to_thread(left_in_the_cache)


@pytest.mark.parametrize("text", ["soon", "-1", "nan"])
async def test_a_deadline_that_is_no_number_is_refused(
    registry: Any, service: PodmanService, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("PALAESTRA_PULL_TIMEOUT_S", text)
    with pytest.raises(UsageError, match="PALAESTRA_PULL_TIMEOUT_S"):
        await digest(service, f"{registry.host}/any:1", "missing")


def test_messages_of_registries_that_these_tests_have_not_are_known_too() -> None:
    assert "podman login" in pull_cure("toomanyrequests: You have reached your pull rate limit")
    assert "insecure" in pull_cure("http: server gave HTTP response to HTTPS client")
    assert "cannot be reached" in pull_cure("dial tcp: lookup registry.invalid: no such host")
    assert pull_cure("something else") == ""
