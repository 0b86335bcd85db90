"""Connections out of the platform on behalf of programs: resolve once, decide, dial what was decided."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable

from tool_runtime.egress import EgressPolicy, Refusal


class EgressRefused(Exception):
    """The policy does not allow it; the message says why, for the model."""


class EgressFailed(Exception):
    """It is allowed, and did not work."""


#: Turns a host name into addresses, as text.
Resolver = Callable[[str], Awaitable[list[str]]]


async def system_resolver(host: str) -> list[str]:
    """What the machine's own resolver says.

    Raises:
        OSError: it does not know the name.
    """
    found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]


class EgressDialer:
    """Opens connections that the policy allows, and no others."""

    def __init__(self, policy: EgressPolicy, *, timeout_s: float, resolver: Resolver = system_resolver) -> None:
        self._policy = policy
        self._timeout_s = timeout_s
        self._resolver = resolver

    async def dial(self, host: str, port: int) -> socket.socket:
        """A connected, non-blocking socket.

        Raises:
            EgressRefused: the name, the port or every address is not allowed.
            EgressFailed: the name does not resolve, or nothing that is allowed answers.
        """
        self.check_host(host, port)
        allowed = [address for address in await self._resolve(host) if self._policy.refuse_address(address) is None]
        # An address of this very machine may be a public one, with services behind it that are not.
        allowed = [address for address in allowed if not (_is_public(address) and _is_own(address))]
        if not allowed:
            raise EgressRefused(f"{host}: {Refusal.ADDRESS}")
        failure: Exception | None = None
        for address in allowed:
            try:
                return await self._connect((address, port))
            except OSError as exc:
                failure = exc
        raise EgressFailed(f"{host}:{port} cannot be reached: {failure}")

    def check_host(self, host: str, port: int) -> None:
        """The first gate alone.

        Raises:
            EgressRefused: the name or the port is not allowed.
        """
        refusal = self._policy.refuse_host(host, port)
        if refusal is not None:
            raise EgressRefused(f"{host[:253]}:{port}: {refusal}")

    async def _resolve(self, host: str) -> list[str]:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._resolver(host)
        except (OSError, UnicodeError, TimeoutError) as exc:
            raise EgressFailed(f"{host} cannot be resolved: {exc}") from exc

    async def _connect(self, address: tuple[str, int]) -> socket.socket:
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        connection = socket.socket(family, socket.SOCK_STREAM)
        connection.setblocking(False)
        try:
            async with asyncio.timeout(self._timeout_s):
                await asyncio.get_running_loop().sock_connect(connection, address)
        except BaseException as exc:
            connection.close()
            if isinstance(exc, TimeoutError):
                raise OSError(f"no answer within {self._timeout_s:g} s") from exc
            raise
        return connection


def _is_public(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_global


def _is_own(address: str) -> bool:
    """The address belongs to this machine: then, and only then, a socket can be bound to it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True
