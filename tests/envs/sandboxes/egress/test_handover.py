"""What the owner takes for the proxy port of a cell."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, ExitStack
from pathlib import Path

import pytest

from palaestra.envs.errors import SandboxDied
from palaestra.envs.sandboxes import SandboxSpec
from palaestra.envs.sandboxes.cell import open_cell
from palaestra.envs.sandboxes.supervisor.frames import PREFIX, decode_prefix, encode

pytestmark = pytest.mark.asyncio(loop_scope="session")
NothingLeft = Callable[[], AbstractAsyncContextManager[None]]


class ForgedHost:
    """A supervisor that sends what it likes beside its first answer."""

    def __init__(self, socket_path: Path, sent: list[int]) -> None:
        self.socket, self._sent = socket_path, sent
        self.groups = None

    async def healthy(self) -> bool:
        return True

    async def close(self) -> None:
        """The server is closed by whoever opened it."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(sum(decode_prefix(await reader.readexactly(PREFIX.size))))
        with socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno())) as connection:
            socket.send_fds(connection, [encode({"ok": True})], self._sent)
        await reader.read()
        writer.close()


@pytest.mark.parametrize("what", ["nothing", "a file", "a unix listener", "an unbound socket", "a datagram socket"])
async def test_only_a_listening_tcp_socket_is_taken_from_a_cell(
    tmp_path: Path, what: str, nothing_left: NothingLeft
) -> None:
    async with nothing_left():
        with ExitStack() as stack:
            if what == "nothing":
                sent = []
            elif what == "a file":
                sent = [stack.enter_context((tmp_path / "file").open("w")).fileno()]
            else:
                kinds = {"a unix listener": (socket.AF_UNIX, socket.SOCK_STREAM)}
                kinds |= {"an unbound socket": (socket.AF_INET, socket.SOCK_STREAM)}
                kinds |= {"a datagram socket": (socket.AF_INET, socket.SOCK_DGRAM)}
                made = stack.enter_context(socket.socket(*kinds[what]))
                if what == "a unix listener":
                    made.bind(str(tmp_path / "listener"))
                    made.listen()
                sent = [made.fileno()]
            host = ForgedHost(tmp_path / "s", sent)
            async with await asyncio.start_unix_server(host.serve, host.socket):
                with pytest.raises(SandboxDied, match=r"port for its proxy|no cell could be made"):
                    await open_cell(host, SandboxSpec(egress=("example.org:443",)))
