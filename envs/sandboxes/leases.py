"""Folders that a process holds while it lives, however it ends.

A lease is a file under an exclusive ``flock``. The kernel drops the lock when the last process that inherited it is
gone, so whether an owner lives is never a question of clocks or reused pids; whoever comes next removes what has a
free lease.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from palaestra.envs.errors import SandboxUnavailable

_SUFFIX = ".lease"
_log = logging.getLogger(__name__)


def base_folder() -> Path:
    """Where this user's sandboxes keep sockets and leases: short (a socket's path has 107 bytes) and not shared."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if os.getuid() != 0 and runtime and len(os.fsencode(runtime)) < 40 and os.access(runtime, os.W_OK):
        folder = Path(runtime) / "palaestra"
    else:
        folder = _common_folder()
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


def base_folders() -> list[Path]:
    """Every folder where leases of this user may lie that can be seen from here."""
    return [folder for folder in dict.fromkeys((base_folder(), _common_folder())) if folder.is_dir()]


def _common_folder() -> Path:
    return Path("/tmp") / f"palaestra-{os.getuid()}"


class Lease:
    """A fresh folder, ours as long as this process lives or until ``release``."""

    def __init__(self, kind: str) -> None:
        base = base_folder()
        # systemd-tmpfiles removes what is old below /tmp (Debian 13: ten days), and enters no folder that is locked.
        self._base_descriptor = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with contextlib.suppress(BlockingIOError):  # it is there just now, where nothing is old; the next lease locks
            fcntl.flock(self._base_descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        while True:
            self.folder = base / f"{kind}-{secrets.token_hex(6)}"
            self.file = self.folder.with_name(self.folder.name + _SUFFIX)
            descriptor = os.open(self.file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            # Until it is locked, another process may take it for abandoned; then the next name is ours.
            if _lock(descriptor) and os.fstat(descriptor).st_nlink:
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
            os.close(self._base_descriptor)
            self._descriptor = -1


def lease_files() -> list[Path]:
    """The lease files of this user, whoever holds them."""
    return sorted(file for folder in base_folders() for file in folder.glob(f"*-*{_SUFFIX}"))


@contextlib.contextmanager
def claim(file: Path) -> Iterator[bool]:
    """Whether the owner of a lease is gone; if so the lease is ours inside the block, and nobody else's to remove."""
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:  # removed at this moment, or not ours
        yield False
        return
    try:
        yield _lock(descriptor)
    finally:
        os.close(descriptor)


def remove(file: Path) -> None:
    """Remove an abandoned lease with its folder; the lease stays as long as anything of the folder does."""
    folder = file.with_name(file.name.removesuffix(_SUFFIX))
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        _log.warning("cannot remove %s, which a run that is gone has left", folder)
    else:
        file.unlink(missing_ok=True)


def visible(file: Path) -> bool:
    """Whether a path is that of a lease, in a folder that can be seen from here."""
    return file.is_absolute() and file.name.endswith(_SUFFIX) and os.path.isdir(file.parent)


def is_abandoned(file: Path) -> bool:
    """Whether the owner of the lease with that file is known to be gone.

    False wherever it cannot be known: the file's folder is another runtime folder that is not visible from here, or
    the file cannot be opened.
    """
    if not visible(file):
        return False
    if not os.path.lexists(file):
        return True
    with claim(file) as gone:
        return gone


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
