"""The interpreter that images without python3 get: a folder that needs nothing of the system around it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from palaestra.envs.errors import SandboxUnavailable
from palaestra.envs.sandboxes.images import own_python
from palaestra.envs.sandboxes.images.claims import Claim
from palaestra.envs.sandboxes.images.elf import loader_of, relocated
from palaestra.envs.sandboxes.images.host_image import python_files


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "palaestra"


def test_the_folder_is_made_once_and_holds_its_own_loader_and_libraries(cache: Path) -> None:
    with ThreadPoolExecutor(3) as threads:
        made = list(threads.map(lambda _: own_python.own_python(), range(3)))
    again = own_python.own_python()

    folders = {own.folder for own in (*made, again)}
    assert len(folders) == 1
    folder = again.folder
    assert sorted(path.name for path in cache.iterdir()) == ["claims", folder.name]
    assert loader_of((folder / "bin/python3").read_bytes()) == "/.palaestra/python/ld.so"
    assert not [path for path in folder.rglob("*") if path.is_file() and not path.stat().st_mode & 0o004]
    for own in (*made, again):
        own.claim.release()


def test_a_relocated_interpreter_loads_nothing_from_the_system(cache: Path) -> None:
    own = own_python.own_python()
    folder, program = own.folder, python_files().executable.read_bytes()
    for _ in range(2):  # one that was relocated before can be once more
        program = relocated(program, str(folder / "ld.so"), str(folder / "lib"))
    executable = folder / "bin" / "moved"
    executable.write_bytes(program)
    executable.chmod(0o755)
    code = "import ctypes, json, ssl, sqlite3, sys; ctypes.CDLL(None).getpid(); print(open('/proc/self/maps').read())"

    maps = subprocess.run(
        [executable, "-c", code], capture_output=True, text=True, timeout=60, check=True, env={}
    ).stdout

    loaded = {line.split()[-1] for line in maps.splitlines() if ".so" in line}
    assert len(loaded) > 3
    assert all(name.startswith(f"{folder}/") for name in loaded), loaded
    own.claim.release()


def test_folders_of_a_python_that_changed_are_removed_unless_someone_uses_them(cache: Path) -> None:
    for name in ("python-used", "python-unused"):
        (cache / name / "bin").mkdir(parents=True)
    claim = Claim("python-used")

    own = own_python.own_python()

    assert {path.name for path in cache.glob("python-*")} == {own.folder.name, "python-used"}
    claim.release()
    own.claim.release()


def test_an_interpreter_that_lacks_a_library_is_noticed_before_it_is_used(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_python, "shared_libraries", lambda programs: set())

    with pytest.raises(SandboxUnavailable, match="does not run from its folder alone"):
        own_python.own_python()
    assert list(cache.glob("*python-*")) == []


@pytest.mark.parametrize("content", [b"", b"#!/bin/sh\n", b"\x7fELF\x01\x01" + bytes(100)])
def test_what_is_no_dynamic_program_cannot_be_relocated(content: bytes) -> None:
    with pytest.raises(ValueError, match="not a"):
        relocated(content, "/ld.so", "/lib")


def test_a_static_program_needs_no_loader_and_is_refused() -> None:
    busybox = shutil.which("busybox")
    if busybox is None or b"/ld-" in Path(os.path.realpath(busybox)).read_bytes()[:4096]:
        pytest.skip("there is no static program here")
    with pytest.raises(ValueError, match="not a dynamic executable"):
        loader_of(Path(busybox).read_bytes())


def test_the_loader_of_this_interpreter_is_known() -> None:
    assert Path(loader_of(Path(os.path.realpath(sys.executable)).read_bytes())).exists()
