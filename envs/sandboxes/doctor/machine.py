"""What the machine itself gives to sandboxes: the kernel's features and switches, and room for many cells."""

from __future__ import annotations

import os
import platform
import resource
from collections.abc import Mapping
from pathlib import Path

from palaestra.envs.sandboxes.cgroups import Delegation
from palaestra.envs.sandboxes.doctor.report import Check
from palaestra.envs.sandboxes.supervisor.main import SOCKET_NAME
from palaestra.envs.sandboxes.supervisor.seccomp import ARCHITECTURES

MAKE_PODMAN = "Run `make podman` in a checkout of Palaestra (it needs root, and says what it changes)"
_MANY = 2_000
"""Cells that one machine should have room for."""
_SOCKET_PATH = 107
"""Bytes that the path of a unix socket may have (sun_path without its end)."""
_LONGEST_FOLDER = "service-" + "0" * 12


def examine_machine(
    delegation: Delegation,
    *,
    root: Path = Path("/"),
    environ: Mapping[str, str] = os.environ,
    architecture: str | None = None,
) -> tuple[Check, ...]:
    """Everything that does not depend on the backend. ``root`` is where /proc, /etc and /run are read."""
    return (
        _architecture(architecture or platform.machine()),
        _seccomp(root),
        _pidfd(),
        _user_namespaces(root),
        *_apparmor(root),
        _surroundings(root, environ),
        _runtime_folder(environ),
        _open_files(resource.getrlimit(resource.RLIMIT_NOFILE)),
        _processes(root, resource.getrlimit(resource.RLIMIT_NPROC)[0]),
        _control_groups(delegation),
    )


def read(path: Path, default: str = "") -> str:
    """The text of a small file, ``default`` where it cannot be read."""
    try:
        return path.read_text("utf-8", "replace").strip()
    except OSError:
        return default


def setting(root: Path, name: str) -> str | None:
    """A kernel setting by its sysctl name; None where this kernel has none of that name."""
    return read(root / "proc/sys" / name.replace(".", "/")) or None


def _architecture(machine: str) -> Check:
    known = machine in ARCHITECTURES
    advice = "" if known else f"Run on one of {', '.join(sorted(ARCHITECTURES))}: the seccomp filter knows only these."
    return Check("architecture", "uname -m", machine, "ok" if known else "broken", advice)


def _seccomp(root: Path) -> Check:
    tried = "read kernel.seccomp.actions_avail"
    actions = setting(root, "kernel.seccomp.actions_avail")
    if actions is None:
        return Check("seccomp filters", tried, "no such setting", "broken", "Use a kernel with CONFIG_SECCOMP_FILTER.")
    missing = {"kill_process", "errno"} - set(actions.split())
    seen = f"lacks {', '.join(sorted(missing))}" if missing else "kill_process and errno are there"
    return Check(
        "seccomp filters", tried, seen, "broken" if missing else "ok", "Use Linux 4.14 or newer." * bool(missing)
    )


def _pidfd() -> Check:
    """The supervisor waits for programs with pidfd_open, in Linux since 5.3."""
    tried, release = "pidfd_open of this process", platform.release()
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        return Check("kernel", tried, f"{release}: {error.strerror}", "broken", "Use Linux 5.3 or newer.")
    return Check("kernel", tried, f"{release}: works", "ok")


def _user_namespaces(root: Path) -> Check:
    name, tried = "user namespaces", "read user.max_user_namespaces"
    if setting(root, "kernel.unprivileged_userns_clone") == "0":
        advice = f"{MAKE_PODMAN}, or as root: sysctl -w kernel.unprivileged_userns_clone=1"
        return Check(name, "read kernel.unprivileged_userns_clone", "0: refused to ordinary users", "broken", advice)
    count = int(setting(root, "user.max_user_namespaces") or 0)
    if count > 2 * _MANY:
        return Check(name, tried, f"{count} at once", "ok")
    seen = f"{count} at once, and every cell is one or two" if count else "none: every sandbox is made of one"
    advice = f"{MAKE_PODMAN}, or as root: sysctl -w user.max_user_namespaces=20000"
    return Check(name, tried, seen, "warning" if count else "broken", advice)


def _apparmor(root: Path) -> tuple[Check, ...]:
    """Ubuntu, from 23.10 on: only programs with a profile that says so may use user namespaces."""
    name = "kernel.apparmor_restrict_unprivileged_userns"
    if (setting(root, name) or "0") == "0":
        return ()
    text = "\n".join(read(file) for file in sorted((root / "etc/apparmor.d").glob("*")) if file.is_file())
    programs = ("/usr/bin/podman", "/usr/bin/crun", "/usr/bin/bwrap")
    without = [program for program in programs if program not in text]
    seen = "restricted, and there is a profile for each of " + ", ".join(programs)
    if not without:
        return (Check("AppArmor", f"read {name} and /etc/apparmor.d", seen, "ok"),)
    seen = f"restricted, and /etc/apparmor.d has no profile for {', '.join(without)}"
    advice = (
        f"{MAKE_PODMAN}, which writes the profiles; or as root, for every program of the machine: sysctl -w {name}=0"
    )
    return (Check("AppArmor", f"read {name} and /etc/apparmor.d", seen, "warning", advice),)


