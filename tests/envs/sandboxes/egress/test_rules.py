"""What may be written on an allow-list, which addresses a name may stand for, and how a request's head is read."""

from __future__ import annotations

import ipaddress

import pytest

from palaestra.envs.errors import UsageError
from palaestra.envs.sandboxes import SandboxSpec
from palaestra.envs.sandboxes.egress.allow_list import AllowList, Target, is_public, parse_target
from palaestra.envs.sandboxes.egress.request import Exchange, Refused, Tunnel, parse


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("Example.ORG:443", Target("example.org", 443)),
        ("192.0.2.1:80", Target("192.0.2.1", 80)),
        ("[2001:DB8:0::1]:80", Target("2001:db8::1", 80)),
    ],
)
def test_a_target_is_a_host_and_a_port(text: str, target: Target) -> None:
    assert parse_target(text) == target
    assert parse_target(str(target)) == target


@pytest.mark.parametrize(
    "text",
    [
        *("", "example.org", "example.org:", ":80", "example.org:0", "example.org:65536", "example.org:-1", "a b:80"),
        *("http://example.org:80", "*.example.org:80", "[example.org]:80", "[::1:80", "[:::]:80", "2001:db8::1:80"),
        *("user@example.org:80", "example.org:80\n", "exämple.org:80", "example.org:８０"),
    ],
)
def test_anything_else_is_an_error_that_shows_how_to_write_it(text: str) -> None:
    with pytest.raises(UsageError, match=r"SandboxSpec\.egress.*example\.org:443"):
        SandboxSpec(egress=("example.com:443", text))


def test_a_spec_takes_no_allow_list_that_it_could_not_keep() -> None:
    with pytest.raises(UsageError, match="tuple"):
        SandboxSpec(egress="example.org:443")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="loopback"):
        SandboxSpec(egress=("example.org:443",), network="none")


@pytest.mark.parametrize("text", ["example.org:80", "sub.example.org:443", "example.org.:443", "notexample.org:443"])
def test_a_name_matches_itself_alone(text: str) -> None:
    assert parse_target("EXAMPLE.org:443") in AllowList(["example.org:443"])
    assert parse_target(text) not in AllowList(["example.org:443"])


_PRIVATE = (
    "127.0.0.1 127.255.255.254 0.0.0.0 10.1.2.3 172.16.0.1 192.168.1.1 169.254.169.254 100.64.0.1 192.0.2.1 198.18.0.1 "
    "224.0.0.1 239.255.255.250 240.0.0.1 255.255.255.255 :: ::1 ::ffff:8.8.8.8 ::ffff:127.0.0.1 ::8.8.8.8 fe80::1 "
    "fe80::1%lo fec0::1 fc00::1 fd12::1 ff02::1 64:ff9b::808:808 64:ff9b:1::1 2001::1 2001:db8::1 2002:7f00:1::1 "
    "2002:808:808::1 3fff::1 100::1 4000::1"
)


@pytest.mark.parametrize("text", _PRIVATE.split())
def test_an_address_of_no_public_host_is_not_public(text: str) -> None:
    assert not is_public(ipaddress.ip_address(text))
    assert not AllowList(["example.org:443"]).permits(ipaddress.ip_address(text), 443)


@pytest.mark.parametrize("text", ["8.8.8.8", "93.184.216.34", "2606:2800:220:1:248:1893:25c8:1946", "2a00:1450::1"])
def test_an_address_of_a_public_host_is(text: str) -> None:
    assert AllowList(["example.org:443"]).permits(ipaddress.ip_address(text), 443)


def test_a_private_address_is_permitted_where_it_is_listed_itself() -> None:
    allowed = AllowList(["db.internal:5432", "10.0.0.5:5432"])
    assert allowed.permits(ipaddress.ip_address("10.0.0.5"), 5432)
    assert not allowed.permits(ipaddress.ip_address("10.0.0.5"), 5433)
    assert not allowed.permits(ipaddress.ip_address("::ffff:10.0.0.5"), 5432)


def head(*lines: str) -> bytes:
    return "\r\n".join((*lines, "", "")).encode("latin-1")


def test_a_tunnel_names_its_target() -> None:
    assert parse(head("CONNECT Example.org:443 HTTP/1.1", "Host: other")) == Tunnel(Target("example.org", 443))


