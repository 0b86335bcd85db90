"""What programs may reach on the network: by default nothing. Pure decisions; `egress_dialer.py` resolves and connects.

Two gates, both of which must open.

    the name     an operator's rule names the host (`example.org`, `*.example.com`) and the port (80 and 443 unless it says
                 another, `example.com:8443`)
    the address  whatever the name resolves to must be an address of the public internet: not loopback, private, link-local
                 (the cloud's metadata service), shared, multicast or reserved, also when it is wrapped in IPv6; unless the
                 operator names its network as allowed

The address is decided after resolution and is the one that is then dialled, so a name that resolves to something else a moment
later gains nothing. A redirect passes both gates again.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

DEFAULT_PORTS = frozenset({80, 443})
_HOST = re.compile(r"(?=.{1,253}\Z)[a-z0-9_]([a-z0-9_-]{0,62}\.)*[a-z0-9_-]{1,63}", re.IGNORECASE)
_NUMERIC_LABEL = re.compile(r"(0x[0-9a-f]*|[0-9]+)", re.IGNORECASE)
#: Networks that carry an IPv4 address inside an IPv6 one, and where in it: NAT64, 6to4.
_NAT64, _SIX_TO_FOUR = ipaddress.IPv6Network("64:ff9b::/96"), ipaddress.IPv6Network("2002::/16")
_TEREDO = ipaddress.IPv6Network("2001::/32")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class Refusal(StrEnum):
    """Why something is not reached; the text is for the model."""

    NOT_A_HOST = "this is not a host name"
    NUMERIC = "addresses cannot be asked for, only host names"
    HOST = "this host is not on the operator's list"
    PORT = "this port of the host is not on the operator's list"
    ADDRESS = "the host has an address that must not be reached"


@dataclass(frozen=True, kw_only=True, slots=True)
class HostRule:
    """One line of the operator's list."""

    #: Lower case, without the leading `*.` of a wildcard.
    host: str
    #: Every host below `host` is meant, and not `host` itself.
    is_wildcard: bool
    #: None for the default ports.
    port: int | None

    @classmethod
    def parse(cls, text: str) -> HostRule:
        """Read `host`, `*.host`, either with `:port`.

        Raises:
            ValueError: it is none of these.
        """
        name, colon, port = text.strip().partition(":")
        is_wildcard = name.startswith("*.")
        host = normalised(name[2:] if is_wildcard else name)
        if host is None or (colon and not (port.isdigit() and 0 < int(port) < 65536)):
            raise ValueError(f"{text!r} is no rule: write host, *.host, or either with :port")
        return cls(host=host, is_wildcard=is_wildcard, port=int(port) if colon else None)

    def matches_host(self, host: str) -> bool:
        return host.endswith("." + self.host) if self.is_wildcard else host == self.host

    def matches_port(self, port: int) -> bool:
        return port in DEFAULT_PORTS if self.port is None else port == self.port


class EgressPolicy:
    """The operator's list."""

    def __init__(self, hosts: Iterable[str], addresses: Iterable[str] = ()) -> None:
        """`hosts` are rules as `HostRule.parse` takes them; `addresses` networks that are allowed though they are not public.

        Raises:
            ValueError: a rule or a network is malformed.
        """
        self._rules = [HostRule.parse(text) for text in hosts]
        self._networks = [ipaddress.ip_network(text) for text in addresses]

    @property
    def allows_nothing(self) -> bool:
        """There is no rule, and so no network."""
        return not self._rules

    def refuse_host(self, host: str, port: int) -> Refusal | None:
        """Why a name and port may not be reached; None if they may, should its address pass as well."""
        name = normalised(host)
        if name is None:
            return Refusal.NUMERIC if _looks_numeric(host) else Refusal.NOT_A_HOST
        rules = [rule for rule in self._rules if rule.matches_host(name)]
        if not rules:
            return Refusal.HOST
        return None if any(rule.matches_port(port) for rule in rules) else Refusal.PORT

    def refuse_address(self, text: str) -> Refusal | None:
        """Why an address must not be dialled; None if it may."""
        try:
            address = _unwrapped(ipaddress.ip_address(text.partition("%")[0]))
        except ValueError:
            return Refusal.ADDRESS
        if any(address.version == network.version and address in network for network in self._networks):
            return None
        return None if address.is_global and not address.is_multicast else Refusal.ADDRESS


def normalised(host: str) -> str | None:
    """The host in the form in which it is compared; None if it is no host name, or an address in any spelling."""
    try:
        name = host.encode("idna").decode("ascii").lower().removesuffix(".")
    except (UnicodeError, ValueError):
        return None
    # A name whose last label is a number is an address to some resolver or other: 2130706433, 0x7f.1, 127.1.
    if not _HOST.fullmatch(name) or _looks_numeric(name):
        return None
    return name


def _looks_numeric(host: str) -> bool:
    name = host.strip("[]").removesuffix(".")
    return ":" in name or _NUMERIC_LABEL.fullmatch(name.rsplit(".", 1)[-1]) is not None


def _unwrapped(address: Address) -> Address:
    """The IPv4 address that an IPv6 one stands for, where it stands for one."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return address.ipv4_mapped
        if address in _NAT64:
            return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if address in _SIX_TO_FOUR:
            return ipaddress.IPv4Address((int(address) >> 80) & 0xFFFFFFFF)
        if address in _TEREDO:
            return ipaddress.IPv4Address((int(address) & 0xFFFFFFFF) ^ 0xFFFFFFFF)
    return address
