"""How a cell's proxy port comes to its owner: as a descriptor beside the answer to the cell's first frame.

The connection is the cell, so the port is this cell's and no other's, without a token that could be stolen.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

from palaestra.envs.errors import SandboxDied
from palaestra.envs.sandboxes.connection import Connection
from palaestra.envs.sandboxes.egress.allow_list import AllowList
from palaestra.envs.sandboxes.egress.proxy import CellProxy


async def serve_proxy(connection: Connection, descriptors: Sequence[int], allowed: AllowList) -> None:
    """Serve the port that came with a cell's answer for as long as the cell's connection lives.

    Raises OSError and ``SandboxDied``, with the connection closed and the descriptors too.
    """
    left = list(descriptors)
    try:
        listener = _adopt(left.pop()) if left else None
        if listener is None or not _listens(listener):
            if listener is not None:
                listener.close()
            raise SandboxDied("the cell gave no port for its proxy")
        try:
            proxy = await CellProxy.start(listener, allowed)
        except BaseException:
            listener.close()
            raise
        connection.at_end(proxy.close)
    except BaseException:
        connection.close()
        raise
    finally:
        for descriptor in left:
            os.close(descriptor)


def _adopt(descriptor: int) -> socket.socket:
    try:
        return socket.socket(fileno=descriptor)
    except OSError:  # no socket at all
        os.close(descriptor)
        raise


def _listens(candidate: socket.socket) -> bool:
    is_tcp = candidate.family == socket.AF_INET and candidate.type == socket.SOCK_STREAM
    return is_tcp and bool(candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
