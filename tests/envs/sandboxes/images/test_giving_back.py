"""What is given back when making, finding or building an image fails halfway; no Podman is needed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from palaestra.envs.errors import ImageUnavailable, SandboxUnavailable
from palaestra.envs.sandboxes.images import build, resolve
from palaestra.envs.sandboxes.images.claims import Claim, unclaimed
from palaestra.envs.sandboxes.images.records import ImageRecords
from palaestra.envs.sandboxes.images.resolve import Image, named_image
from palaestra.envs.sandboxes.podman.command import PodmanFailed

LOGGED = 'time="2026-01-01T00:00:00Z" level=warning msg="\\"/\\" is not a shared mount"'
"""Podman logs to stderr, which comes along with what it prints."""


async def test_an_image_that_cannot_be_noted_as_used_is_claimed_by_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    async def claimed(service: Any, name: str) -> Image:
        return Image("1", "sha256:1", name, 1, Claim("image-1"))

    def locked(*_: Any) -> None:
        raise SandboxUnavailable("another process has held images.lock for 90 s")

    monkeypatch.setattr(resolve, "claimed", claimed)
    monkeypatch.setattr(ImageRecords, "used", locked)
    service: Any = None

    with pytest.raises(SandboxUnavailable, match=r"images\.lock"):
        await named_image(service, "localhost/x:1", "missing")

    with unclaimed("image-1") as free:
        assert free


@pytest.mark.parametrize("cleaning_fails", [False, True])
async def test_a_failed_build_says_why_and_its_container_goes_whatever_podman_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, cleaning_fails: bool
) -> None:
    mark, removed = "", []

    async def podman(*arguments: str, timeout_s: float, on_line: Callable[[str], None]) -> None:
        nonlocal mark
        on_line(LOGGED)
        if arguments[0] == "build":
            mark = next(each for each in arguments if "PALAESTRA_BUILD" in each).rpartition("=")[2]
            for container, text in (("ours", mark), ("other", "0" * 24)):
                folder = tmp_path / container / "userdata"
                folder.mkdir(parents=True)
                (folder / "buildah.json").write_text(text)
            raise PodmanFailed("`podman build` failed", "Error: manifest unknown")
        if cleaning_fails:
            raise PodmanFailed(f"`podman {arguments[0]}` failed", "Error: database is locked")
        if arguments[0] == "rm":
            removed.append(arguments[-1])
        for line in {"info": [str(tmp_path)], "ps": ["other", "ours"]}.get(arguments[0], []):
            on_line(line)

    monkeypatch.setattr(build, "run_podman", podman)
    with caplog.at_level(logging.WARNING), pytest.raises(ImageUnavailable, match="manifest unknown"):
        await build.build_image(tmp_path, tmp_path, "localhost/x:1", [], timeout_s=5, on_line=lambda line: None)

    assert removed == ([] if cleaning_fails else ["ours"])
    assert ("database is locked" in caplog.text) is cleaning_fails
