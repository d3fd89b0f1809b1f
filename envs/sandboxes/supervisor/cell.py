"""A cell: the process that becomes PID 1 of fresh namespaces and serves one connection until it closes."""

from __future__ import annotations

import gc
import os
import socket
from typing import NoReturn

from palaestra.envs.sandboxes.supervisor import files, kernel, network
from palaestra.envs.sandboxes.supervisor.frames import Header, MalformedFrame, encode, receive
from palaestra.envs.sandboxes.supervisor.session import Sessions
from palaestra.envs.sandboxes.supervisor.step import OwnerGone, Step

_NAMESPACES = (
    kernel.CLONE_NEWUSER
    | kernel.CLONE_NEWPID
    | kernel.CLONE_NEWNS
    | kernel.CLONE_NEWIPC
    | kernel.CLONE_NEWNET
    | kernel.CLONE_NEWUTS
)
_HOSTNAME = "cell"
_USER_ID = 1000
_OOM_SCORE = 500
"""When memory is short all of a cell goes before anything of the machine, and its programs (1000) before its init."""
_TERMINALS = "newinstance,ptmxmode=666,mode=600,max=16"
_USER_LIMITS = {"inotify_instances": 32, "inotify_watches": 8192, "fanotify_groups": 0, "fanotify_marks": 0}
_USER_LIMITS.update((f"{kind}_namespaces", 0) for kind in ("cgroup", "ipc", "mnt", "net", "pid", "time", "user", "uts"))
"""Of /proc/sys/user/max_*: what a cell takes of these counts for the user who owns its host, whose own limit it could
use up. Where the kernel has no such count there is nothing to limit."""


def join_groups(connection: socket.socket, descriptors: list[int]) -> None:
    """Move this process, and so all that it will make, into control groups, while it may; then forget them.

    The owner opened the files. Nothing in a cell or a host can name a control group, and so change a limit.
    """
    try:
        for descriptor in descriptors:
            os.write(descriptor, b"0")
            os.close(descriptor)
    except OSError as error:
        connection.sendall(encode({"error": "setup", "text": f"cannot join the control group: {error.strerror}"}))
        raise


def start(connection: socket.socket, opening: Header, hidden: str, outer_id: int, filter_program: bytes) -> None:
    """In a child of the supervisor: make the namespaces and, inside them, the cell. Returns when that one runs.

    The user namespace holds one user, 1000, who is ``outer_id`` outside; so a cell has no identity that could own
    anything else, and the kernel counts its processes apart from those of other cells.
    """
    try:
        _enter_namespaces(outer_id)
        child = os.fork()
    except OSError as error:
        connection.sendall(encode({"error": "setup", "text": str(error)}))
        raise
    if child == 0:
        try:
            source_fd = os.memfd_create("program")  # for the text of every command; programs may not make any
            proxy_listener = _become_init(opening, hidden, filter_program)
            limits = _limits(opening, source_fd)
        except OSError as error:
            connection.sendall(encode({"error": "setup", "text": str(error)}))
            os._exit(1)
        if proxy_listener is None:
            connection.sendall(encode({"ok": True}))
        else:
            network.send_with_listener(connection, encode({"ok": True}), proxy_listener)
        _serve(connection, limits)


def _enter_namespaces(outer_id: int) -> None:
    kernel.set_dumpable(True)  # else the id maps of this process are not ours to write
    if outer_id == os.getuid():
        group = os.getgid()
        kernel.unshare(_NAMESPACES)
        _map_ids(os.getpid(), outer_id, group)
    else:
        _unshare_as(outer_id)


def _unshare_as(outer_id: int) -> None:
    """Enter a user namespace for another id than our own; a child that stays outside has to write its maps."""
    entered_read, entered_write = os.pipe()
    entering = os.getpid()
    helper = os.fork()
    if helper == 0:
        try:
            os.close(entered_write)  # else it would wait for good, and hold the connection, where we fail to enter
            if os.read(entered_read, 1):
                _map_ids(entering, outer_id, outer_id)
                os._exit(0)
        finally:
            os._exit(1)
    kernel.unshare(_NAMESPACES)
    os.write(entered_write, b".")
    _, status = os.waitpid(helper, 0)
    if status != 0:
        raise PermissionError(1, f"the id map of user {outer_id} was refused; does /etc/subuid grant enough ids?")
    os.close(entered_read)
    os.close(entered_write)
    kernel.keep_capabilities_over_setuid()
    os.setgroups([])
    os.setresgid(_USER_ID, _USER_ID, _USER_ID)
    os.setresuid(_USER_ID, _USER_ID, _USER_ID)
    kernel.raise_capabilities()
    kernel.set_dumpable(True)  # the change of identity took it back; the cell's init needs its /proc/self once more


