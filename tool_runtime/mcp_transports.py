"""The two ways to an MCP server, as the SDK's transports: lines to a process in a sandbox, and HTTP through the egress gates."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpcore2
import httpx2
import mcp_types as types
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage

from tool_runtime.egress_dialer import EgressDialer, EgressFailed, EgressRefused
from tool_runtime.mcp_client import Streams
from tool_runtime.server_process import ServerProcess

#: A JSON response may be so large; an event stream is bounded event by event, by the SDK.
RESPONSE_BYTES_MAX = 16 * 1024 * 1024
_READ_S = 300.0


@asynccontextmanager
async def lines(process: ServerProcess) -> AsyncIterator[Streams]:
    """JSON-RPC messages as lines, to a server that runs already and is closed at the end.

    When the server ends, the stream that is read from ends, and the SDK fails what waits for an answer.
    """
    to_session, read = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    write, from_session = anyio.create_memory_object_stream[SessionMessage](0)

    async def receive() -> None:
        async with to_session:
            while line := await process.read_line():
                if not line.strip():
                    continue
                with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                    await to_session.send(_parsed(line))

    async def send() -> None:
        async with from_session:
            async for message in from_session:
                text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
                try:
                    await process.write_line(text.encode())
                except OSError:
                    await to_session.aclose()
                    return

    tasks = [asyncio.create_task(receive()), asyncio.create_task(send())]
    try:
        yield read, write
    finally:
        await write.aclose()
        await process.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await read.aclose()


def _parsed(line: bytes) -> SessionMessage | Exception:
    try:
        return SessionMessage(types.jsonrpc_message_adapter.validate_json(line, by_name=False))
    except ValueError as exc:
        return exc


@asynccontextmanager
async def http(
    url: str, headers: Mapping[str, str], dialer: EgressDialer, *, timeout_s: float
) -> AsyncIterator[Streams]:
    """Streamable HTTP, over connections that the egress gates allow. The SDK follows redirects within the origin only."""
    timeout = httpx2.Timeout(timeout_s, read=_READ_S)
    async with (
        httpx2.AsyncClient(transport=DialedTransport(dialer), headers=dict(headers), timeout=timeout) as client,
        streamable_http_client(url, http_client=client) as streams,
    ):
        yield streams


class DialedTransport(httpx2.AsyncBaseTransport):
    """httpx2 over connections of an `EgressDialer`: no proxy of the environment, no address that was not checked."""

    def __init__(self, dialer: EgressDialer) -> None:
        self._pool = httpcore2.AsyncConnectionPool(
            ssl_context=ssl.create_default_context(), network_backend=_DialedBackend(dialer)
        )

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        target = httpcore2.URL(
            scheme=request.url.raw_scheme, host=request.url.raw_host, port=request.url.port, target=request.url.raw_path
        )
        asked = httpcore2.Request(
            method=request.method,
            url=target,
            headers=request.headers.raw,
            content=request.stream,
            extensions=request.extensions,
        )
        try:
            response = await self._pool.handle_async_request(asked)
        except (httpcore2.NetworkError, httpcore2.ProtocolError, httpcore2.TimeoutException) as exc:
            raise httpx2.TransportError(str(exc) or type(exc).__name__, request=request) from exc
        is_stream = any(
            name.lower() == b"content-type" and value.lower().startswith(b"text/event-stream")
            for name, value in response.headers
        )
        return httpx2.Response(
            status_code=response.status,
            headers=response.headers,
            stream=_Body(response, request, None if is_stream else RESPONSE_BYTES_MAX),
            extensions=response.extensions,
        )

    async def aclose(self) -> None:
        await self._pool.aclose()


class _Body(httpx2.AsyncByteStream):
    """A response's body, cut off with an error where it is too large."""

    def __init__(self, response: httpcore2.Response, request: httpx2.Request, bytes_max: int | None) -> None:
        self._response = response
        self._request = request
        self._bytes_max = bytes_max

    async def __aiter__(self) -> AsyncIterator[bytes]:
        taken = 0
        try:
            async for piece in self._response.aiter_stream():
                taken += len(piece)
                if self._bytes_max is not None and taken > self._bytes_max:
                    raise httpx2.ReadError(f"a response of more than {self._bytes_max} bytes", request=self._request)
                yield piece
        except (httpcore2.NetworkError, httpcore2.ProtocolError, httpcore2.TimeoutException) as exc:
            raise httpx2.ReadError(str(exc) or type(exc).__name__, request=self._request) from exc

    async def aclose(self) -> None:
        await self._response.aclose()


class _DialedBackend(httpcore2.AsyncNetworkBackend):
    def __init__(self, dialer: EgressDialer) -> None:
        self._dialer = dialer

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 - as httpcore calls it, here and below
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        try:
            connection = await self._dialer.dial(host, port)
        except (EgressRefused, EgressFailed) as exc:
            raise httpcore2.ConnectError(str(exc)) from exc
        reader, writer = await asyncio.open_connection(sock=connection)
        return _DialedStream(reader, writer)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class _DialedStream(httpcore2.AsyncNetworkStream):
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ASYNC109
        try:
            async with asyncio.timeout(timeout):
                return await self._reader.read(max_bytes)
        except TimeoutError as exc:
            raise httpcore2.ReadTimeout(f"nothing came for {timeout} s") from exc
        except OSError as exc:
            raise httpcore2.ReadError(str(exc)) from exc

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:  # noqa: ASYNC109
        try:
            self._writer.write(buffer)
            async with asyncio.timeout(timeout):
                await self._writer.drain()
        except TimeoutError as exc:
            raise httpcore2.WriteTimeout(f"nothing could be sent for {timeout} s") from exc
        except OSError as exc:
            raise httpcore2.WriteError(str(exc)) from exc

    async def aclose(self) -> None:
        self._writer.transport.abort()

    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> httpcore2.AsyncNetworkStream:
        try:
            async with asyncio.timeout(timeout):
                await self._writer.start_tls(ssl_context, server_hostname=server_hostname)
        except (OSError, TimeoutError) as exc:
            raise httpcore2.ConnectError(f"no TLS: {exc}") from exc
        return self

    def get_extra_info(self, info: str) -> Any:
        return self._writer.get_extra_info("ssl_object" if info == "ssl_object" else info)