def test_a_plain_request_is_rewritten_for_its_target_and_for_one_exchange() -> None:
    lines = ["Host: other.example", "User-Agent: me", "Proxy-Authorization: Basic x", "Connection: keep-alive, X-Hop"]
    lines += ["X-Hop: 1", "Keep-Alive: 5", "TE: trailers", "Upgrade: h2c", "Proxy-Connection: keep-alive"]
    request = parse(head("POST HTTP://Example.org/a?b=c HTTP/1.1", *lines, "content-length: 007"))
    assert isinstance(request, Exchange)
    assert (request.target, request.body_bytes) == (Target("example.org", 80), 7)
    sent = ["Host: Example.org", "Content-Length: 7", "Connection: close", "User-Agent: me"]
    assert request.head == head("POST /a?b=c HTTP/1.1", *sent)


def test_a_body_keeps_its_length_even_where_the_client_calls_that_header_hop_by_hop() -> None:
    request = parse(head("PUT http://h:81 HTTP/1.0", "Connection: content-length, host", "Content-Length: 5"))
    assert isinstance(request, Exchange)
    assert request.head == head("PUT / HTTP/1.0", "Host: h:81", "Content-Length: 5", "Connection: close")


@pytest.mark.parametrize(
    ("url", "target", "path"),
    [
        ("http://h", Target("h", 80), "/"),
        ("http://h?q", Target("h", 80), "/?q"),
        ("http://[2001:db8::1]/x", Target("2001:db8::1", 80), "/x"),
        ("http://[2001:db8::1]:8080//x", Target("2001:db8::1", 8080), "//x"),
        ("http://h/http://other/", Target("h", 80), "/http://other/"),
    ],
)
def test_a_url_is_split_into_target_and_path(url: str, target: Target, path: str) -> None:
    request = parse(head(f"GET {url} HTTP/1.1"))
    assert isinstance(request, Exchange)
    assert (request.target, request.head.split()[1].decode()) == (target, path)


_GET = "GET http://h/ HTTP/1.1"


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        ([""], 400),
        (["hello"], 400),
        (["GET / HTTP/1.1", "Host: h"], 400),
        (["GET https://h/ HTTP/1.1"], 400),
        (["GET ftp://h/ HTTP/1.1"], 400),
        (["GET http:///x HTTP/1.1"], 400),
        (["GET http://h:x/ HTTP/1.1"], 400),
        (["GET http://h:99999/ HTTP/1.1"], 400),
        (["GET http://good@h/ HTTP/1.1"], 400),
        (["GET http://h/#part HTTP/1.1"], 400),
        (["GET http://h\\@other/ HTTP/1.1"], 400),
        (["GET  http://h/ HTTP/1.1"], 400),
        (["GET http://h/ HTTP/2.0"], 400),
        (["GET http://h/ HTTP/1.1 "], 400),
        (["GET http://h/\x00 HTTP/1.1"], 400),
        (["CONNECT h HTTP/1.1"], 400),
        (["CONNECT http://h:80 HTTP/1.1"], 400),
        (["CONNECT h:80/ HTTP/1.1"], 400),
        (["OPTIONS * HTTP/1.1"], 400),
        ([_GET, "no colon"], 400),
        ([_GET, "Space : x"], 400),
        ([_GET, "X: a", " folded"], 400),
        ([_GET, "X: a\nHost: other"], 400),
        ([_GET, "X: a\rHost: other"], 400),
        ([_GET, "X: \x00"], 400),
        ([_GET, "Content-Length: 1", "Content-Length: 1"], 400),
        ([_GET, "Content-Length: 1, 1"], 400),
        ([_GET, "Content-Length: -1"], 400),
        ([_GET, "Content-Length: +1"], 400),
        ([_GET, "Content-Length: 1_0"], 400),
        ([_GET, "Content-Length:"], 400),
        ([_GET, "Content-Length: \xb2"], 400),
        ([_GET, "Transfer-Encoding: chunked"], 411),
        ([_GET, "transfer-encoding : chunked"], 400),
        ([_GET, "Content-Length: 1", "Transfer-Encoding: identity"], 411),
    ],
)
def test_what_two_parsers_could_read_in_two_ways_is_refused(lines: list[str], status: int) -> None:
    with pytest.raises(Refused) as refusal:
        parse(head(*lines))
    assert refusal.value.status.startswith(str(status)), refusal.value.text
