"""The wire format between a pool and its supervisors: versioned, length-prefixed, binary-safe.

A frame is a 12-byte prefix (magic with the version, header length, payload length; big-endian), a JSON object, and
the payload: the frame's byte strings one after the other, whose lengths the header gives as ``"blobs"``.
"""

from __future__ import annotations

import array
import json
import socket
import struct
from collections.abc import Sequence
from typing import Any, Dict  # noqa: UP035

PREFIX = struct.Struct(">4sII")
MAGIC = b"PLS1"
MAX_HEADER_BYTES = 4 << 20
MAX_PAYLOAD_BYTES = 1 << 30

Header = Dict[str, Any]  # noqa: UP006 - evaluated, also by Python 3.8


class MalformedFrame(Exception):
    """The peer sent something that is not a frame of this version, or one that is too large."""


def encode(header: Header, blobs: Sequence[bytes] = ()) -> bytes:
    """One frame as bytes."""
    text = json.dumps({**header, "blobs": [len(blob) for blob in blobs]}).encode()
    size = sum(map(len, blobs))
    if len(text) > MAX_HEADER_BYTES or size > MAX_PAYLOAD_BYTES:
        raise MalformedFrame(f"a frame of {len(text)} + {size} bytes is too large to send")
    return b"".join((PREFIX.pack(MAGIC, len(text), size), text, *blobs))


def decode_prefix(prefix: bytes, max_payload_bytes: int = MAX_PAYLOAD_BYTES) -> tuple[int, int]:
    """Lengths of header and payload, checked before anything is allocated for them."""
    magic, header_bytes, payload_bytes = PREFIX.unpack(prefix)
    if magic != MAGIC:
        raise MalformedFrame(f"bad magic {magic!r}, expected {MAGIC!r}: not a supervisor of this version")
    if header_bytes > MAX_HEADER_BYTES or payload_bytes > max_payload_bytes:
        raise MalformedFrame(f"a frame of {header_bytes} + {payload_bytes} bytes exceeds the limit")
    return header_bytes, payload_bytes


def decode_body(text: bytes, payload: bytes) -> tuple[Header, list[bytes]]:
    """Header and blobs."""
    try:
        header = json.loads(text)
        lengths = header.pop("blobs")
        if not all(type(n) is int and n >= 0 for n in lengths) or sum(lengths) != len(payload):
            raise ValueError(f"blob lengths {lengths} do not add up to {len(payload)}")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise MalformedFrame(f"bad header: {error}") from None
    blobs, start = [], 0
    for length in lengths:
        blobs.append(payload[start : start + length])
        start += length
    return header, blobs


def receive(connection: socket.socket) -> tuple[Header, list[bytes]] | None:
    """The next frame from a blocking socket, or None at its end."""
    prefix = _exactly(connection, PREFIX.size)
    return None if prefix is None else _body(connection, prefix)


def receive_first(connection: socket.socket, most: int) -> tuple[tuple[Header, list[bytes]] | None, list[int]]:
    """A connection's first frame, or None at its end, and up to ``most`` open files that came with it."""
    ancillary_bytes = socket.CMSG_SPACE(most * array.array("i").itemsize)
    data, ancillary, _, _ = connection.recvmsg(PREFIX.size, ancillary_bytes, socket.MSG_CMSG_CLOEXEC)
    descriptors = array.array("i")
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
    rest = _exactly(connection, PREFIX.size - len(data)) if data and len(data) < PREFIX.size else b""
    if not data or rest is None:
        return None, descriptors.tolist()
    return _body(connection, data + rest), descriptors.tolist()


def _body(connection: socket.socket, prefix: bytes) -> tuple[Header, list[bytes]] | None:
    header_bytes, payload_bytes = decode_prefix(prefix)
    text, payload = _exactly(connection, header_bytes), _exactly(connection, payload_bytes)
    return None if text is None or payload is None else decode_body(text, payload)


def _exactly(connection: socket.socket, size: int) -> bytes | None:
    data = connection.recv(size, socket.MSG_WAITALL)  # in one piece: a cell's memory bounds its init as well
    if len(data) == size:
        return data
    buffer = bytearray(data)
    while data and len(buffer) < size:
        data = connection.recv(min(size - len(buffer), 1 << 20))
        buffer += data
    return bytes(buffer) if len(buffer) == size else None
