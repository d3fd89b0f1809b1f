"""Cells in an image that a task names: whatever Python it has, and whatever it says of itself."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from palaestra.envs.errors import SandboxUnavailable, UsageError
from palaestra.envs.sandboxes import Argv, BackendName, Python, SandboxSpec, Shell, open_pool
from palaestra.envs.sandboxes.backends import candidates
from palaestra.envs.sandboxes.images.host_image import host_image
from palaestra.envs.sandboxes.images.names import full_image_name
from palaestra.envs.sandboxes.supervisor.interpreter import program_environment

Push = Callable[..., str]
LOOK = """
import ctypes, json, os, subprocess, sys
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
child = subprocess.run([sys.executable, "-c", "import ssl; print(6 * 7)"], capture_output=True, text=True)
libc = ctypes.CDLL(None, use_errno=True)
refused = libc.unshare(0x10000000), ctypes.get_errno()
facts = {"executable": sys.executable, "child": child.stdout, "refused": refused, "env": dict(os.environ)}
facts.update(id=os.getresuid(), here=os.getcwd(), files=os.listdir("."), caps=status["CapEff"].strip())
print(json.dumps(facts))
"""
OWN = "/.palaestra/python/bin/python3"


@pytest.fixture
def push(registry: Any) -> Push:
    """Serve an image; its name."""

    def push(path: str, files: Mapping[str, Any], **config: Any) -> str:
        registry.push(path, files, config)
        return f"{registry.host}/{path}"

    return push


async def look(image: str, interpreter: Any = "new", **options: Any) -> dict[str, Any]:
    """What a program in a cell of the image sees."""
    async with await open_pool(SandboxSpec(image=image, **options), backend="podman") as pool:
        sandbox = await pool.acquire()
        result = await sandbox.run(Python(LOOK, interpreter), timeout_s=30)
        await sandbox.close()
    assert result.ok, result
    facts: dict[str, Any] = json.loads(result.stdout)
    return facts


@pytest.mark.parametrize("interpreter", ["new", "fork"])
async def test_an_image_without_python3_gets_an_interpreter_of_ours(
    push: Push, busybox_files: Any, interpreter: str
) -> None:
    facts = await look(push("busybox:1", busybox_files), interpreter)

    assert (facts["executable"], facts["child"]) == (OWN, "42\n")
    assert facts["refused"] == [-1, 1]
    assert (facts["id"], facts["here"], facts["files"], facts["caps"]) == ([1000] * 3, "/workspace", [], "0" * 16)


async def test_its_programs_run_beside_it(push: Push, busybox_files: Any) -> None:
    image = push("busybox:1", busybox_files)
    async with await open_pool(SandboxSpec(image=image), backend="podman") as pool:
        sandbox = await pool.acquire()
        await sandbox.write({"solution.py": b"print('from a file')"})

        result = await sandbox.run(
            Shell("ls; python3 solution.py; cat /etc/hosts; echo in > /tmp/x; cat /tmp/x"), timeout_s=30
        )
        refused = await sandbox.run(
            Shell("echo no > /bin/mine; echo no > /.palaestra/python/bin/python3"), timeout_s=30
        )
        absent = await sandbox.run(Argv(("git",)), timeout_s=30)
        await sandbox.close()
    assert result.stdout_text == "solution.py\nfrom a file\n127.0.0.1 localhost cell\n::1 localhost\nin\n"
    assert refused.exit_code != 0
    assert refused.stderr_text.count("Read-only file system") == 2
    assert absent.exit_code == 127


async def test_an_image_of_one_file_is_enough(push: Push) -> None:
    facts = await look(push("almost-empty:1", {"readme": b"nothing else"}))

    assert (facts["executable"], facts["child"]) == (OWN, "42\n")


@pytest.fixture
def image_with_python(podman: BackendName) -> Iterator[str]:
    """The default image under another name."""
    name = f"localhost/palaestra-test-python:{os.getpid()}"
    subprocess.run(["podman", "tag", host_image().tag, name], check=True, timeout=60)
    yield name
    subprocess.run(["podman", "untag", name, name], check=True, timeout=60)


async def test_an_image_with_python3_keeps_its_own(image_with_python: str) -> None:
    facts = await look(image_with_python)

    assert (facts["executable"], facts["child"]) == ("/usr/local/bin/python3", "42\n")
    assert "/.palaestra" not in facts["env"]["PATH"]


@pytest.mark.parametrize(
    ("number", "script"),
    [
        (1, "exit 0"),
        (2, "echo Python 3.12; exec sleep 1000 & exit 1"),
        (3, "kill -9 $$"),
        (4, "sleep 1000 & while :; do echo junk; done"),
    ],
    ids=["does nothing", "fails", "crashes", "hangs"],
)
async def test_a_python3_that_cannot_run_the_supervisor_is_passed_over(
    push: Push, busybox_files: Any, number: int, script: str
) -> None:
    image = push(f"broken:{number}", {**busybox_files, "bin/python3": f"#!/bin/sh\n{script}\n".encode()})

    facts = await look(image)

    assert (facts["executable"], facts["child"]) == (OWN, "42\n")


def podman_volumes() -> list[str]:
    done = subprocess.run(["podman", "volume", "ls", "--quiet"], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.split()


async def test_what_an_image_says_of_itself_changes_nothing_but_the_environment(
    registry: Any, push: Push, busybox_files: Any
) -> None:
    image = push(
        "talkative:1",
        {**busybox_files, "data": None, "workspace": None, "workspace/file": bytes(100_000)},
        Entrypoint=["/bin/false"],
        Cmd=["/bin/false"],
        User="12345:12345",
        WorkingDir="/no/such/folder",
        Volumes={"/data": {}, "/workspace": {}, "/run/palaestra": {}},
        Healthcheck={"Test": ["CMD", "/bin/true"], "Interval": 1_000_000_000},
        Labels={"palaestra.lease": "/nowhere", "io.containers.autoupdate": "registry"},
        ExposedPorts={"80/tcp": {}},
        StopSignal="SIGSTOP",
        Env=[
            "PATH=/opt/tool/bin:relative:/bin",
            "JAVA_HOME=/opt/java",
            "LD_PRELOAD=/x.so",
            "PYTHONHOME=/x",
            "HOME=/root",
        ],
    )
    volumes_before = set(await asyncio.to_thread(podman_volumes))
    async with await open_pool(SandboxSpec(image=image), backend="podman") as pool:
        sandbox = await pool.acquire()
        result = await sandbox.run(Python(LOOK), timeout_s=30)
        backend: Any = pool.backend
        volumes = await backend.service.call(lambda client: client.volumes.list())
        await sandbox.close()
    facts = json.loads(result.stdout)
    assert facts["env"]["PATH"] == "/opt/tool/bin:/bin:/.palaestra/python/bin"
    assert (facts["env"]["JAVA_HOME"], facts["env"]["HOME"]) == ("/opt/java", "/workspace")
    assert not {"LD_PRELOAD", "PYTHONHOME"} & set(facts["env"])
    assert (facts["id"], facts["files"]) == ([1000] * 3, [])
    assert {volume.name for volume in volumes} <= volumes_before


async def test_a_workspace_of_the_image_that_leads_elsewhere_is_empty_too(push: Push, busybox_files: Any) -> None:
    facts = await look(push("linked:1", {**busybox_files, "srv": None, "srv/file": b"x", "workspace": "/srv"}))

    assert (facts["files"], facts["caps"]) == ([], "0" * 16)


def test_variables_that_steer_interpreters_and_shells_are_not_taken_from_an_image() -> None:
    image = {"GOPATH": "/go", "PYTHONPATH": "/x", "LD_LIBRARY_PATH": "/x", "BASH_ENV": "/x", "ENV": "/x", "PATH": ""}

    environment = program_environment(image)

    assert environment["GOPATH"] == "/go"
    assert environment["PATH"] == "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    assert not {"PYTHONPATH", "LD_LIBRARY_PATH", "BASH_ENV", "ENV"} & set(environment)


@pytest.mark.parametrize("option", [{"image": "docker.io/library/python:3.12"}, {"runtime": "crun"}])
async def test_what_needs_containers_is_refused_by_bubblewrap_and_tried_with_podman_alone(
    monkeypatch: pytest.MonkeyPatch, option: dict[str, str]
) -> None:
    monkeypatch.delenv("PALAESTRA_SANDBOX", raising=False)
    with pytest.raises(SandboxUnavailable, match="needs Podman"):
        await open_pool(SandboxSpec(**option), backend="bubblewrap")  # type: ignore[arg-type]
    assert candidates("auto", SandboxSpec(**option)) == ("podman",)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "full"),
    [
        ("docker.io/library/python:3.12-slim", "docker.io/library/python:3.12-slim"),
        ("localhost/mine", "localhost/mine:latest"),
        ("127.0.0.1:5000/a/b:c", "127.0.0.1:5000/a/b:c"),
        ("registry:5000/a", "registry:5000/a:latest"),
        ("ghcr.io/a/b@sha256:" + "0" * 64, "ghcr.io/a/b@sha256:" + "0" * 64),
        ("ghcr.io/a/b:1@sha256:" + "0" * 64, "ghcr.io/a/b@sha256:" + "0" * 64),
    ],
)
def test_a_whole_name_is_taken(name: str, full: str) -> None:
    assert full_image_name(name) == full
    assert SandboxSpec(image=name).image == name


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("python", "'docker.io/library/python'"),
        ("python:3.12", "'docker.io/library/python:3.12'"),
        ("someone/tool:1", "'docker.io/someone/tool:1'"),
        ("docker.io/library/Python", "lower case"),
        ("", "registry/path:tag"),
        ("--privileged", "registry/path:tag"),
        ("docker.io/a b", "registry/path:tag"),
        ("docker.io/library/python@sha256:12", "registry/path@sha256:DIGEST"),
    ],
)
def test_a_name_that_is_not_whole_is_refused_with_the_whole_one(name: str, advice: str) -> None:
    with pytest.raises(UsageError, match=advice.replace("(", r"\(")):
        SandboxSpec(image=name)


@pytest.mark.parametrize("runtime", ["", "--root", "../runc", "a b"])
def test_a_runtime_is_a_name_or_an_absolute_path(runtime: str) -> None:
    with pytest.raises(UsageError, match="runtime"):
        SandboxSpec(runtime=runtime)
