"""The owner's end of a connection: what it tells whoever waits, and whoever no longer does."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any

import pytest

from palaestra.envs.sandboxes.connection import Connection


async def test_a_connection_that_ends_while_its_request_is_cancelled_leaves_no_stray_error(tmp_path: Path) -> None:
    stray: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: stray.append(context))
    async with await asyncio.start_unix_server(lambda reader, writer: writer.close(), tmp_path / "s"):
        connection = await Connection.open(tmp_path / "s")
        request = asyncio.create_task(connection.request({"op": "ping"}, timeout_s=30))
        await asyncio.sleep(0)
        connection.connection_lost(None)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        del request
        for _ in range(5):  # until the loop holds nothing of it any more
            await asyncio.sleep(0)
        gc.collect()
    assert stray == []


async def test_what_belongs_to_a_connection_ends_with_it_once_and_at_once_where_it_has_ended(tmp_path: Path) -> None:
    ended: list[str] = []
    served = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()
        served.set()

    async with await asyncio.start_unix_server(serve, tmp_path / "s"):
        connection = await Connection.open(tmp_path / "s")
        connection.at_end(lambda: ended.append("first"))
        assert ended == []
        connection.close()
        connection.close()
        await asyncio.sleep(0)
        connection.at_end(lambda: ended.append("second"))
        await served.wait()
    assert ended == ["first", "second"]
