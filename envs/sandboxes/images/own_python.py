"""This machine's Python as one folder that runs in any container, whatever the image has: another C library, or none.

The folder holds the interpreter, the standard library, the shared libraries of both, and their loader. It is bound
read-only at ``OWN_PREFIX``, and the interpreter in it is changed to use that loader and those libraries, so that
``sys.executable`` there is an ordinary program that a cell can start.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from palaestra.envs.errors import SandboxUnavailable
from palaestra.envs.sandboxes.images.claims import Claim, cache_folder, unclaimed
from palaestra.envs.sandboxes.images.elf import loader_of, relocated
from palaestra.envs.sandboxes.images.host_image import PythonFiles, python_files, shared_libraries
from palaestra.envs.sandboxes.supervisor.interpreter import OWN_PREFIX

_FORMAT = "1"
_KIND = "python-"
_CHECK_S = 60


@dataclass(frozen=True, slots=True)
class OwnPython:
    """The folder; nobody removes it while the claim is held."""

    folder: Path
    claim: Claim


def own_python() -> OwnPython:
    """The folder in the user's cache, made when it is not there yet; those of Pythons that changed since are removed.

    Raises ``SandboxUnavailable`` where this machine's Python cannot be made relocatable.
    """
    python = python_files()
    name = f"{_KIND}{_digest(python)}"
    claim = Claim(name)
    try:
        folder = cache_folder() / name
        if not folder.exists():
            _make(python, folder)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        claim.release()
        raise SandboxUnavailable(
            f"{python.executable} cannot be made into an interpreter for images without python3: {error}"
        ) from error
    except BaseException:
        claim.release()
        raise
    _remove_others(folder)
    return OwnPython(folder, claim)


def _digest(python: PythonFiles) -> str:
    digest = hashlib.sha256(f"{_FORMAT}\0{OWN_PREFIX}\0{python.executable}\0{python.library}\n".encode())
    for path in sorted([python.executable, *python.modules]):
        status = path.stat()
        digest.update(f"{path}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]


def _make(python: PythonFiles, folder: Path) -> None:
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _fill(python, unfinished)
        _check(unfinished, python.executable.name)
        try:
            unfinished.rename(folder)
        except OSError:
            if not folder.exists():  # else another process was faster, with the same content
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _fill(python: PythonFiles, target: Path) -> None:
    program = python.executable.read_bytes()
    loader = loader_of(program)
    binaries, libraries = target / "bin", target / "lib"
    binaries.mkdir()
    interpreter = binaries / python.executable.name
    interpreter.write_bytes(relocated(program, f"{OWN_PREFIX}/ld.so", f"{OWN_PREFIX}/lib"))
    interpreter.chmod(0o755)
    for name in ("python3", "python"):
        if name != interpreter.name:
            (binaries / name).symlink_to(interpreter.name)
    for source in python.modules:
        module = libraries / python.library.name / source.relative_to(python.library)
        module.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, module)  # with its time, for which its compiled form is valid
        module.chmod(0o644)
    extensions = [path for path in python.modules if ".so" in path.name]
    for name in shared_libraries([python.executable, *extensions]):
        _copy_program(Path(name), libraries / Path(name).name)
    _copy_program(Path(loader), target / "ld.so")
    target.chmod(0o755)
    for path in target.rglob("*"):
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o755)  # cells have user ids of their own


def _copy_program(source: Path, target: Path) -> None:
    shutil.copyfile(os.path.realpath(source), target)
    target.chmod(0o755)


_CHECK = """
import sys, ctypes, hashlib, select, socket, zipfile
ctypes.CDLL(None).prctl
mapped = {line.split()[-1] for line in open("/proc/self/maps") if ".so" in line}
print([name for name in sorted(mapped) if not name.startswith(sys.prefix + "/")])
"""


def _check(folder: Path, executable: str) -> None:
    """Start it by its own loader: it must load nothing from elsewhere."""
    program: list[str | Path] = [folder / "ld.so", "--library-path", folder / "lib", folder / "bin" / executable]
    done = subprocess.run(
        [*program, "-I", "-S", "-c", _CHECK],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_CHECK_S,
        env={},
        check=False,
    )
    if done.stdout != "[]\n":
        raise ValueError(f"it does not run from its folder alone: {(done.stderr or done.stdout).strip()[-500:]}")


def _remove_others(kept: Path) -> None:
    for folder in kept.parent.glob(f"{_KIND}*"):
        if folder != kept:
            with unclaimed(folder.name) as free:
                if free:
                    shutil.rmtree(folder, ignore_errors=True)
