"""Which python3 of this machine a host may run: one that the host's user can read, with its whole prefix."""

from __future__ import annotations

import os
import stat
import sys
from dataclasses import dataclass
from pathlib import Path

from palaestra.envs.errors import SandboxUnavailable

_SYSTEM = Path("/usr/bin/python3")


@dataclass(frozen=True, slots=True)
class Interpreter:
    """``executable`` is a real file; ``prefix`` is a folder to make visible besides /usr, or None."""

    executable: Path
    prefix: Path | None


def find_interpreter(*, as_other_user: bool) -> Interpreter:
    """The interpreter that runs this process (without its virtual environment), else the system's.

    ``as_other_user``: the host will run as a user that owns nothing, so every folder on the way must be open to all.
    """
    own = Path(os.path.realpath(getattr(sys, "_base_executable", sys.executable)))
    prefix = Path(os.path.realpath(sys.base_prefix))
    if own.is_relative_to("/usr"):
        return Interpreter(own, None)
    if not as_other_user or (readable_by_all(own) and readable_by_all(prefix)):
        return Interpreter(own, prefix)
    if _SYSTEM.exists():
        return Interpreter(Path(os.path.realpath(_SYSTEM)), None)
    raise SandboxUnavailable(
        f"{own} cannot be read by other users and there is no {_SYSTEM}; install python3, or run as an ordinary user"
    )


def readable_by_all(path: Path) -> bool:
    """Whether any user may read the file, or list the folder, and pass through all folders above it."""
    try:
        mode = path.stat().st_mode
        needed = (stat.S_IROTH | stat.S_IXOTH) if stat.S_ISDIR(mode) else stat.S_IROTH
        return mode & needed == needed and all(folder.stat().st_mode & stat.S_IXOTH for folder in path.parents)
    except OSError:
        return False