def _map_ids(pid: int, uid: int, gid: int) -> None:
    own = pid == os.getpid()  # without privileges outside, a process must first give up setgroups
    texts = [("setgroups", "deny")] if own else []
    texts += [("gid_map", f"{_USER_ID} {gid} 1"), ("uid_map", f"{_USER_ID} {uid} 1")]
    for name, text in texts:
        with open(f"/proc/{pid}/{name}", "w") as file:
            file.write(text)


def _become_init(opening: Header, hidden: str, filter_program: bytes) -> socket.socket | None:
    """Fresh mounts and network; then give up every privilege that made them. Returns the owner's proxy's port."""
    kernel.mount("none", "/", "none", kernel.MS_REC | kernel.MS_PRIVATE)
    scratch = f"size={opening['workspace_bytes']},nr_inodes={opening['inodes']},mode="
    flags = kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("tmpfs", "/workspace", "tmpfs", flags, scratch + "755")
    kernel.mount("tmpfs", "/tmp", "tmpfs", flags, scratch + "1777")
    kernel.mount("tmpfs", "/dev/shm", "tmpfs", flags, scratch + "1777")
    for folder in (hidden, "/dev/mqueue"):  # the supervisor's socket; queues that all cells of a host would share
        if os.path.isdir(folder):
            kernel.mount("tmpfs", folder, "tmpfs", flags | kernel.MS_RDONLY, "size=4k,nr_inodes=1,mode=000")
    if os.path.isdir("/dev/pts"):  # else a terminal of one cell could be opened in every other that shares its user id
        kernel.mount("devpts", "/dev/pts", "devpts", kernel.MS_NOSUID | kernel.MS_NOEXEC, _TERMINALS)
    kernel.mount("proc", "/proc", "proc", flags | kernel.MS_NOEXEC, "hidepid=2")
    kernel.set_oom_score(_OOM_SCORE)
    for name, most in _USER_LIMITS.items():
        try:
            with open(f"/proc/sys/user/max_{name}", "w") as file:
                file.write(str(most))
        except FileNotFoundError:
            pass
    proxy_listener = network.set_up(opening)
    socket.sethostname(_HOSTNAME)
    os.umask(0o022)
    os.chdir("/workspace")
    kernel.set_no_new_privs()
    kernel.drop_capabilities()
    kernel.set_dumpable(False)
    kernel.set_system_call_filter(filter_program)
    return proxy_listener


def _limits(opening: Header, source_fd: int) -> Header:
    cpu_s = opening["cpu_s"]
    return {
        "output_bytes": opening["output_bytes"],
        "descriptors": 256,
        "source_fd": source_fd,
        "rlimits": {
            "RLIMIT_AS": opening["address_space_bytes"],
            "RLIMIT_NPROC": opening["pids"] + 1,  # this process counts too
            "RLIMIT_FSIZE": opening["file_bytes"],
            "RLIMIT_NOFILE": opening["open_files"],
            "RLIMIT_CPU": [cpu_s, cpu_s + 1],
            "RLIMIT_CORE": 0,
            "RLIMIT_MEMLOCK": 0,
            "RLIMIT_MSGQUEUE": 0,
            "RLIMIT_RTPRIO": 0,
            "RLIMIT_NICE": 0,
            "RLIMIT_SIGPENDING": 1024,
        },
    }


def _serve(connection: socket.socket, limits: Header) -> NoReturn:
    """Answer one request after the other; at the end of the connection the process, and so the cell, ends."""
    gc.freeze()
    sessions = Sessions()
    try:
        while True:
            message = receive(connection)
            if message is None:
                break
            connection.sendall(encode(*_answer(*message, limits=limits, connection=connection, sessions=sessions)))
    except (OwnerGone, MalformedFrame, ConnectionError):
        pass
    finally:
        os._exit(0)


def _answer(
    request: Header, blobs: list[bytes], *, limits: Header, connection: socket.socket, sessions: Sessions
) -> tuple[Header, list[bytes]]:
    operation = request.get("op")
    try:
        if operation == "run":
            return Step(request, blobs, limits, connection, sessions).run()
        if operation == "write":
            for path, data in zip(request["paths"], blobs):  # noqa: B905 - not in Python 3.8
                files.write(path, data, request["append"])
            return {}, []
        if operation == "read":
            size, data = files.read(request["path"], request["max_bytes"])
            return {"size": size}, [data]
        if operation == "pack":
            return {}, [files.pack(request["max_bytes"])]
        if operation == "unpack":
            files.unpack(blobs[0])
            return {}, []
    except OSError as error:
        return {"error": "os", "errno": error.errno, "text": str(error)}, []
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise MalformedFrame(f"bad request {operation!r}: {error!r}") from error
    raise MalformedFrame(f"unknown request {operation!r}")
