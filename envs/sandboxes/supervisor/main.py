"""PID 1 of a host: accepts connections, forks a process for each, and never waits for any of them."""

from __future__ import annotations

import gc
import importlib
import os
import resource
import signal
import socket
import sys
from typing import NoReturn

from palaestra.envs.sandboxes.supervisor import cell, interpreter, kernel, program, seccomp
from palaestra.envs.sandboxes.supervisor.frames import PREFIX, MalformedFrame, decode_body, encode, receive_first

SOCKET_NAME = "supervisor.sock"
ERROR_NAME = "error"
"""Beside the socket, when there will be none: why not."""
_FIRST_FRAME_S = 10
_JOIN_FILES = 3
"""Open files that may come with a first frame: one for each hierarchy of control groups."""
CELL_IDS = 50_000
"""Ids are used in turn; a rootless user has 65,536 of them unless /etc/subuid says otherwise."""
_REHEARSALS = 20
"""More than CPython 3.11 and later take to specialise a function."""
_ORPHAN_S = 60
"""How long a supervisor waits for the lifeline of its owner before it gives up."""


def main(arguments: list[str]) -> NoReturn:
    """``CONTROL_FOLDER FIRST_ID [MODULE ...]``: cells get ids from FIRST_ID on; 0 means that all have our own."""
    if sys.flags.isolated:  # the host started us untouched by the environment of its image; now choose our own
        environment = interpreter.program_environment(os.environ)
        executable = interpreter.choose(environment)
        os.execve(executable, [executable, "-s", "-S", "-B", sys.argv[0], *arguments], environment)
    control, first_id, *modules = arguments
    try:
        listener, filter_program = _prepare(control, modules)
    except (ImportError, OSError) as error:
        unfinished = os.path.join(control, f".{ERROR_NAME}")  # whoever sees the name finds the whole text
        with open(unfinished, "w") as file:
            file.write(f"{type(error).__name__}: {error}")
        os.rename(unfinished, os.path.join(control, ERROR_NAME))
        os._exit(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps; a cell's init is our child
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    signal.signal(signal.SIGALRM, lambda *_: os._exit(0))
    signal.alarm(_ORPHAN_S)
    signal.signal(signal.SIGUSR1, lambda *_: signal.alarm(0))
    _rehearse()
    gc.collect()
    gc.freeze()
    number = 0
    while True:
        number += 1
        try:
            connection, _ = listener.accept()
            with connection:
                if os.fork() == 0:
                    listener.close()
                    outer_id = int(first_id) + number % CELL_IDS if int(first_id) else os.getuid()
                    _handle(connection, control, outer_id, filter_program)
        except OSError as error:  # out of processes, memory or descriptors: this connection is refused, others go on
            sys.stderr.write(f"supervisor: {error}\n")


def _prepare(control: str, modules: list[str]) -> tuple[socket.socket, bytes]:
    """Import what forked interpreters shall find, then the listening socket and the system-call filter."""
    del sys.path[0]
    for module in modules:
        importlib.import_module(module)
    for name in [name for name in sys.modules if name.partition(".")[0] == "palaestra"]:
        del sys.modules[name]  # a forked program shall not find them; we go on without
    program.prepare_streams()
    kernel.set_dumpable(False)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, 256), hard), hard))
    listener = socket.socket(socket.AF_UNIX)
    os.umask(0o077)
    listener.bind(os.path.join(control, SOCKET_NAME))
    listener.listen(512)
    return listener, seccomp.build()


def _rehearse() -> None:
    """Do what every cell does first, so that the interpreter adapts its code to it once: cells share those pages."""
    frame = encode({"op": "open"})[PREFIX.size :]
    for _ in range(_REHEARSALS):
        decode_body(frame, b"")
        with open(os.devnull, "w"):
            pass
    kernel.resolve()


def _handle(connection: socket.socket, control: str, outer_id: int, filter_program: bytes) -> NoReturn:
    """In the child: the first frame says what the connection is for."""
    # The first process of a pid namespace ignores every signal from inside for which it has no handler.
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    status = 1
    try:
        connection.settimeout(_FIRST_FRAME_S)
        message, descriptors = receive_first(connection, _JOIN_FILES)
        connection.settimeout(None)
        operation = message[0].get("op") if message else None
        if operation == "open":
            cell.join_groups(connection, descriptors)
            cell.start(connection, message[0], control, outer_id, filter_program)  # type: ignore[index]
        elif operation == "ping":
            connection.sendall(encode({"status": _own_status(), "python": sys.executable}))
        elif operation == "lifeline":
            _hold_lifeline(connection)
        status = 0
    except (MalformedFrame, OSError, KeyError, TypeError, ValueError) as error:
        sys.stderr.write(f"supervisor: {error}\n")
    finally:
        os._exit(status)


def _own_status() -> dict[str, str]:
    with open("/proc/self/status") as file:
        lines = [line.partition(":") for line in file]
    return {name: value.strip() for name, _, value in lines if name.startswith(("Cap", "NoNewPrivs", "Seccomp", "Uid"))}


def _hold_lifeline(connection: socket.socket) -> None:
    """The host lives as long as this connection."""
    os.kill(1, signal.SIGUSR1)
    connection.sendall(encode({"ok": True}))
    while connection.recv(1024):
        pass
    os.kill(1, signal.SIGTERM)
