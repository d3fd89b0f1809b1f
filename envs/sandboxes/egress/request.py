"""The head of one request to a proxy (RFC 9112), read strictly: what two parsers could read in two ways is refused."""

from __future__ import annotations

import re
from dataclasses import dataclass

from palaestra.envs.errors import UsageError
from palaestra.envs.sandboxes.egress.allow_list import Target, parse_target

MAX_HEAD_BYTES = 32 << 10
_REQUEST_LINE = re.compile(r"([A-Za-z]{1,32}) ([\x21-\x7e]+) (HTTP/1\.[01])")
_FIELD = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\t\x20-\x7e\x80-\xff]*?)[ \t]*")
_HTTP_URL = re.compile(r"(?i:http)://([^/?#]+)([/?][^#]*)?")
_HOP_BY_HOP = {"connection", "keep-alive", "te", "trailer", "upgrade", "proxy-connection", "proxy-authorization"}
_REWRITTEN = {"host", "content-length"}


class Refused(Exception):
    """A request that the proxy answers itself: an HTTP status, and what the client should know."""

    def __init__(self, status: str, text: str) -> None:
        super().__init__(text)
        self.status, self.text = status, text


@dataclass(frozen=True, slots=True)
class Tunnel:
    """``CONNECT``: bytes in both directions."""

    target: Target


@dataclass(frozen=True, slots=True)
class Exchange:
    """One plain HTTP request: what the target is sent, followed by ``body_bytes`` of the client's."""

    target: Target
    head: bytes
    body_bytes: int


def parse(head: bytes) -> Tunnel | Exchange:
    """Read a head that ends with an empty line. Raises ``Refused``."""
    first, *rest = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    line = _REQUEST_LINE.fullmatch(first)
    if line is None:
        raise Refused("400 Bad Request", "This is an HTTP proxy; it was sent something else.")
    method, url, version = line.groups()
    fields = _fields(rest)
    if method == "CONNECT":
        return Tunnel(_target(url))
    match = _HTTP_URL.fullmatch(url)
    if match is None:
        advice = "This is a proxy: send `CONNECT host:port`, or the whole URL of a plain http:// request."
        raise Refused("400 Bad Request", advice)
    authority, path = match[1], match[2] or "/"
    target = _target(authority if re.search(r":\d+$", authority) else f"{authority}:80")
    path = path if path.startswith("/") else f"/{path}"
    length = _body_bytes(fields)
    dropped = _HOP_BY_HOP | _REWRITTEN | _named_in_connection(fields)
    kept = [f"{name}: {value}" for name, value in fields if name.lower() not in dropped]
    own = [f"Host: {authority}", *([f"Content-Length: {length}"] if length is not None else []), "Connection: close"]
    text = "\r\n".join((f"{method} {path} {version}", *own, *kept, "", ""))
    return Exchange(target, text.encode("latin-1"), length or 0)


def _fields(lines: list[str]) -> list[tuple[str, str]]:
    found = []
    for line in lines:
        match = _FIELD.fullmatch(line)
        if match is None:
            raise Refused("400 Bad Request", "A header line is malformed.")
        found.append((match[1], match[2]))
    return found


def _target(text: str) -> Target:
    try:
        return parse_target(text)
    except UsageError as error:
        raise Refused("400 Bad Request", str(error)) from None


def _body_bytes(fields: list[tuple[str, str]]) -> int | None:
    """How long the body is, which only one header may say, and only once; so there is no second request in it."""
    if any(name.lower() == "transfer-encoding" for name, _ in fields):
        raise Refused("411 Length Required", "This proxy takes a body with Content-Length only (or use CONNECT).")
    lengths = [value for name, value in fields if name.lower() == "content-length"]
    if len(lengths) > 1 or not all(re.fullmatch("[0-9]{1,18}", value) for value in lengths):
        raise Refused("400 Bad Request", "Content-Length must be one number.")
    return int(lengths[0]) if lengths else None


def _named_in_connection(fields: list[tuple[str, str]]) -> set[str]:
    values = [value for name, value in fields if name.lower() == "connection"]
    return {option.strip().lower() for value in values for option in value.split(",")}
