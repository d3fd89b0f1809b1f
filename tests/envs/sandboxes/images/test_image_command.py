"""``palaestra image``, as a user runs it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from palaestra.cli import app
from palaestra.envs.sandboxes import BackendName
from palaestra.envs.sandboxes.images.host_image import host_image

BUILT = f"localhost/palaestra-test-built:{os.getpid()}"


def image(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["image", *arguments], env={"COLUMNS": "250"})


def podman_does(*arguments: str) -> str:
    done = subprocess.run(["podman", *arguments], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.strip()


@pytest.fixture
def built_name(podman: BackendName) -> Iterator[str]:
    yield BUILT
    subprocess.run(["podman", "rmi", "--force", BUILT], capture_output=True, timeout=60, check=False)


@pytest.fixture
def base(registry: Any, busybox_files: Any) -> str:
    registry.push("base:1", busybox_files)
    return f"{registry.host}/base:1"


def test_the_default_image_is_made_without_a_registry_and_is_the_same_each_time(podman: BackendName) -> None:
    first, second = image("build"), image("build")

    assert first.exit_code == 0, first.output
    tag, digest, size = first.output.splitlines()
    assert tag == host_image().tag
    assert digest.startswith("sha256:")
    assert " MiB in " in size
    assert second.output.splitlines()[:2] == [tag, digest]
    listed = image("list")
    assert any(tag in line and digest[:19] in line and "made" in line for line in listed.output.splitlines())


def test_a_containerfile_is_built_listed_and_removed(tmp_path: Path, base: str, built_name: str) -> None:
    (tmp_path / "Containerfile").write_text(f"FROM {base}\nARG WORD\nCOPY data /data\nRUN echo $WORD > /word\n")
    (tmp_path / "data").write_text("of the context")

    done = image(
        "build", "--containerfile", str(tmp_path / "Containerfile"), "--tag", built_name, "--build-arg", "WORD=hello"
    )

    assert done.exit_code == 0, done.output
    assert "STEP 1/4" in done.output
    name, digest, _ = done.output.splitlines()[-3:]
    assert (name, digest[:7]) == (built_name, "sha256:")
    assert podman_does("run", "--rm", "--network=none", built_name, "cat", "/word", "/data") == "hello\nof the context"
    assert any(built_name in line and "built" in line for line in image("list").output.splitlines())
    container = podman_does("create", "--network=none", built_name, "sh")
    kept = image("rm", built_name)
    assert (kept.exit_code, kept.output.partition(":")[0]) == (1, "kept localhost/palaestra-test-built")
    podman_does("rm", container)
    removed = image("rm", built_name)
    assert (removed.exit_code, removed.output) == (0, f"removed {built_name}\n")


def test_the_containerfile_that_comes_with_palaestra_builds_on_a_base_image(base: str, built_name: str) -> None:
    done = image("build", "--from-registry", "--tag", built_name, "--build-arg", f"BASE={base}")

    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[-3] == built_name


def test_a_base_image_that_cannot_be_had_is_an_error_with_its_cure(
    tmp_path: Path, registry: Any, built_name: str
) -> None:
    containerfile = tmp_path / "Containerfile"
    containerfile.write_text(f"FROM {registry.host}/no-such-base:1\n")

    done = image("build", "--containerfile", str(containerfile), "--tag", built_name)

    assert done.exit_code == 2
    assert "no such repository" in done.output


def processes_with(marker: str) -> list[str]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if marker.encode() in (folder / "cmdline").read_bytes():
                found.append(folder.name)
        except OSError:
            continue
    return found


def test_a_build_that_is_stopped_leaves_nothing(tmp_path: Path, base: str, built_name: str) -> None:
    containerfile = tmp_path / "Containerfile"
    seconds = f"600.{os.getpid()}"
    containerfile.write_text(f"FROM {base}\nRUN sleep {seconds}\n")

    done = image("build", "--containerfile", str(containerfile), "--tag", built_name, "--timeout-s", "4")

    assert done.exit_code == 2
    assert "did not end within 4 s" in done.output
    assert not processes_with(f"sleep\0{seconds}")
    containers = podman_does("ps", "--all", "--external", "--format", "{{.Image}} {{.Command}}")
    assert base not in containers


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (["build", "--containerfile", "no/such/file"], "there is no file"),
        (["build", "--tag", "localhost/a:1"], "--tag and --build-arg are for"),
        (["build", "--from-registry", "--containerfile", "x"], "choose one of"),
        (["build", "--from-registry", "--tag", "docker.io/library/a:1"], "localhost/NAME:TAG"),
        (["rm"], "name the images"),
        (["rm", "localhost/a:1", "--unused"], "name the images"),
        (["rm", "python"], "docker.io/library/python"),
        (["rm", "localhost/palaestra-no-such-image:1"], "no image of Palaestra's"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(podman: BackendName, arguments: list[str], advice: str) -> None:
    done = image(*arguments)

    assert done.exit_code == 2
    assert advice in done.output
