"""What a cell reaches outside: nothing, or what is on its allow-list and that alone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from ipaddress import ip_address
from typing import Any

import pytest

from palaestra.envs.sandboxes import Argv, BackendName, Command, Sandbox, SandboxSpec, Shell, open_pool
from palaestra.envs.sandboxes.egress import proxy

pytestmark = pytest.mark.asyncio(loop_scope="session")
Program = Callable[..., Awaitable[Any]]
Until = Callable[[Callable[[], bool]], Awaitable[None]]


@pytest.mark.parametrize("interpreter", ["new", "fork"])
async def test_a_program_reaches_what_is_allowed_by_the_proxy_of_its_environment(
    cell: Sandbox, outside: Any, interpreter: str, program: Program
) -> None:
    url = f"http://{outside.targets['web']}/a?b"
    status, request = await program(cell, "outcome = fetch(arguments[0])", url, interpreter=interpreter)
    lines = request.split("\r\n")
    assert (status, lines[0]) == (200, "GET /a?b HTTP/1.1")
    assert {f"Host: {outside.targets['web']}", "Connection: close"} <= set(lines)


@pytest.mark.parametrize("command", [Shell("env"), Argv(("env",))])
async def test_every_program_of_the_cell_is_told_of_the_proxy(cell: Sandbox, command: Command) -> None:
    lines = (await cell.run(command, timeout_s=20)).stdout_text.splitlines()
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        assert f"{name}=http://127.0.0.1:3128" in lines
    assert {"NO_PROXY=localhost,127.0.0.1,::1", "no_proxy=localhost,127.0.0.1,::1"} <= set(lines)


async def test_a_server_in_the_cell_is_reached_past_the_proxy(cell: Sandbox, program: Program) -> None:
    body = """
import http.server, threading
server = http.server.HTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
threading.Thread(target=server.serve_forever, daemon=True).start()
outcome = fetch(f"http://127.0.0.1:{server.server_port}/")[0]
"""
    assert await program(cell, body) == 200


async def test_a_tunnel_carries_every_byte_both_ways_and_the_end_of_each(
    cell: Sandbox, outside: Any, program: Program
) -> None:
    body = """
import threading
connection = tunnel(arguments[0])
sent = os.urandom(3 << 20)
def feed():
    connection.sendall(sent)
    connection.shutdown(socket.SHUT_WR)
threading.Thread(target=feed).start()
outcome = until_end(connection) == sent
"""
    assert await program(cell, body, outside.targets["echo"]) is True


async def test_what_is_not_listed_is_refused_with_the_list_and_never_connected(
    cell: Sandbox, outside: Any, program: Program
) -> None:
    port, forbidden = outside.port("web"), outside.targets["forbidden"]
    targets = [forbidden, f"127.0.0.2:{outside.port('forbidden')}", f"127.0.0.3:{port}", f"[::ffff:127.0.0.2]:{port}"]
    targets += [f"localhost:{port}", f"127.2:{port}", f"2130706434:{port}", f"0x7f000002:{port}", f"[::1]:{port}"]
    targets += [f"www.named.test:{port}", f"named.test.:{port}", "named.test:80"]
    body = """
outcome = []
for target in arguments:
    outcome.append(until_end(send(f"CONNECT {target} HTTP/1.1\\r\\n\\r\\n")).decode())
    outcome.append(until_end(send(f"GET http://{target}/ HTTP/1.1\\r\\n\\r\\n")).decode())
"""
    answers = await program(cell, body, *targets)
    assert len(answers) == 2 * len(targets)
    for answer in answers:
        assert answer.startswith("HTTP/1.1 403 Forbidden\r\n"), answer
        assert outside.targets["web"] in answer
    assert outside.seen["forbidden"] == 0


async def test_there_is_no_way_but_the_proxy(cell: Sandbox, outside: Any, program: Program) -> None:
    host, port = outside.targets["web"].split(":")
    body = """
outcome = [
    attempt(lambda: socket.create_connection((arguments[0], arguments[1]), 5)),
    attempt(lambda: socket.create_connection(("192.0.2.1", 80), 5)),
    attempt(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("192.0.2.1", 53))),
    attempt(lambda: socket.getaddrinfo("named.test", 80)).partition(" ")[0],
    attempt(lambda: socket.create_server(("127.0.0.1", 3128))),
    [name for _, name in socket.if_nameindex()],
    sorted(int(number) for number in os.listdir("/proc/self/fd")),
]
"""
    refused, unreachable = "ConnectionRefusedError 111", "OSError 101"
    # Descriptor 3 is the listing's own.
    wanted = [refused, unreachable, unreachable, "gaierror", "OSError 98", ["lo"], [0, 1, 2, 3]]
    assert await program(cell, body, host, int(port)) == wanted


async def test_a_cell_without_egress_has_no_proxy(sandbox: Sandbox, program: Program) -> None:
    body = """