def _surroundings(root: Path, environ: Mapping[str, str]) -> Check:
    """Where we run, as far as it leaves traces; a hint when something does not work."""
    found = []
    if "microsoft" in read(root / "proc/version").lower():
        found.append("WSL" if (root / "run/systemd/system").is_dir() else "WSL without systemd")
    if "KUBERNETES_SERVICE_HOST" in environ:
        found.append("a Kubernetes pod")
    elif (root / ".dockerenv").exists():
        found.append("a Docker container")
    elif (root / "run/.containerenv").exists():
        found.append("a Podman container")
    tried = "look for traces of containers and WSL"
    if not found:
        return Check("surroundings", tried, "none", "ok")
    return Check(
        "surroundings", tried, " in ".join(reversed(found)), "note", "See docs/sandbox-setup.md for what works there."
    )


def _runtime_folder(environ: Mapping[str, str]) -> Check:
    name, tried = "runtime folder", "look at XDG_RUNTIME_DIR"
    folder, uid = environ.get("XDG_RUNTIME_DIR", ""), os.getuid()
    longest = len(f"{folder}/palaestra/{_LONGEST_FOLDER}/control/{SOCKET_NAME}")
    fallback = f"sockets are under /tmp/palaestra-{uid} instead"
    if uid == 0:
        return Check(name, tried, f"root: {fallback}", "ok")
    advice = f"Log in through a real session (ssh, not su), or: export XDG_RUNTIME_DIR=/run/user/{uid}; {MAKE_PODMAN}."
    problem = None
    if not folder:
        problem = "is not set"
    elif not os.path.isdir(folder) or os.stat(folder).st_uid != uid or not os.access(folder, os.W_OK | os.X_OK):
        problem = "is not a folder that belongs to us"
    elif longest > _SOCKET_PATH:
        problem = f"is too long: a socket in it would have a path of {longest} bytes, and {_SOCKET_PATH} are the most"
    if problem:
        return Check(name, tried, f"{folder} {problem}; {fallback}".lstrip(), "warning", advice)
    return Check(name, tried, f"{folder}: ours; the longest socket path has {longest} of {_SOCKET_PATH} bytes", "ok")


def _open_files(limits: tuple[int, int]) -> Check:
    """The owner holds one connection a cell, and has raised its soft limit as far as it may."""
    soft, hard = limits
    seen = f"{soft} (at most {hard})"
    if soft == resource.RLIM_INFINITY or soft >= _MANY + 500:
        return Check("open files of this process", "getrlimit", seen, "ok")
    advice = (
        f"Each cell takes one. For {_MANY} cells raise the hard limit to {_MANY * 4}: `* hard nofile {_MANY * 4}` in "
        "/etc/security/limits.conf, LimitNOFILE= of a systemd service, or docker run --ulimit nofile=…"
    )
    return Check("open files of this process", "getrlimit", f"{seen}: {max(soft - 100, 0)} cells", "warning", advice)


def _processes(root: Path, most: int) -> Check:
    """Every idle cell is one process, beside what runs in it; the smallest of several limits counts."""
    found = {"kernel.pid_max": int(setting(root, "kernel.pid_max") or 0) or resource.RLIM_INFINITY, "ulimit -u": most}
    for line in read(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        mount = {"pids": "pids", "": ""}.get(controllers)
        if mount is not None:
            text = read(root / "sys/fs/cgroup" / mount / group.lstrip("/") / "pids.max")
            found[f"pids.max of {group}"] = int(text) if text.isdigit() else resource.RLIM_INFINITY
    bounded = {name: value for name, value in found.items() if value != resource.RLIM_INFINITY}
    if not bounded:
        return Check("processes of this user", "read the limits", "no limit", "ok")
    name, least = min(bounded.items(), key=lambda item: item[1])
    enough = least >= 2 * _MANY
    advice = "" if enough else f"Each cell takes one and its programs more: raise {name}."
    return Check(
        "processes of this user", "read the limits", f"{least} ({name})", "ok" if enough else "warning", advice
    )


def _control_groups(delegation: Delegation) -> Check:
    """Whether memory, processes and CPU of a whole cell can be bounded; the cells are asked in ``limits``."""
    tried = "make a control group and have a process join it"
    version = f"version {delegation.version}" if delegation.version else "none mounted"
    seen = f"{version}; ours to use: {', '.join(sorted(delegation.controllers)) or 'nothing'}"
    if delegation.problem is None:
        return Check("control groups", tried, seen, "ok")
    first = "" if delegation.version == 2 else f"{MAKE_PODMAN}. "  # on version 2 it takes more than a folder
    advice = f"{first}{delegation.advice} What was seen: {delegation.problem}"
    return Check("control groups", tried, seen, "warning", advice)
