"""A host: one running supervisor, its socket, and the lifeline that ends it with its owner."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from palaestra.envs.errors import SandboxBusy, SandboxDied, SandboxUnavailable
from palaestra.envs.sandboxes.cell_groups import HostGroups
from palaestra.envs.sandboxes.connection import Connection
from palaestra.envs.sandboxes.supervisor.main import ERROR_NAME

HOST_STARTS = min(4, max(2, os.cpu_count() or 2))
"""Hosts of one pool that start at the same time. Measured with Podman on two cores: 4.6 containers a second one after
the other, 6.8 two at a time, 7.5 three or four at a time, each of which then takes twice as long."""
_START_S = 60.0
_REPLY_S = 30.0
"""Who is gone is known at once; these bound the wait for one that hangs, on a machine that may be very busy."""
_SAID_BYTES = 4096


class Host(Protocol):
    """What a backend starts."""

    @property
    def socket(self) -> Path:
        """The supervisor's socket; every connection to it is one cell."""

    @property
    def groups(self) -> HostGroups | None:
        """The control groups of its cells; None where none are delegated to us."""

    @property
    def ended(self) -> bool:
        """Whether its supervisor is known to be gone, at no cost; ``healthy`` finds out."""

    async def healthy(self) -> bool:
        """Whether it still accepts and answers. Raises ``SandboxBusy`` where that cannot be known."""

    async def close(self) -> None:
        """End it with every cell in it, and remove what it kept on disk. Idempotent."""


class Backend(Protocol):
    """A way to start hosts."""

    @property
    def name(self) -> str: ...

    async def start_host(self) -> Host:
        """A host that answers. Raises ``SandboxUnavailable`` with what to do."""

    async def close(self) -> None:
        """Give back what the backend itself holds."""


async def connect_lifeline(socket: Path, ended: Callable[[], str | None]) -> Connection:
    """Wait until the supervisor answers and hold the connection that keeps it alive.

    ``ended`` says why it will never answer, or None while it may. Raises ``SandboxUnavailable``.
    """
    failure = socket.with_name(ERROR_NAME)
    deadline = time.monotonic() + _START_S
    while True:
        try:
            connection = await Connection.open(socket)
            await connection.request({"op": "lifeline"}, timeout_s=_REPLY_S)
        except (OSError, SandboxDied) as error:
            if (text := _said(failure)) is not None:
                raise SandboxUnavailable(f"the supervisor could not start: {text}") from None
            if (reason := ended()) is not None:
                raise SandboxUnavailable(reason) from None
            if time.monotonic() > deadline:
                raise SandboxUnavailable(f"the supervisor did not answer within {_START_S:.0f} s: {error}") from error
            await asyncio.sleep(0.003)
        else:
            return connection


def _said(file: Path) -> str | None:
    """What a supervisor wrote of its failure; None before it does. Programs of an image may have been there first."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"{file.name}: {error.strerror}"
    try:
        return os.read(descriptor, _SAID_BYTES).decode("utf-8", "replace")
    except BlockingIOError:
        return f"{file.name} is no file"
    finally:
        os.close(descriptor)


async def answers(socket: Path) -> bool:
    """Whether the supervisor behind the socket is alive and serves new connections.

    Raises ``SandboxUnavailable`` when it is we who cannot ask, so that no host is given up for that.
    """
    try:
        connection = await Connection.open(socket)
        await connection.request({"op": "ping"}, timeout_s=_REPLY_S)
    except (OSError, SandboxDied) as error:  # a TimeoutError is an OSError
        check_own_descriptors(error)
        return False
    connection.close()
    return True


def check_own_descriptors(error: Exception) -> None:
    """Raise ``SandboxBusy`` if what failed is this process, out of file descriptors, and not the other end."""
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        raise SandboxBusy(
            f"this process cannot open another connection to its sandboxes: {error.strerror}; "
            "each cell takes one descriptor, with egress more; raise the hard limit (ulimit -Hn) or hold fewer cells"
        ) from error
