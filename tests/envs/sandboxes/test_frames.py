"""The wire format: anything goes through unchanged, and nonsense closes a connection and no more."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palaestra.envs.errors import SandboxDied
from palaestra.envs.sandboxes import Sandbox, SandboxSpec, Shell
from palaestra.envs.sandboxes.cell import opening
from palaestra.envs.sandboxes.connection import Connection
from palaestra.envs.sandboxes.pool import Pool
from palaestra.envs.sandboxes.supervisor.frames import (
    MAGIC,
    PREFIX,
    MalformedFrame,
    decode_body,
    decode_prefix,
    encode,
    receive_first,
)

json_objects = st.dictionaries(st.text().filter(lambda key: key != "blobs"), st.integers() | st.text() | st.none())


@given(json_objects, st.lists(st.binary(max_size=200), max_size=5))
def test_a_frame_decodes_to_what_was_encoded(header: dict[str, object], blobs: list[bytes]) -> None:
    frame = encode(header, blobs)
    text, payload = decode_prefix(frame[: PREFIX.size])
    assert len(frame) == PREFIX.size + text + payload
    assert decode_body(frame[PREFIX.size : PREFIX.size + text], frame[PREFIX.size + text :]) == (header, blobs)


@pytest.mark.parametrize("prefix", [b"HTTP" + bytes(8), PREFIX.pack(MAGIC, 1 << 31, 0), PREFIX.pack(MAGIC, 2, 1 << 31)])
def test_a_bad_prefix_is_refused_before_anything_is_allocated(prefix: bytes) -> None:
    with pytest.raises(MalformedFrame):
        decode_prefix(prefix)


@given(st.binary(max_size=100) | st.sampled_from([b"[]", b"{}", b'{"blobs": [-1, 4]}', b'{"blobs": "x"}', b"[" * 9999]))
def test_a_bad_header_is_a_malformed_frame(text: bytes) -> None:
    with pytest.raises(MalformedFrame):
        decode_body(text, b"abc")


@pytest.mark.parametrize("count", [0, 1, 3])
def test_open_files_arrive_with_the_first_frame(count: int) -> None:
    here, there = socket.socketpair()
    pipes = [os.pipe() for _ in range(count)]
    with here, there:
        socket.send_fds(here, [encode({"op": "open"}, [b"body"])], [write for _, write in pipes])
        message, descriptors = receive_first(there, 3)
        assert message == ({"op": "open"}, [b"body"])
        for number, descriptor in enumerate(descriptors):
            assert not os.get_inheritable(descriptor)
            os.write(descriptor, b"%d" % number)
        assert [os.read(read, 9) for read, _ in pipes] == [b"%d" % number for number in range(count)]
    for descriptor in (*descriptors, *(end for pipe in pipes for end in pipe)):
        os.close(descriptor)


def test_a_connection_that_ends_before_its_first_frame_has_none() -> None:
    here, there = socket.socketpair()
    with there:
        here.send(MAGIC)
        here.close()
        assert receive_first(there, 3) == (None, [])


@given(st.binary(max_size=200), st.integers(0, 60), st.binary(max_size=8))
def test_any_bytes_are_a_frame_or_a_malformed_one(data: bytes, at: int, change: bytes) -> None:
    intact = encode({"op": "run", "paths": ["a"]}, [b"blob", b""])
    for frame in (data, intact[:at] + change + intact[at + len(change) :], MAGIC + data):
        if len(frame) < PREFIX.size:
            continue
        try:
            text, payload = decode_prefix(frame[: PREFIX.size])
            body = frame[PREFIX.size :][: text + payload]
            header, blobs = decode_body(body[:text], body[text:])
        except MalformedFrame:
            continue
        assert isinstance(header, dict)
        assert all(isinstance(blob, bytes) for blob in blobs)


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=6), st.booleans())
def test_whatever_a_supervisor_sends_the_owner_gets_a_reply_or_a_sandbox_that_died(
    pieces: list[bytes], begins_well: bool
) -> None:
    async def receive() -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            _, connection = await asyncio.get_running_loop().create_connection(Connection, sock=ours)
            request = asyncio.create_task(connection.request({}, timeout_s=20))
            await asyncio.sleep(0)
            theirs.sendall((MAGIC if begins_well else b"") + b"".join(pieces))
            theirs.shutdown(socket.SHUT_WR)
            with contextlib.suppress(SandboxDied):
                header, _ = await request
                assert isinstance(header, dict)
            connection.close()

    asyncio.run(receive())


_NONSENSE = {
    "garbage": b"\xff" * 4096,
    "half a prefix": MAGIC,
    "not json": PREFIX.pack(MAGIC, 3, 0) + b"{{{",
    "no operation": encode({}),
    "unknown operation": encode({"op": "reboot"}),
    "an opening without limits": encode({"op": "open"}),
    "limits of the wrong type": encode({**opening(SandboxSpec()), "pids": "many"}),
    "a length that never comes": PREFIX.pack(MAGIC, 100, 0) + b"{",
    "huge": struct.pack(">4sII", MAGIC, 0xFFFFFFFF, 0xFFFFFFFF),
}


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("kind", _NONSENSE)
async def test_a_malformed_first_frame_ends_its_connection_and_never_the_supervisor(
    pool: Pool, sandbox: Sandbox, kind: str
) -> None:
    reader, writer = await asyncio.open_unix_connection(str(pool.hosts[0].socket))
    writer.write(_NONSENSE[kind])
    writer.write_eof()
    async with asyncio.timeout(20):
        try:
            await reader.read()
        except ConnectionResetError:  # it closed with our bytes unread
            pass
    writer.close()
    assert await pool.hosts[0].healthy()
    assert (await sandbox.run(Shell("echo alive"), timeout_s=5)).stdout == b"alive\n"


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("request_header", [{"op": "run"}, {"op": "nonsense"}, {"op": "write", "paths": 3}, {}])
async def test_a_malformed_request_ends_its_own_cell_only(
    pool: Pool, sandbox: Sandbox, request_header: dict[str, object]
) -> None:
    connection = await Connection.open(pool.hosts[0].socket)
    assert await connection.request(opening(pool.spec), timeout_s=10) == ({"ok": True}, [])
    with pytest.raises(SandboxDied):
        await connection.request(request_header, timeout_s=10)
    assert (await sandbox.run(Shell("echo alive"), timeout_s=5)).stdout == b"alive\n"


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("seed", range(4))
async def test_changed_frames_end_their_own_connection_at_most(pool: Pool, sandbox: Sandbox, seed: int) -> None:
    changes = random.Random(seed)
    frames = [encode(opening(pool.spec)), encode({"op": "ping"}), encode({"op": "read", "path": "a", "max_bytes": 9})]
    for _ in range(10):
        frame = bytearray(b"".join(changes.sample(frames, 2)))
        for _ in range(changes.randint(1, 4)):
            frame[changes.randrange(len(frame))] = changes.randrange(256)
        reader, writer = await asyncio.open_unix_connection(str(pool.hosts[0].socket))
        writer.write(frame)
        writer.write_eof()
        async with asyncio.timeout(20):
            with contextlib.suppress(ConnectionResetError):
                await reader.read()
        writer.close()
    assert await pool.hosts[0].healthy()
    assert (await sandbox.run(Shell("echo alive"), timeout_s=20)).stdout == b"alive\n"


@pytest.mark.asyncio(loop_scope="session")
async def test_a_silent_connection_delays_nobody(pool: Pool) -> None:
    silent = [await asyncio.open_unix_connection(str(pool.hosts[0].socket)) for _ in range(5)]
    sandbox = await pool.acquire()
    assert (await sandbox.run(Shell("echo alive"), timeout_s=5)).stdout == b"alive\n"
    await sandbox.close()
    for _, writer in silent:
        writer.close()
