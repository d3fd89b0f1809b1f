"""What a host's container is asked to be, and whether Podman made that.

Podman's API ignores options that it does not know, and images bring settings of their own. So everything that confines
a container, or could be changed by an image, is asked for by name here, and compared with what was made: with what
Podman says of the container, and with the configuration that it handed to the OCI runtime, whose form is a standard
(OCI runtime-spec) and the same in all versions of Podman.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONTROL = "/run/palaestra"
LABEL = "palaestra.lease"
"""A container's label: the absolute path of its owner's lease file. Podman lists the containers of all processes of a
user, whose runtime folders may differ."""
CAPABILITIES = ("SETGID", "SETUID", "SYS_ADMIN")
_CAPABILITY_BITS = {"SETGID": 6, "SETUID": 7, "SYS_ADMIN": 21}
_ULIMITS = {"core": 0, "nofile": 1024}
_SHARED_MEMORY_BYTES = 1 << 20
_MOST_PROCESSES = 1 << 22
"""More than a kernel can have: the limit of a container that is to have none."""
_KERNEL_FILE_SYSTEMS = {
    "/dev": "tmpfs",
    "/dev/mqueue": "mqueue",
    "/dev/pts": "devpts",
    "/proc": "proc",
    "/sys": "sysfs",
    "/sys/fs/cgroup": "cgroup",
}
"""What Podman mounts in every container, beside files of its own (/etc/hostname and the like)."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """One container. ``binds`` is destination to (source, writable); ``runtime`` None: any; ``lift_pids``: Podman would
    limit the processes of all its cells together (``limits_processes``), and must not."""

    name: str
    lease: Path
    image_id: str
    command: tuple[str, ...]
    binds: Mapping[str, tuple[Path, bool]]
    runtime: str | None = None
    lift_pids: bool = False

    def options(self) -> dict[str, Any]:
        """For ``client.containers.create``; the first word of the command replaces the image's entry point."""
        return {
            "name": self.name,
            "labels": {LABEL: str(self.lease)},
            "entrypoint": [self.command[0]],
            "user": "0:0",
            "working_dir": "/",
            "image_volume_mode": "ignore",
            "healthcheck": {"Test": ["NONE"]},
            "cap_drop": ["ALL"],
            "cap_add": list(CAPABILITIES),
            "no_new_privileges": True,
            "privileged": False,
            "unmasked_paths": ["ALL"],  # a cell may mount its own /proc only where this one is whole; cells mask theirs
            "network_mode": "none",
            "pid_mode": "private",
            "ipc_mode": "private",
            "uts_mode": "private",
            "read_only": True,
            "read_write_tmpfs": False,
            "use_config_proxy": False,
            "sdnotifyMode": "ignore",
            "log_config": {"Type": "none"},
            "shm_size": _SHARED_MEMORY_BYTES,
            "stop_timeout": 0,
            "ulimits": [{"Name": name, "Soft": value, "Hard": value} for name, value in _ULIMITS.items()],
            "mounts": [
                {"type": "bind", "source": str(source), "target": target, "read_only": not writable}
                for target, (source, writable) in self.binds.items()
            ],
            **({"pids_limit": _MOST_PROCESSES} if self.lift_pids else {}),
        }


def limits_processes(info: Mapping[str, Any]) -> bool:
    """Whether this Podman gives a container a limit of processes (2,048) unless it is asked for another one.

    ``info`` is what ``podman info`` says. That is so where systemd makes the groups of containers, on version 2.
    Elsewhere a rootless Podman has no such limit, and warns of one or fails when it is asked for one.
    """
    host = info.get("host") or {}
    return host.get("cgroupVersion") == "v2" and host.get("cgroupManager") == "systemd"


def differences(wanted: Wanted, made: Mapping[str, Any], runtime_config: Mapping[str, Any]) -> list[str]:
    """Where a container is another one than was asked for: ``what: asked …, got …`` each.

    ``made`` is what Podman's inspection says, ``runtime_config`` the ``config.json`` that it gave to the OCI runtime. A
    field that is missing counts as a difference, unless its absence is the safe value.
    """
    checks = [*_inspected(wanted, made), *_configured(runtime_config)]
    checks += _mounted(wanted, str(made.get("Id")), runtime_config.get("mounts") or ())
    return [f"{what}: asked {_show(asked)}, got {_show(got)}" for what, asked, got in checks if asked != got]


_Check = tuple[str, Any, Any]


def _inspected(wanted: Wanted, made: Mapping[str, Any]) -> Iterator[_Check]:
    host, config = made.get("HostConfig") or {}, made.get("Config") or {}
    if wanted.runtime is not None:
        yield "OCI runtime", wanted.runtime, made.get("OCIRuntime")
    yield "image", wanted.image_id, made.get("Image")
    yield "command", list(wanted.command), [made.get("Path"), *(made.get("Args") or ())]
    yield "user", "0:0", config.get("User")
    yield "label", str(wanted.lease), (config.get("Labels") or {}).get(LABEL)
    yield "network", "none", host.get("NetworkMode")
    yield "read-only root", True, host.get("ReadonlyRootfs")
    yield "privileged", False, host.get("Privileged")
    yield "pid namespace", "private", host.get("PidMode")
    yield "uts namespace", "private", host.get("UTSMode")
    # Podman calls it shareable as long as another container could ask to join it; either is its own.
    ipc = host.get("IpcMode")
    yield "ipc namespace", "private", "private" if ipc == "shareable" else ipc
    yield "devices", [], host.get("Devices") or []
    yield "log driver", "none", (host.get("LogConfig") or {}).get("Type")
    yield "shared memory", _SHARED_MEMORY_BYTES, host.get("ShmSize")
    yield "bounding capabilities", _names(CAPABILITIES), set(made.get("BoundingCaps") or ())
    yield "health check", None, _health_check(config.get("Healthcheck"))
    yield "volumes", set(), {each.get("Name") for each in made.get("Mounts") or () if each.get("Type") == "volume"}
    yield "published ports", {}, host.get("PortBindings") or {}


