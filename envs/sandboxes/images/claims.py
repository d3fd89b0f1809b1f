"""Things in the user's cache that several processes share and any may remove: not while another one uses them.

A claim is a shared ``flock`` on a small file; whoever removes the thing first needs the exclusive one. The kernel drops
the locks of a process that dies, so no claim outlives its user.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from palaestra.envs.errors import SandboxUnavailable

_WAIT_S = 90.0
"""Longer than a call to Podman may take, for which the other side may hold a lock."""
_POLL_S = 0.02
_SCRATCH = "scratch-"


def cache_folder() -> Path:
    """``palaestra`` in ``XDG_CACHE_HOME``, or in ``~/.cache``; made where it is missing."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    folder = (Path(root) if root.startswith("/") else Path("~/.cache").expanduser()) / "palaestra"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        problem = f"cannot make {folder}: {error.strerror}; set XDG_CACHE_HOME to a folder of your own"
        raise SandboxUnavailable(problem) from error
    return folder


class Claim:
    """While it is held, ``unclaimed(name)`` is False in every process. Waits for one who is removing the thing."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._descriptor = _locked(_file(name), fcntl.LOCK_SH, wait_s=_WAIT_S)

    def release(self) -> None:
        """Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


@contextlib.contextmanager
def unclaimed(name: str) -> Iterator[bool]:
    """Whether nobody holds a claim on the name; if so, nobody gets one until the end of the block."""
    file = _file(name)
    try:
        descriptor = _locked(file, fcntl.LOCK_EX, wait_s=0.0)
    except SandboxUnavailable:
        yield False
        return
    try:
        yield True
    finally:
        file.unlink(missing_ok=True)
        os.close(descriptor)


@contextlib.contextmanager
def alone(file: Path) -> Iterator[None]:
    """One process at a time; for short work on files."""
    descriptor = _locked(file, fcntl.LOCK_EX, wait_s=_WAIT_S)
    try:
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder for large files, gone afterwards; what killed processes left of theirs goes first."""
    for folder in cache_folder().glob(f"{_SCRATCH}*"):
        with unclaimed(folder.name) as free:
            if free:
                shutil.rmtree(folder, ignore_errors=True)
    claim = Claim(f"{_SCRATCH}{secrets.token_hex(6)}")
    folder = cache_folder() / claim.name
    try:
        folder.mkdir(mode=0o700)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        claim.release()
        with unclaimed(claim.name):  # removes the file of the claim
            pass


def _file(name: str) -> Path:
    folder = cache_folder() / "claims"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder / name


def _locked(file: Path, kind: int, *, wait_s: float) -> int:
    """A descriptor of the file that is there now, with the lock. Raises ``SandboxUnavailable`` after ``wait_s``."""
    deadline = time.monotonic() + wait_s
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            if time.monotonic() >= deadline:
                raise SandboxUnavailable(f"another process has held {file} for {wait_s:.0f} s") from None
            time.sleep(_POLL_S)
            continue
        if os.fstat(descriptor).st_nlink:  # else it was removed between our open and our lock
            return descriptor
        os.close(descriptor)
