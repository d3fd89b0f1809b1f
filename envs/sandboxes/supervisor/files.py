"""Files of a cell's workspace, for its owner: written, read, packed and unpacked.

No process of the agent runs meanwhile (every command ends with all of them dead), so a path cannot change under our
hands; symbolic links that an agent left are never followed. Every access counts as the cell's own user's.
"""

from __future__ import annotations

import errno
import io
import os
import stat
import tarfile
from collections.abc import Iterator

ROOT = "/workspace"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def write(path: str, data: bytes, append: bool) -> None:
    """Create or replace one file, or extend it. Raises OSError."""
    folder, name = _open_parent(path, create=True)
    try:
        if not append:
            try:
                os.unlink(name, dir_fd=folder)
            except FileNotFoundError:
                pass
        flags = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_APPEND if append else os.O_CREAT | os.O_EXCL)
        descriptor = os.open(name, flags, 0o644, dir_fd=folder)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
        except OSError:
            os.unlink(name, dir_fd=folder)
            raise
        finally:
            os.close(descriptor)
    finally:
        os.close(folder)


def read(path: str, limit_bytes: int) -> tuple[int, bytes]:
    """Size of one regular file, and its content when that is within the limit. Raises OSError."""
    folder, name = _open_parent(path, create=False)
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    finally:
        os.close(folder)
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise FileNotFoundError(2, "not a regular file", path)
        return status.st_size, file.read() if status.st_size <= limit_bytes else b""


def pack(limit_bytes: int) -> bytes:
    """The workspace's folders, regular files and symbolic links as an uncompressed tar, in the order of their names.

    Raises OSError, also where the tar would exceed the limit: files with holes are larger than what they take.
    """
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path in _walk(ROOT):
            entry = archive.gettarinfo(path, os.path.relpath(path, ROOT))
            if entry is None or not (entry.isreg() or entry.isdir() or entry.issym() or entry.islnk()):
                continue
            if buffer.tell() + entry.size > limit_bytes:
                raise OSError(errno.EFBIG, f"the files have more than {limit_bytes} bytes")
            if entry.isreg():
                with open(path, "rb") as file:
                    archive.addfile(entry, file)
            else:
                archive.addfile(entry)
    return buffer.getvalue()


def unpack(data: bytes) -> None:
    """Recreate what ``pack`` saw in this cell's empty workspace. Raises OSError."""
    folders = []
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
        for entry in archive:
            path = os.path.join(ROOT, entry.name)
            if entry.isdir():
                os.mkdir(path, 0o700)
                folders.append((path, entry))
            elif entry.issym():
                os.symlink(entry.linkname, path)
            elif entry.islnk():
                os.link(os.path.join(ROOT, entry.linkname), path, follow_symlinks=False)
            else:
                content = archive.extractfile(entry)
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
                with open(descriptor, "wb") as file:
                    file.write(content.read() if content else b"")
                os.chmod(path, entry.mode & 0o777)
                os.utime(path, (entry.mtime, entry.mtime))
    for path, entry in reversed(folders):
        os.chmod(path, entry.mode & 0o777)
        os.utime(path, (entry.mtime, entry.mtime))


def _walk(root: str) -> Iterator[str]:
    """Every path below the root, folders before what is in them. Without recursion: an agent decides how deep it is."""
    waiting = [iter(_entries(root))]
    while waiting:
        entry = next(waiting[-1], None)
        if entry is None:
            waiting.pop()
            continue
        yield entry.path
        if entry.is_dir(follow_symlinks=False):
            waiting.append(iter(_entries(entry.path)))


def _entries(folder: str) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return sorted(entries, key=lambda entry: entry.name)


def _open_parent(path: str, create: bool) -> tuple[int, str]:
    """The folder that holds ``path``, opened component by component, and the last component."""
    *folders, name = path.split("/")
    descriptor = os.open(ROOT, _FOLDER)
    try:
        for folder in folders:
            if create:
                try:
                    os.mkdir(folder, 0o755, dir_fd=descriptor)
                except FileExistsError:
                    pass
            inner = os.open(folder, _FOLDER, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = inner
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, name
