"""Folders that a process holds while it lives, however it ends.

A lease is a file under an exclusive ``flock``. The kernel drops the lock when the last process that inherited it is
gone, so whether an owner lives is never a question of clocks or reused pids; whoever comes next removes what has a
free lease.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from palaestra.envs.errors import SandboxUnavailable

_SUFFIX = ".lease"


def base_folder() -> Path:
    """Where this user's sandboxes keep sockets and leases: short (a socket's path has 107 bytes) and not shared."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if os.getuid() != 0 and runtime and len(runtime) < 40 and os.access(runtime, os.W_OK):
        folder = Path(runtime) / "palaestra"
    else:
        folder = Path("/tmp") / f"palaestra-{os.getuid()}"
    try:
        folder.mkdir(mode=0o711, exist_ok=True)
        status = os.lstat(folder)
    except OSError as error:
        problem = f"cannot make {folder}: {error.strerror}; set XDG_RUNTIME_DIR to a folder of your own"
        raise SandboxUnavailable(problem) from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise SandboxUnavailable(f"{folder} belongs to someone else; remove it, or set XDG_RUNTIME_DIR")
    if stat.S_IMODE(status.st_mode) != 0o711:
        folder.chmod(0o711)
    return folder


class Lease:
    """A fresh folder, ours as long as this process lives or until ``release``."""

    def __init__(self, kind: str) -> None:
        base = base_folder()
        while True:
            self.folder = base / f"{kind}-{secrets.token_hex(6)}"
            self.file = self.folder.with_name(self.folder.name + _SUFFIX)
            descriptor = os.open(self.file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if os.fstat(descriptor).st_nlink:  # else another start took it for abandoned before it was locked
                break
            os.close(descriptor)
        self._descriptor = descriptor
        self.folder.mkdir(mode=0o700)

    @property
    def name(self) -> str:
        return self.folder.name

    def release(self) -> None:
        """Remove the folder and the lease. Idempotent."""
        if self._descriptor >= 0:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.file.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = -1


def abandoned(kind: str) -> Iterator[str]:
    """The names of leases whose owner is gone; each is removed with its folder when the caller comes back for more."""
    for file in sorted(base_folder().glob(f"{kind}-*{_SUFFIX}")):
        try:
            descriptor = os.open(file, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            continue
        try:
            folder = file.with_name(file.name.removesuffix(_SUFFIX))
            yield folder.name
            shutil.rmtree(folder, ignore_errors=True)
            file.unlink(missing_ok=True)
        finally:
            os.close(descriptor)


def is_abandoned(file: Path) -> bool:
    """Whether the owner of the lease with that file is known to be gone.

    False wherever it cannot be known: the file's folder is another runtime folder that is not visible from here, or
    the file cannot be opened.
    """
    if not file.is_absolute() or not file.name.endswith(_SUFFIX) or not os.path.isdir(file.parent):
        return False
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True
