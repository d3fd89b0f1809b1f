"""A host: one running supervisor, its socket, and the lifeline that ends it with its owner."""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from palaestra.envs.errors import SandboxDied, SandboxUnavailable
from palaestra.envs.sandboxes.cell_groups import HostGroups
from palaestra.envs.sandboxes.connection import Connection
from palaestra.envs.sandboxes.supervisor.main import ERROR_NAME

_START_S = 20.0
_REPLY_S = 10.0


class Host(Protocol):
    """What a backend starts."""

    @property
    def socket(self) -> Path:
        """The supervisor's socket; every connection to it is one cell."""

    @property
    def groups(self) -> HostGroups | None:
        """The control groups of its cells; None where none are delegated to us."""

    async def healthy(self) -> bool:
        """Whether it still accepts and answers."""

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
            if failure.exists():
                text = failure.read_text("utf-8", "replace")
                raise SandboxUnavailable(f"the supervisor could not start: {text}") from None
            if (reason := ended()) is not None:
                raise SandboxUnavailable(reason) from None
            if time.monotonic() > deadline:
                raise SandboxUnavailable(f"the supervisor did not answer within {_START_S:.0f} s: {error}") from error
            await asyncio.sleep(0.003)
        else:
            return connection


async def answers(socket: Path) -> bool:
    """Whether the supervisor behind the socket is alive and serves new connections.

    Raises ``SandboxUnavailable`` when it is we who cannot ask, so that no host is given up for that.
    """
    try:
        connection = await Connection.open(socket)
        await connection.request({"op": "ping"}, timeout_s=_REPLY_S)
    except (OSError, SandboxDied) as error:
        refuse_when_out_of_descriptors(error)
        return False
    connection.close()
    return True


def refuse_when_out_of_descriptors(error: Exception) -> None:
    """Raise ``SandboxUnavailable`` where the error says that this process, or the machine, may open no more files."""
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        advice = "every cell takes one, with egress more; raise the hard limit (ulimit -Hn) or hold fewer cells"
        raise SandboxUnavailable(f"{error.strerror}: {advice}") from error
