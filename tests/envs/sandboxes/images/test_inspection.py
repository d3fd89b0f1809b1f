"""What Podman made is compared with what it was asked: each weaker setting is named, and no recorded container is.

``inspected-4.3.1.json`` and ``inspected-5.4.2.json`` are what those versions of Podman say of a container of ours, and
what they gave to crun.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from palaestra.envs.errors import SandboxUnavailable
from palaestra.envs.sandboxes import BackendName, Python, SandboxSpec, open_pool
from palaestra.envs.sandboxes.images.resolve import default_image
from palaestra.envs.sandboxes.leases import Lease
from palaestra.envs.sandboxes.podman.backend import PodmanHost
from palaestra.envs.sandboxes.podman.container import Wanted, differences, limits_processes, status_differences
from palaestra.envs.sandboxes.podman.service import PodmanService

VERSIONS = {
    version: json.loads(Path(__file__).with_name(f"inspected-{version}.json").read_text())
    for version in ("4.3.1", "5.4.2")
}
RECORDED = VERSIONS["4.3.1"]
OTHER_LIMIT = {"type": "RLIMIT_NOFILE", "soft": 1, "hard": 2}
PIDS = {"pids": {"limit": 2048}}
SECOND_BIND = {"destination": "/host", "type": "bind", "source": "/", "options": ["rbind", "rw"]}
STATUS = {"NoNewPrivs": "1", "Seccomp": "2", "CapBnd": "00000000002000c0", "CapAmb": "0" * 16, "CapInh": "0" * 16}


def wanted(version: str = "4.3.1", **changed: Any) -> Wanted:
    made = VERSIONS[version]["made"]
    binds = {each["Destination"]: (Path(each["Source"]), each["RW"]) for each in made["Mounts"]}
    lease = Path(made["Config"]["Labels"]["palaestra.lease"])
    options = {"name": "x", "lease": lease, "image_id": made["Image"], "command": (made["Path"], *made["Args"])}
    return Wanted(**{**options, "binds": binds, "runtime": "crun", **changed})


def changed(version: str, part: str, path: str, value: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The recorded container with one field set; ``value`` may be a function of the one before."""
    both = copy.deepcopy(VERSIONS[version])
    *folders, last = path.split("/")
    place = both[part]
    for name in folders:
        place = place[int(name) if isinstance(place, list) else name]
    place[last] = value(place[last]) if callable(value) else value
    return both["made"], both["config"]


def without(kind: str) -> Any:
    return lambda found: [each for each in found if each["type"] != kind]


@pytest.mark.parametrize("version", VERSIONS)
def test_the_container_that_was_asked_for_is_no_difference(version: str) -> None:
    made, config = VERSIONS[version]["made"], VERSIONS[version]["config"]
    assert differences(wanted(version), made, config) == []
    assert differences(wanted(version, runtime=None), made, config) == []
    assert status_differences(STATUS) == []


@pytest.mark.parametrize(
    ("what", "part", "path", "value"),
    [
        ("OCI runtime: asked 'crun', got 'runc'", "made", "OCIRuntime", "runc"),
        ("image: asked", "made", "Image", "0" * 64),
        ("command: asked", "made", "Args", ["-c", "pass"]),
        ("user: asked '0:0', got '1000'", "made", "Config/User", "1000"),
        ("label: asked", "made", "Config/Labels", None),
        ("network: asked 'none', got 'host'", "made", "HostConfig/NetworkMode", "host"),
        ("read-only root: asked True, got False", "made", "HostConfig/ReadonlyRootfs", False),
        ("privileged: asked False, got True", "made", "HostConfig/Privileged", True),
        ("pid namespace: asked 'private', got 'host'", "made", "HostConfig/PidMode", "host"),
        ("uts namespace: asked 'private', got 'host'", "made", "HostConfig/UTSMode", "host"),
        ("ipc namespace: asked 'private', got 'host'", "made", "HostConfig/IpcMode", "host"),
        ("devices: asked [], got", "made", "HostConfig/Devices", [{"PathOnHost": "/dev/kvm"}]),
        ("log driver: asked 'none', got 'journald'", "made", "HostConfig/LogConfig", {"Type": "journald"}),
        ("shared memory: asked 1048576", "made", "HostConfig/ShmSize", 65_536_000),
        ("bounding capabilities: asked", "made", "BoundingCaps", lambda found: [*found, "CAP_NET_ADMIN"]),
        ("health check: asked None", "made", "Config/Healthcheck", {"Test": ["CMD-SHELL", "true"]}),
        ("volumes: asked [], got ['abc']", "made", "Mounts", [{"Type": "volume", "Name": "abc"}]),
        ("published ports: asked {}", "made", "HostConfig/PortBindings", {"80/tcp": []}),
        ("user id of the process: asked (0, 0, [])", "config", "process/user", {"additionalGids": [4]}),
        ("no_new_privs: asked True, got None", "config", "process/noNewPrivileges", None),
        ("effective capabilities of the process", "config", "process/capabilities/effective", ["CAP_SYS_PTRACE"]),
        ("ambient capabilities of the process", "config", "process/capabilities/ambient", ["CAP_SYS_ADMIN"]),
        ("limit core: asked (0, 0), got None", "config", "process/rlimits", without("RLIMIT_CORE")),
        ("limit nofile: asked (1024, 1024), got (1, 2)", "config", "process/rlimits", [OTHER_LIMIT]),
        ("read-only root of the process", "config", "root/readonly", False),
        ("network namespace of the process: asked 'its own'", "config", "linux/namespaces", without("network")),
        ("pid namespace of the process", "config", "linux/namespaces", without("pid")),
        ("namespace of the process: asked 'its own', got '/x'", "config", "linux/namespaces/2/path", "/x"),
        ("system-call filter: asked True, got False", "config", "linux/seccomp", None),
        ("system-call filter", "config", "linux/seccomp/defaultAction", "SCMP_ACT_ALLOW"),
        ("devices of the process", "config", "linux/devices", [{"path": "/dev/fuse"}]),
        ("limit of processes of the container: asked None, got 2048", "config", "linux/resources", PIDS),
        ("masked paths", "config", "linux/maskedPaths", ["/proc/kcore"]),
        ("read-only paths", "config", "linux/readonlyPaths", ["/proc/sys"]),
        ("hooks", "config", "hooks", {"createContainer": [{"path": "/usr/bin/gpu"}]}),
        ("proxy variables: asked [], got ['https_proxy']", "config", "process/env", ["https_proxy=http://a:b@c:1"]),
        ("mount /host: asked None, got ('bind', '/', 'rw')", "config", "mounts", lambda found: [*found, SECOND_BIND]),
        ("mount /run/palaestra: asked ('bind', ", "config", "mounts", lambda found: found[:3]),
    ],
    ids=lambda value: value.partition(":")[0] if isinstance(value, str) else "",
)  # fmt: skip
@pytest.mark.parametrize("version", VERSIONS)
def test_each_weaker_setting_is_named(version: str, what: str, part: str, path: str, value: Any) -> None:
    found = differences(wanted(version), *changed(version, part, path, value))

    assert any(what in each for each in found), found


