"""A registry on 127.0.0.1 that serves small images, and the settings with which Podman pulls from it.

Podman's storage is the user's own: every image that a registry of these tests served is removed after the module.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import re
import shutil
import subprocess
import tarfile
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from palaestra.envs.sandboxes import BackendName

BUSYBOX = Path("/usr/bin/busybox")
MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
CONFIG = "application/vnd.docker.container.image.v1+json"
LAYER = "application/vnd.docker.image.rootfs.diff.tar"
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
Files = Mapping[str, bytes | str | None]
"""Path in the image to content, target of a symbolic link, or None for a folder."""


class Registry:
    """The few requests of the OCI distribution protocol that a pull makes. ``requests`` counts manifests asked for."""

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}
        self.tags: dict[tuple[str, str], str] = {}
        self.requests: list[str] = []
        self.stalled = threading.Event()
        """Set once a request came for a blob that never ends."""
        self.stalling: set[str] = set()
        self._ending = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self.host = f"127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def push(self, path: str, files: Files, config: Mapping[str, Any] | None = None, architecture: str = "") -> str:
        """Serve an image as ``HOST/path`` (``name:tag``); returns its digest."""
        layer = tar(files)
        machine = architecture or ARCHITECTURES[platform.machine()]
        settings = {"Env": ["PATH=/usr/local/bin:/usr/bin:/bin"], **(config or {})}
        rootfs = {"type": "layers", "diff_ids": [self._add(layer)]}
        description = {"architecture": machine, "os": "linux", "config": settings, "rootfs": rootfs}
        description["created"] = "2020-01-01T00:00:00Z"
        # No other registry of these tests, in a process that runs meanwhile, serves an image with the same id.
        description["history"] = [{"created": "2020-01-01T00:00:00Z", "created_by": self.host}]
        text = json.dumps(description).encode()
        manifest = json.dumps(
            {
                "schemaVersion": 2,
                "mediaType": MANIFEST,
                "config": {"mediaType": CONFIG, "size": len(text), "digest": self._add(text)},
                "layers": [{"mediaType": LAYER, "size": len(layer), "digest": self._add(layer)}],
            }
        ).encode()
        name, _, tag = path.partition(":")
        digest = self.tags[name, tag] = self._add(manifest)
        return digest

    def stall(self, path: str) -> None:
        """From now on the layer of that image begins and never ends."""
        name, _, tag = path.partition(":")
        manifest = json.loads(self.blobs[self.tags[name, tag]])
        self.stalling.add(manifest["layers"][0]["digest"])

    def wait_for_the_end(self) -> None:
        self._ending.wait(120)

    def close(self) -> None:
        self._ending.set()
        self._server.shutdown()
        self._server.server_close()

    def _add(self, blob: bytes) -> str:
        digest = f"sha256:{hashlib.sha256(blob).hexdigest()}"
        self.blobs[digest] = blob
        return digest


def _handler(registry: Registry) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            match = re.fullmatch(r"/v2/(?:(.+)/(manifests|blobs)/(.+))?", self.path)
            if match is None:
                return self._answer(404, b"")
            name, kind, reference = match.groups()
            if kind is None:
                return self._answer(200, b"{}")
            if name.startswith("private"):
                return self._refuse(401, "UNAUTHORIZED", "authentication required")
            if kind == "manifests":
                registry.requests.append(f"{name}:{reference}")
                if not any(known == name for known, _ in registry.tags):
                    return self._refuse(404, "NAME_UNKNOWN", "repository name not known to registry")
                reference = registry.tags.get((name, reference), reference)
            blob = registry.blobs.get(reference)
            if blob is None:
                return self._refuse(404, "MANIFEST_UNKNOWN", "manifest unknown")
            return self._answer(200, blob, reference, MANIFEST if kind == "manifests" else "application/octet-stream")

        def _refuse(self, status: int, code: str, message: str) -> None:
            self._answer(status, json.dumps({"errors": [{"code": code, "message": message}]}).encode())

        def _answer(self, status: int, body: bytes, digest: str = "", kind: str = "application/json") -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Docker-Distribution-Api-Version", "registry/2.0")
            if digest:
                self.send_header("Docker-Content-Digest", digest)
            self.end_headers()
            if self.command == "HEAD":
                return
            if digest in registry.stalling:
                self.wfile.write(body[:1])
                self.wfile.flush()
                registry.stalled.set()
                registry.wait_for_the_end()
                return
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: Any) -> None:
            """Nothing: pytest's output is for tests."""

    return Handler


def tar(files: Files) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.mode = 0o755
            if content is None:
                entry.type = tarfile.DIRTYPE
            elif isinstance(content, str):
                entry.type, entry.linkname = tarfile.SYMTYPE, content
            else:
                entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content) if isinstance(content, bytes) else None)
    return buffer.getvalue()


def required(problem: str) -> None:
    """Skip, or fail where the Podman tests must run."""
    if "podman" in os.environ.get("PALAESTRA_REQUIRE_BACKENDS", "").split(","):
        pytest.fail(problem)
    pytest.skip(problem)


@pytest.fixture(scope="session")
def busybox_files() -> Files:
    """A shell and little else, statically linked: an image without python3 or any C library."""
    if not BUSYBOX.exists():
        required("there is no /usr/bin/busybox; run: apt-get install busybox-static")
    tools = ("sh", "ls", "cat", "echo", "sleep", "true", "id")
    return {"bin": None, "bin/busybox": BUSYBOX.read_bytes(), **{f"bin/{tool}": "busybox" for tool in tools}}


@pytest.fixture(scope="module")
def registry(podman: BackendName, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    """A registry that Podman knows, with a cache folder of the module's own for what Palaestra notes of images."""
    opened = Registry()
    folder = tmp_path_factory.mktemp("registry")
    settings = folder / "registries.conf"
    settings.write_text(
        f'unqualified-search-registries = []\n[[registry]]\nlocation = "{opened.host}"\ninsecure = true\n'
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CONTAINERS_REGISTRIES_CONF", str(settings))
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        yield opened
    opened.close()
    remove_images(set(opened.blobs))
    shutil.rmtree(folder / "cache", ignore_errors=True)


def remove_images(digests: set[str]) -> None:
    """Those that have no name any more as well."""
    for line in podman_output("images", "--all", "--format", "{{.ID}} {{.Digest}}").splitlines():
        image_id, _, digest = line.partition(" ")
        if digest in digests:
            podman_output("rmi", "--force", image_id)


def podman_output(*arguments: str) -> str:
    done = subprocess.run(["podman", *arguments], capture_output=True, text=True, timeout=120, check=False)
    return done.stdout


@pytest.fixture
def find_runtime() -> Callable[[str], str]:
    """The name of an OCI runtime that is installed."""

    def find(name: str) -> str:
        if shutil.which(name, path="/usr/bin:/usr/sbin:/usr/local/bin:/usr/local/sbin") is None:
            required(f"there is no {name}; run: apt-get install {name}")
        return name

    return find
