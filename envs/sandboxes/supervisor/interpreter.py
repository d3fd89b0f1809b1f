"""Which python3 a host runs, and what programs of its cells find in their environment.

The host of a named image is started with an interpreter of our own. Where the image has a python3 that can run the
supervisor, that one takes over, so that programs see the Python of their image; else ours stays.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from collections.abc import Mapping

OWN_PREFIX = "/.palaestra/python"
"""Where our own interpreter is bound."""
OWN_INTERPRETER = f"{OWN_PREFIX}/bin/python3"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_FIXED = {
    "HOME": "/workspace",
    "LANG": "C.UTF-8",
    "TMPDIR": "/tmp",
    "USER": "user",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
}
"""What every program of every cell starts with, whatever the image says. With a fixed hash seed, sets iterate in the
same order in every run."""
_REFUSED_PREFIXES = ("PYTHON", "LD_", "GLIBC_", "GCONV_", "LC_", "BASH_")
_REFUSED = ("HOSTNAME", "TERM", "container", "ENV", "LANGUAGE", "LOCPATH", "PWD", "OLDPWD")
"""Variables that an image cannot set for cells: they change how interpreters, loaders and shells themselves work, or
describe the container and not the cell."""

_WORKS = 86
_PROBE = f"""
import sys, ctypes, fcntl, json, resource, select, signal, socket, struct, zipimport
sys.version_info >= (3, 8) and ctypes.CDLL(None).prctl and sys.exit({_WORKS})
"""
_PROBE_S = 8.0
"""A python3 that takes longer than this to start is not one to run thousands of programs with."""


def program_environment(container: Mapping[str, str]) -> dict[str, str]:
    """The environment of the supervisor, which programs inherit, from that of the container (the image's)."""
    environment = {
        name: value
        for name, value in container.items()
        if not name.startswith(_REFUSED_PREFIXES) and name not in _REFUSED
    }
    folders = [folder for folder in container.get("PATH", "").split(":") if folder.startswith("/")]
    environment.update(_FIXED, PATH=":".join(folders) or PATH)
    return environment


def choose(environment: dict[str, str]) -> str:
    """The interpreter to go on with. Ours is put last on PATH where it is the one."""
    if not sys.executable.startswith(OWN_PREFIX):
        return sys.executable
    candidate = _python3_on(environment["PATH"])
    if candidate is not None and _works(candidate, environment):
        return candidate
    environment["PATH"] += f":{OWN_PREFIX}/bin"
    return sys.executable


def _python3_on(path: str) -> str | None:
    for folder in path.split(":"):
        file = os.path.join(folder, "python3")
        if os.path.isfile(file) and os.access(file, os.X_OK):
            return file
    return None


def _works(candidate: str, environment: Mapping[str, str]) -> bool:
    """Whether it runs what the supervisor needs. It may print, hang, crash or leave processes: nothing is read from
    it but its exit code, and we are the first process of the container, so everything else in it can be ended."""
    pid = os.fork()
    if pid == 0:
        try:
            nothing = os.open("/dev/null", os.O_RDWR)
            for descriptor in range(3):
                os.dup2(nothing, descriptor)
            os.closerange(3, 256)
            resource.setrlimit(resource.RLIMIT_CPU, (int(_PROBE_S), int(_PROBE_S)))
            os.execve(candidate, [candidate, "-I", "-S", "-c", _PROBE], dict(environment))
        finally:
            os._exit(127)
    status = _wait(pid, _PROBE_S)
    try:
        os.kill(-1, signal.SIGKILL)
    except ProcessLookupError:
        pass
    if status is None:
        _, status = os.waitpid(pid, 0)
    try:
        while os.wait():  # what it left behind
            pass
    except ChildProcessError:
        pass
    return os.WIFEXITED(status) and os.WEXITSTATUS(status) == _WORKS


def _wait(pid: int, seconds: float) -> int | None:
    """The status that the process ended with, None if it has not ended yet."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status
        time.sleep(0.002)
    return None