def test_a_bind_that_became_writable_or_another_folder_is_named() -> None:
    binds = dict(wanted().binds)
    source, _ = binds["/run/palaestra.zip"]
    made, config = RECORDED["made"], RECORDED["config"]

    writable = differences(wanted(binds={**binds, "/run/palaestra.zip": (source, True)}), made, config)
    other = differences(wanted(binds={**binds, "/run/palaestra.zip": (Path("/etc"), False)}), made, config)

    assert [each.partition(":")[0] for each in writable + other] == ["mount /run/palaestra.zip"] * 2


def test_a_container_of_which_nothing_is_known_differs_in_everything_that_confines_it() -> None:
    found = " ".join(differences(wanted(), {}, {}))

    for what in ("network", "read-only root", "no_new_privs", "system-call filter", "pid namespace", "limit nofile"):
        assert what in found


@pytest.mark.parametrize(
    ("version", "manager", "lifted"), [("v2", "systemd", True), ("v2", "cgroupfs", False), ("v1", "cgroupfs", False)]
)
def test_podmans_limit_of_processes_for_all_cells_together_is_lifted_where_it_sets_one(
    version: str, manager: str, lifted: bool
) -> None:
    assert limits_processes({"host": {"cgroupVersion": version, "cgroupManager": manager}}) is lifted

    asked = wanted(lift_pids=lifted).options().get("pids_limit")

    assert asked == (1 << 22 if lifted else None)
    for limit in (asked, 0, -1) if lifted else ():
        assert differences(wanted(), *changed("4.3.1", "config", "linux/resources", {"pids": {"limit": limit}})) == []


@pytest.mark.parametrize("name", STATUS)
def test_what_the_supervisor_sees_of_itself_is_compared_too(name: str) -> None:
    assert status_differences({**STATUS, name: "0000003fffffffff"}) == [
        f"{name} inside: asked {STATUS[name]!r}, got '0000003fffffffff'"
    ]
    assert len(status_differences({key: value for key, value in STATUS.items() if key != name})) == 1


@pytest.mark.parametrize("runtime", ["crun", "runc"])
async def test_cells_run_in_the_runtime_that_was_asked_for(
    podman: BackendName, runtime: str, find_runtime: Any
) -> None:
    async with await open_pool(SandboxSpec(runtime=find_runtime(runtime)), backend=podman) as pool:
        sandbox = await pool.acquire()
        result = await sandbox.run(Python("import os\nprint(os.getresuid(), os.listdir('.'))"), timeout_s=30)
        host: Any = pool.hosts[0]
        backend: Any = pool.backend
        made = await backend.service.call(lambda client: client.containers.get(host.name).attrs)
        await sandbox.close()
    assert result.stdout == b"(1000, 1000, 1000) []\n"
    assert made["OCIRuntime"] == runtime


async def test_a_container_in_another_runtime_is_refused_and_removed(podman: BackendName) -> None:
    service = PodmanService("crun")
    try:
        image = await default_image(service)
        host = PodmanHost(service, Lease("podman"), "runc")
        with pytest.raises(SandboxUnavailable, match="OCI runtime: asked 'runc', got 'crun'"):
            await host.start(image, None, ())
        await host.close()
        image.claim.release()
        assert not await service.call(lambda client: client.containers.exists(host.name))
    finally:
        await service.close()


@pytest.mark.parametrize(
    ("runtime", "advice"),
    [("palaestra-no-such-runtime", "Install that runtime"), ("/bin/true", "with the OCI runtime '/bin/true'")],
)
async def test_a_runtime_that_is_none_is_an_error_that_says_so(podman: BackendName, runtime: str, advice: str) -> None:
    with pytest.raises(SandboxUnavailable, match=advice):
        await open_pool(SandboxSpec(runtime=runtime), backend=podman)
