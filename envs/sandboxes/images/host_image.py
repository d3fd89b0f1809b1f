"""A container image from this machine's own Python, in seconds and without any registry.

It holds the interpreter, its standard library, the shared libraries that these need, a shell and the usual small
tools: a tar whose bytes depend only on what went in, and a tag that names those inputs, so that it is made once.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from palaestra.envs.errors import SandboxUnavailable
from palaestra.envs.sandboxes.images.oci_archive import write_archive

REPOSITORY = "localhost/palaestra-host-python"
PYTHON_LABEL = "palaestra.python"
"""An image's label: the interpreter that it was made from."""
_FORMAT = "2"
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_SKIPPED = {"test", "tests", "idlelib", "tkinter", "turtledemo", "site-packages", "dist-packages", "ensurepip"}
_SKIPPED |= {"lib2to3", "pydoc_data"}
_TOOLS = """
sh bash [ awk base64 basename cat chmod cmp comm cp cut date dd df diff dirname du echo env expand expr false find
fold grep egrep fgrep gzip head id join kill ln ls md5sum mkdir mkfifo mktemp mv nl nohup nproc od paste pr printf
ps pwd readlink realpath rm rmdir sed seq setsid sha1sum sha256sum shuf sleep sort split stat sum tac tail tar tee
test timeout touch tr true truncate tsort uname unexpand uniq wc which whoami xargs yes
"""
_FOLDERS = {"/tmp": 0o1777, "/proc": 0o555, "/sys": 0o555, "/dev": 0o755, "/workspace": 0o755, "/run": 0o755}
_TEXTS = {
    "/etc/passwd": "root:x:0:0::/:/bin/sh\nuser:x:1000:1000::/workspace:/bin/sh\nnobody:x:65534:65534::/:/bin/false\n",
    "/etc/group": "root:x:0:\nuser:x:1000:\nnogroup:x:65534:\n",
}
_LIBRARY = re.compile(r"(?:=> )?(/\S+) \(0x")


@dataclass(frozen=True, slots=True)
class HostImage:
    """What goes in: file name in the image to file here, and symbolic links."""

    files: dict[str, Path]
    links: dict[str, str]
    interpreter: str

    @property
    def tag(self) -> str:
        """Names the content: the same files give the same tag."""
        digest = hashlib.sha256(_FORMAT.encode())
        for name, source in sorted(self.files.items()):
            status = source.stat()
            digest.update(f"{name}\0{status.st_size}\0{status.st_mtime_ns}\0{status.st_mode}\n".encode())
        for name, target in sorted(self.links.items()):
            digest.update(f"{name}\0->{target}\n".encode())
        return f"{REPOSITORY}:{digest.hexdigest()[:16]}"

    def write_archive(self, target: Path) -> str:
        """Write an image that ``podman load`` takes; the same files give the same digest, which is returned."""
        layer = target.with_name(f"{target.name}.layer")
        self.write(layer)
        try:
            return write_archive(
                target, layer, self.tag, environment={"PATH": _PATH}, labels={PYTHON_LABEL: self.interpreter}
            )
        finally:
            layer.unlink()

    def write(self, target: Path) -> None:
        """Write the root file system as a tar; the same files give the same bytes."""
        with tarfile.open(target, "w", format=tarfile.GNU_FORMAT) as archive:
            made: set[str] = set()
            for name in sorted({*_FOLDERS, *self.files, *self.links, *_TEXTS}):
                for folder in _parents(name, made):
                    archive.addfile(_entry(folder, tarfile.DIRTYPE, _FOLDERS.get(folder, 0o755)))
                if name in _FOLDERS:
                    if name not in made:
                        made.add(name)
                        archive.addfile(_entry(name, tarfile.DIRTYPE, _FOLDERS[name]))
                elif name in _TEXTS:
                    data = _TEXTS[name].encode()
                    archive.addfile(_entry(name, tarfile.REGTYPE, 0o644, size=len(data)), io.BytesIO(data))
                elif name in self.files:
                    _add_file(archive, name, self.files[name])
                else:
                    link = _entry(name, tarfile.SYMTYPE, 0o777)
                    link.linkname = self.links[name]
                    archive.addfile(link)


@dataclass(frozen=True, slots=True)
class PythonFiles:
    """The interpreter of this process, without its virtual environment: real paths."""

    executable: Path
    library: Path
    """The folder of the standard library."""
    modules: tuple[Path, ...]
    """Its files, extension modules included; no tests, no third-party packages."""


def python_files() -> PythonFiles:
    """What this machine's own Python consists of, but for shared libraries."""
    executable = Path(os.path.realpath(getattr(sys, "_base_executable", sys.executable)))
    library = Path(os.path.realpath(sysconfig.get_path("stdlib")))
    return PythonFiles(executable, library, tuple(_standard_library(library)))


def host_image() -> HostImage:
    """The image that this process's own interpreter gives. Raises ``SandboxUnavailable`` when it cannot be read."""
    python = python_files()
    executable = python.executable
    files = {str(path): path for path in (executable, *python.modules)}
    links = {"/usr/local/bin/python3": str(executable), "/usr/local/bin/python": str(executable)}
    for tool in _TOOLS.split():
        if found := shutil.which(tool, path="/usr/bin:/bin"):
            files[f"/bin/{tool}"] = Path(os.path.realpath(found))
    links["/usr/bin/env"] = "/bin/env"
    programs = [path for name, path in files.items() if name.startswith("/bin/") or ".so" in name]
    files |= {name: Path(os.path.realpath(name)) for name in shared_libraries([executable, *programs])}
    return HostImage(files, links, str(executable))


def _standard_library(root: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in _SKIPPED and not name.startswith("config-"))
        for name in names:
            if not name.endswith((".a", ".o")) and ".opt-" not in name:
                path = Path(folder, name)
                if path.is_file() and os.access(path, os.R_OK):
                    yield path


def shared_libraries(programs: Iterable[Path]) -> set[str]:
    """The shared libraries that the dynamic loader finds for these programs."""
    try:
        listing = subprocess.run(
            ["ldd", *map(str, programs)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SandboxUnavailable(f"cannot list shared libraries with ldd: {error}") from error
    return set(_LIBRARY.findall(listing.stdout))


def _parents(name: str, made: set[str]) -> Iterator[str]:
    for parent in reversed(Path(name).parents):
        folder = str(parent)
        if folder != "/" and folder not in made:
            made.add(folder)
            yield folder


def _entry(name: str, kind: bytes, mode: int, size: int = 0) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name.lstrip("/"))
    entry.type, entry.mode, entry.size = kind, mode, size
    return entry


def _add_file(archive: tarfile.TarFile, name: str, source: Path) -> None:
    status = source.stat()
    entry = _entry(name, tarfile.REGTYPE, 0o755 if status.st_mode & 0o100 else 0o644, status.st_size)
    entry.mtime = int(status.st_mtime)  # compiled modules are valid for the time of their source
    with open(source, "rb") as file:
        archive.addfile(entry, file)