outcome = [attempt(lambda: socket.create_connection(PROXY, 5)), [n for n in os.environ if "proxy" in n.lower()]]
"""
    assert await program(sandbox, body) == ["ConnectionRefusedError 111", []]


async def test_each_cell_has_the_allow_list_of_its_own_pool(
    cell: Sandbox, backend: BackendName, outside: Any, program: Program
) -> None:
    body = "outcome = [fetch(f'http://{target}/')[0] for target in arguments]"
    web, forbidden = outside.targets["web"], outside.targets["forbidden"]
    async with await open_pool(SandboxSpec(egress=(forbidden,)), backend=backend) as pool:
        other = await pool.acquire()
        assert await program(other, body, web, forbidden) == [403, 200]
        assert await program(cell, body, web, forbidden) == [200, 403]
        await other.close()
    outside.seen["forbidden"] = 0


async def test_a_renewed_cell_has_its_proxy_again(cell: Sandbox, outside: Any, program: Program) -> None:
    await cell.renew()
    assert (await program(cell, "outcome = fetch(arguments[0])[0]", f"http://{outside.targets['web']}/")) == 200


class Names:
    """A resolver for tests: each lookup of a name takes the next of its answers."""

    def __init__(self, **answers: list[list[str]]) -> None:
        self.answers = answers
        self.asked: list[str] = []

    async def __call__(self, host: str) -> list[Any]:
        self.asked.append(host)
        await asyncio.sleep(0)
        answers = self.answers[host.partition(".")[0]]
        return list(map(ip_address, answers.pop(0) if len(answers) > 1 else answers[0]))


async def test_a_name_may_stand_for_what_is_public_or_listed_and_for_nothing_private(
    cell: Sandbox, outside: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, program: Program
) -> None:
    private = ["127.0.0.3", "10.0.0.1", "169.254.169.254", "::1", "::ffff:127.0.0.3", "64:ff9b::7f00:3"]
    monkeypatch.setattr(proxy, "_resolve", Names(named=[[*private, "127.0.0.2"]], private=[private]))
    body = "outcome = [fetch(f'http://{name}.test:{arguments[0]}/') for name in ('named', 'private', 'private')]"
    with caplog.at_level(logging.INFO, proxy.__name__):
        (named, request), (refused, text), again = await program(cell, body, outside.port("web"))
    assert named == 200
    assert f"Host: named.test:{outside.port('web')}" in request
    assert (refused, again[0], outside.seen["forbidden"]) == (403, 403, 0)
    assert "not public" in text
    assert not any(address in text for address in private)  # how the owner's network is laid out is not the cell's
    assert len([record for record in caplog.records if record.message.startswith("egress refused")]) == 1


async def test_the_address_that_was_checked_is_the_one_connected_to(
    cell: Sandbox, outside: Any, monkeypatch: pytest.MonkeyPatch, program: Program
) -> None:
    names = Names(moving=[["127.0.0.2"], ["127.0.0.3"]])
    monkeypatch.setattr(proxy, "_resolve", names)
    body = "outcome = [fetch(f'http://moving.test:{arguments[0]}/')[0] for _ in range(3)]"
    assert await program(cell, body, outside.port("web")) == [200, 403, 403]
    assert names.asked == ["moving.test"] * 3
    assert outside.seen["forbidden"] == 0


async def test_a_name_that_cannot_be_resolved_or_a_host_that_is_not_there_is_said_so(
    cell: Sandbox, outside: Any, monkeypatch: pytest.MonkeyPatch, program: Program
) -> None:
    async def stuck(host: str) -> list[Any]:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(proxy, "_resolve", stuck)
    monkeypatch.setattr(proxy, "CONNECT_S", 0.2)
    body = "outcome = fetch(f'http://named.test:{arguments[0]}/')"
    status, text = await program(cell, body, outside.port("web"))
    assert (status, "cannot be resolved" in text) == (502, True)


async def test_one_request_passes_and_no_second_one_behind_it(
    cell: Sandbox, outside: Any, program: Program, until: Until
) -> None:
    web, forbidden = outside.targets["web"], outside.targets["forbidden"]
    second = f"GET http://{forbidden}/stolen HTTP/1.1\r\nHost: {forbidden}\r\n\r\n"
    first = f"POST http://{web}/first HTTP/1.1\r\nHost: other\r\nContent-Length: 4\r\n\r\nbody"
    outside.requests.clear()
    answer = await program(cell, "outcome = until_end(send(arguments[0])).decode()", first + second)
    sent = f"POST /first HTTP/1.1\r\nHost: {web}\r\nContent-Length: 4\r\nConnection: close\r\n\r\nbody"
    assert answer.startswith("HTTP/1.1 200 OK")
    await until(lambda: outside.connections["web"] == 0)
    assert outside.requests == [sent.encode()]
    assert outside.seen["forbidden"] == 0


async def test_a_malformed_request_is_answered_and_reaches_nobody(
    cell: Sandbox, outside: Any, program: Program
) -> None:
    web = outside.targets["web"]
    requests = ["hello\r\n\r\n", "GET / HTTP/1.1\r\n\r\n", f"GET http://{web}/ HTTP/1.1\r\nX: {'a' * 100_000}\r\n\r\n"]
    requests += [f"POST http://{web}/ HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "a" * 100_000]
    seen = outside.seen["web"]
    body = "outcome = [status(until_end(send(request))) for request in arguments]"
    assert await program(cell, body, *requests) == [400, 400, 431, 411, 431]
    assert outside.seen["web"] == seen


async def test_a_cell_with_no_network_has_not_even_loopback(backend: BackendName, program: Program) -> None:
    body = """
outcome = [attempt(lambda: socket.create_connection((host, 80), 5)) for host in ("127.0.0.1", "192.0.2.1", "::1")]
server = socket.socket()
try:
    server.bind(("127.0.0.1", 0))
    server.listen()
    outcome.append(attempt(lambda: socket.create_connection(server.getsockname(), 5)))
except OSError:
    outcome.append("OSError 101")
a, b = socket.socketpair()
a.send(b"x")
outcome.append(len(b.recv(1)))
"""
    async with await open_pool(SandboxSpec(network="none"), backend=backend) as pool:
        sandbox = await pool.acquire()
        v4, outside, v6, own, unix = await program(sandbox, body)
    assert (v4, outside, own, unix) == ("OSError 101", "OSError 101", "OSError 101", 1)
    assert v6.startswith("OSError")
