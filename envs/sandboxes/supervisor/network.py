"""A cell's network: its own loopback or nothing, and on that loopback the port where its owner's proxy answers.

A socket belongs to the network namespace in which it was made, whoever accepts on it. So the cell's init makes the
listening socket, hands it to the owner over the connection that the cell lives by, and keeps nothing of it: to reach
anything outside there is one TCP port, served by a process that no program of the cell can see or touch.
"""

from __future__ import annotations

import array
import os
import socket

from palaestra.envs.sandboxes.supervisor import kernel
from palaestra.envs.sandboxes.supervisor.frames import Header

PROXY_PORT = 3128
_BACKLOG = 64


def set_up(opening: Header) -> socket.socket | None:
    """Bring the network up as the opening frame says. Returns the port for the owner's proxy, if there is one."""
    if opening["network"] == "none":
        return None
    kernel.bring_up_loopback()
    if not opening["proxy"]:
        return None
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind(("127.0.0.1", PROXY_PORT))
    listener.listen(_BACKLOG)
    # In our own environment, because every program of the cell starts with it. What the cell itself serves is near.
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        os.environ[name] = os.environ[name.lower()] = f"http://127.0.0.1:{PROXY_PORT}"
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = "localhost,127.0.0.1,::1"
    return listener


def send_with_listener(connection: socket.socket, frame: bytes, listener: socket.socket) -> None:
    """Send the frame with the listening socket beside its first bytes, and close our end of that."""
    with listener:
        rights = array.array("i", [listener.fileno()])
        sent = connection.sendmsg([frame], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
    connection.sendall(frame[sent:])