def _configured(config: Mapping[str, Any]) -> Iterator[_Check]:
    process, linux = config.get("process") or {}, config.get("linux") or {}
    user = process.get("user") or {}
    yield "user id of the process", (0, 0, []), (user.get("uid"), user.get("gid"), _other_groups(user))
    yield "no_new_privs", True, process.get("noNewPrivileges")
    sets = process.get("capabilities") or {}
    for name in ("bounding", "effective", "permitted"):
        yield f"{name} capabilities of the process", _names(CAPABILITIES), set(sets.get(name) or ())
    for name in ("inheritable", "ambient"):
        yield f"{name} capabilities of the process", set(), set(sets.get(name) or ())
    limits = {each["type"]: (each["soft"], each["hard"]) for each in process.get("rlimits") or ()}
    for name, value in _ULIMITS.items():
        yield f"limit {name}", (value, value), limits.get(f"RLIMIT_{name.upper()}")
    yield "read-only root of the process", True, (config.get("root") or {}).get("readonly")
    namespaces = {each["type"]: each.get("path", "") for each in linux.get("namespaces") or ()}
    pids = ((linux.get("resources") or {}).get("pids") or {}).get("limit") or 0
    yield "limit of processes of the container", None, pids if 0 < pids < _MOST_PROCESSES else None
    for name in ("pid", "network", "ipc", "uts", "mount"):
        yield f"{name} namespace of the process", "its own", _namespace(namespaces, name)
    yield "system-call filter", True, _filters(linux.get("seccomp") or {})
    yield "devices of the process", [], linux.get("devices") or []
    yield "masked paths", [], linux.get("maskedPaths") or []
    yield "read-only paths", [], linux.get("readonlyPaths") or []
    yield "hooks", {}, config.get("hooks") or {}
    names = [each.partition("=")[0] for each in process.get("env") or ()]  # a proxy's address may hold a password
    yield "proxy variables", [], [name for name in names if name.lower().endswith("_proxy")]


def _mounted(wanted: Wanted, container_id: str, mounts: Sequence[Mapping[str, Any]]) -> Iterator[_Check]:
    asked = {
        target: ("bind", str(source), "rw" if writable else "ro") for target, (source, writable) in wanted.binds.items()
    }
    got = {}
    for mount in mounts:
        target, kind, source = str(mount["destination"]), str(mount.get("type")), str(mount.get("source"))
        mode = "ro" if "ro" in (mount.get("options") or ()) else "rw"
        podmans_own = (
            f"/{container_id}/userdata/" in f"{source}/"
            if kind == "bind"
            else _KERNEL_FILE_SYSTEMS.get(target) == kind.removesuffix("2")
        )
        if target in asked or not podmans_own:
            got[target] = (kind, source, mode)
    yield from ((f"mount {target}", asked.get(target), got.get(target)) for target in sorted({*asked, *got}))


def status_differences(status: Mapping[str, str]) -> list[str]:
    """Where the supervisor's own ``/proc/self/status`` shows less confinement than was asked for."""
    bounding = f"{sum(1 << _CAPABILITY_BITS[name] for name in CAPABILITIES):016x}"
    checks = [("NoNewPrivs", "1"), ("Seccomp", "2"), ("CapBnd", bounding), ("CapAmb", "0" * 16), ("CapInh", "0" * 16)]
    return [
        f"{name} inside: asked {asked!r}, got {status.get(name)!r}"
        for name, asked in checks
        if status.get(name) != asked
    ]


def _names(capabilities: tuple[str, ...]) -> set[str]:
    return {f"CAP_{name}" for name in capabilities}


def _health_check(found: Mapping[str, Any] | None) -> Any:
    test = (found or {}).get("Test") or ["NONE"]
    return None if test == ["NONE"] else test


def _other_groups(user: Mapping[str, Any]) -> list[int]:
    return [group for group in user.get("additionalGids") or () if group != 0]


def _namespace(namespaces: Mapping[str, str], name: str) -> str:
    if name not in namespaces:
        return "the host's"
    return namespaces[name] or "its own"


def _filters(seccomp: Mapping[str, Any]) -> bool:
    """Whether what no rule names is refused."""
    return seccomp.get("defaultAction") in ("SCMP_ACT_ERRNO", "SCMP_ACT_KILL", "SCMP_ACT_KILL_PROCESS")


def _show(value: Any) -> str:
    return repr(sorted(value, key=repr)) if isinstance(value, set) else repr(value)
