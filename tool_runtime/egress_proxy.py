"""An HTTP proxy for one sandbox: how pip, curl and git inside reach the hosts that the operator allows, and nothing else.

The sandbox has no network. Its agent listens on its own loopback and hands the listening socket out, so what programs connect to
is accepted here, in the actor, without a forwarder and without anything mounted into the sandbox.

    CONNECT host:port     a tunnel, if the policy allows the host and the first thing sent in it is a TLS greeting for that very
                          host: a name that is allowed is no cover for another one behind the same address
    GET http://host/…     one request, sent on with the host that was checked; one per connection

Everything is bounded: the size and time of the head, the connections, the bytes and the idle time of each.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from urllib.parse import urlsplit

from tool_runtime.config import EgressSettings
from tool_runtime.egress import normalised
from tool_runtime.egress_dialer import EgressDialer, EgressFailed, EgressRefused
from tool_runtime.tls_greeting import GREETING_BYTES_MAX, NotAGreeting, server_name

_HEAD_BYTES_MAX = 32 * 1024
_HEAD_TIMEOUT_S = 10.0
_PIECE_BYTES = 65536
#: Headers that are between the client and us, or that would let the connection carry more than the one request.
_NOT_PASSED_ON = frozenset(
    {"host", "connection", "keep-alive", "proxy-connection", "proxy-authorization", "te", "trailer", "upgrade"}
)


class BadRequest(Exception):
    """What the client sent is no request that is served here."""


class EgressProxy:
    """Serves the listening sockets of sandboxes."""

    def __init__(self, dialer: EgressDialer, settings: EgressSettings) -> None:
        self._dialer = dialer
        self._settings = settings

    async def serve(self, listener: socket.socket) -> asyncio.Server:
        """Accept on `listener` until the server that is returned is closed."""
        slots = asyncio.Semaphore(self._settings.connections_max)

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                if slots.locked():
                    await _answer(reader, writer, 503, "too many connections are open")
                    return
                async with slots:
                    await self._serve(reader, writer)
            except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                pass  # the client went away, stalled, or sent a head without end
            finally:
                writer.transport.abort()

        return await asyncio.start_server(connected, sock=listener, limit=_HEAD_BYTES_MAX)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_HEAD_TIMEOUT_S):
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            method, target, _ = head.split("\r\n", 1)[0].split(" ")
            if method == "CONNECT":
                await self._tunnel(target, reader, writer)
            else:
                await self._forward(method, target, head, reader, writer)
        except EgressRefused as exc:
            await _answer(reader, writer, 403, str(exc))
        except EgressFailed as exc:
            await _answer(reader, writer, 502, str(exc))
        except (BadRequest, ValueError) as exc:
            await _answer(reader, writer, 400, str(exc))

    async def _tunnel(self, target: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = target.rpartition(":")
        if not port.isdigit():
            raise BadRequest("CONNECT needs host:port")
        connection = await self._dialer.dial(host, int(port))
        try:
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            await writer.drain()
            greeting = await _greeting(reader)
        except BaseException:
            connection.close()
            raise
        if greeting is None or normalised(server_name(greeting) or "") != normalised(host):
            connection.close()  # nothing can be said any more: the client speaks TLS by now, or what it takes for it
            return
        await self._relay(reader, writer, connection, greeting, None)

    async def _forward(
        self, method: str, target: str, head: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        address = urlsplit(target)
        if address.scheme != "http" or not address.hostname or address.username is not None:
            raise BadRequest("ask for a whole http address, or CONNECT")
        connection = await self._dialer.dial(address.hostname, address.port or 80)
        lines = [line.split(":", 1) for line in head.split("\r\n")[1:] if line]
        if any(len(line) != 2 or line[0] != line[0].strip() for line in lines):
            connection.close()
            raise BadRequest("a header that is none")
        headers = [(name, value.strip()) for name, value in lines if name.lower() not in _NOT_PASSED_ON]
        lengths = [value for name, value in headers if name.lower() == "content-length"]
        if any(name.lower() == "transfer-encoding" for name, _ in headers) or len(lengths) > 1:
            connection.close()
            raise BadRequest("a body needs one content-length")
        body_bytes = int(lengths[0]) if lengths and lengths[0].isdigit() else 0
        path = (address.path or "/") + (f"?{address.query}" if address.query else "")
        passed_on = [f"{method} {path} HTTP/1.1", f"Host: {address.netloc}", "Connection: close"]
        passed_on += [f"{name}: {value}" for name, value in headers]
        request = "\r\n".join([*passed_on, "", ""]).encode("latin-1")
        await self._relay(reader, writer, connection, request, body_bytes)

    async def _relay(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        connection: socket.socket,
        first: bytes,
        upload_bytes: int | None,
    ) -> None:
        """Pass bytes both ways until either side ends, a bound is reached, or nothing moves any more.

        `upload_bytes` is how much of what the client sends is its request's body; None for all of it.
        """
        try:
            theirs, to_them = await asyncio.open_connection(sock=connection)
        except OSError:
            connection.close()
            raise
        moved = _Moved(self._settings)
        to_them.write(first)
        up = asyncio.create_task(_pump(reader, to_them, moved, upload_bytes))
        down = asyncio.create_task(_pump(theirs, writer, moved, None))
        idle = asyncio.create_task(moved.until_idle())
        try:
            # What they say ends it. That the client has said everything does not, nor that it hung up half.
            await asyncio.wait({down, idle}, return_when=asyncio.FIRST_COMPLETED)
            with contextlib.suppress(OSError):
                await writer.drain()
        finally:
            for task in (up, down, idle):
                task.cancel()
            await asyncio.gather(up, down, idle, return_exceptions=True)
            to_them.transport.abort()


async def _greeting(reader: asyncio.StreamReader) -> bytes | None:
    """What the client sends first, when it is a whole TLS greeting; None if it is none."""
    greeting = b""
    async with asyncio.timeout(_HEAD_TIMEOUT_S):
        while len(greeting) < GREETING_BYTES_MAX:
            piece = await reader.read(_PIECE_BYTES)
            greeting += piece
            try:
                if server_name(greeting) is not None:
                    return greeting
            except NotAGreeting:
                return None
            if not piece:
                return None
    return None


class _Moved:
    """What a connection has carried, and when it last carried anything."""

    def __init__(self, settings: EgressSettings) -> None:
        self._left = settings.connection_bytes_max
        self._idle_s = settings.connection_idle_s
        self._activity = asyncio.Event()

    def take(self, count: int) -> bool:
        """Count bytes; False when there were too many."""
        self._left -= count
        self._activity.set()
        return self._left >= 0

    async def until_idle(self) -> None:
        """Return when nothing moved for the idle time."""
        while True:
            self._activity.clear()
            try:
                async with asyncio.timeout(self._idle_s):
                    await self._activity.wait()
            except TimeoutError:
                return


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter, moved: _Moved, bytes_max: int | None) -> None:
    left = bytes_max
    while left is None or left > 0:
        piece = await source.read(_PIECE_BYTES if left is None else min(_PIECE_BYTES, left))
        if not piece or not moved.take(len(piece)):
            return
        left = None if left is None else left - len(piece)
        sink.write(piece)
        await sink.drain()


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, status: int, reason: str) -> None:
    text = f"{reason}\n".encode("utf-8", "replace")
    head = f"HTTP/1.1 {status} Refused\r\ncontent-type: text/plain\r\ncontent-length: {len(text)}\r\nconnection: close\r\n\r\n"
    writer.write(head.encode() + text)
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(_HEAD_TIMEOUT_S):
            await writer.drain()
            writer.write_eof()
            # Until the client has read it and hung up: closing while it still sends would take the answer back.
            while await reader.read(_PIECE_BYTES):
                pass
