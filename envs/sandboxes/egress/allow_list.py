"""Which hosts and ports a cell may reach, and which addresses their names may stand for."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass

from palaestra.envs.errors import UsageError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_TARGET = re.compile(r"(?:\[(?P<literal>[0-9A-Fa-f:.]+)\]|(?P<name>[A-Za-z0-9._-]{1,253})):(?P<port>[0-9]{1,5})")
_GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")
_NOT_PUBLIC = tuple(map(ipaddress.IPv6Network, ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")))
"""Within global unicast, but for protocols (Teredo), documentation, or other addresses in disguise (6to4)."""


@dataclass(frozen=True, slots=True)
class Target:
    """One host and port. ``host`` is a name in lower case, or an IP address in its canonical form."""

    host: str
    port: int

    @property
    def address(self) -> Address | None:
        """The host as an address, where it is one and no name."""
        return _address(self.host)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_target(text: str) -> Target:
    """``"host:port"``, ``"192.0.2.1:port"`` or ``"[2001:db8::1]:port"``. Raises ``UsageError``."""
    match = _TARGET.fullmatch(text) if isinstance(text, str) else None
    if match is None or not 0 < int(match["port"]) < 65536 or (match["literal"] and not _address(match["literal"])):
        raise UsageError(f"{text!r} is not a target; write 'host:port', like 'example.org:443' or '[2001:db8::1]:443'")
    host = match["name"] or match["literal"]
    return Target(str(_address(host) or host.lower()), int(match["port"]))


class AllowList:
    """The targets of one spec. A name matches only itself: no wildcards, no subdomains."""

    def __init__(self, targets: Iterable[str]) -> None:
        self.targets = tuple(map(parse_target, targets))

    def __contains__(self, target: Target) -> bool:
        return target in self.targets

    def permits(self, address: Address, port: int) -> bool:
        """Whether a listed name may stand for this address: a public one, or one that is listed itself.

        So whoever can change what a name resolves to gains nothing on the owner's own network.
        """
        return is_public(address) or Target(str(address), port) in self.targets

    def __str__(self) -> str:
        return ", ".join(map(str, self.targets))


def is_public(address: Address) -> bool:
    """Whether the address belongs to the public internet, and to it alone.

    Loopback, link-local (cloud metadata), private, shared, multicast and reserved ones don't; nor does any IPv6 address
    that carries an IPv4 address in it (mapped, NAT64, 6to4, Teredo), whatever that one is.
    """
    if isinstance(address, ipaddress.IPv4Address):
        return address.is_global and not address.is_multicast
    special = any(address in network for network in _NOT_PUBLIC)
    return address in _GLOBAL_UNICAST and address.is_global and not special


def _address(text: str) -> Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None
