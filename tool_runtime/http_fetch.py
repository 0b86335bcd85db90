"""The tool `http_fetch`: one web resource, through the gates of `egress.py`, with bounds on everything.

It runs in the actor and not in a sandbox: what it handles is the response of a stranger, not the code of one, and it hands it
on as text. Redirects are followed by hand, and each passes the gates like a first request.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from email.message import Message
from urllib.parse import SplitResult, urljoin, urlsplit

import h11

from agent_program.clock import Clock, SystemClock
from tool_runtime.config import EgressSettings, OutputLimits
from tool_runtime.egress_dialer import EgressDialer, EgressFailed, EgressRefused
from tool_runtime.output import bounded
from tool_runtime.sandbox import BoundedText, Ending, Execution

_READ_BYTES = 65536
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_TEXT_TYPES = ("text/", "application/json", "application/xml", "application/javascript", "application/yaml")
_TEXT_SUFFIXES = ("+json", "+xml", "+yaml")


class FetchFailed(Exception):
    """The resource was not got; the message is for the model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Response:
    status: int
    reason: str
    headers: Mapping[str, str]
    body: bytes
    #: The body goes on beyond what was read.
    is_cut: bool


class HttpFetch:
    """Runs `http_fetch` calls."""

    def __init__(self, dialer: EgressDialer, settings: EgressSettings, clock: Clock | None = None) -> None:
        self._dialer = dialer
        self._settings = settings
        self._clock = clock or SystemClock()
        self._tls = ssl.create_default_context()

    async def execute(
        self,
        tool: str,
        fields: Mapping[str, str | bytes | int],
        *,
        timeout_s: float,
        grace_s: float,
        output: OutputLimits,
        cancelled: asyncio.Event | None = None,
    ) -> Execution:
        """Fetch what `fields` name, within `timeout_s`, unless `cancelled` is set first."""
        started_s = self._clock.now_s()
        fetching = asyncio.create_task(self._fetch(str(fields["url"]), str(fields.get("method") or "GET"), output))
        waiting = asyncio.create_task((cancelled or asyncio.Event()).wait())
        try:
            await asyncio.wait({fetching, waiting}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
            if not fetching.done():
                fetching.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await fetching
        ending, exit_code, stdout = Ending.FINISHED, None, BoundedText()
        if fetching.cancelled():
            ending = Ending.CANCELLED if cancelled is not None and cancelled.is_set() else Ending.TIMED_OUT
        else:
            exit_code, stdout = fetching.result()
        return Execution(
            ending=ending,
            exit_code=exit_code,
            stdout=stdout,
            stderr=BoundedText(),
            duration_s=self._clock.now_s() - started_s,
        )

    async def _fetch(self, url: str, method: str, output: OutputLimits) -> tuple[int, BoundedText]:
        try:
            final_url, response = await self._follow(url, method)
        except (FetchFailed, EgressRefused, EgressFailed) as exc:
            return 1, BoundedText(text=str(exc))
        return 0, _told(final_url, response, output)

    async def _follow(self, url: str, method: str) -> tuple[str, _Response]:
        """The response at the end of the redirects, and its address."""
        for _ in range(self._settings.redirects_max + 1):
            target = _target(url)
            response = await self._request(target, method)
            location = response.headers.get("location")
            if response.status not in _REDIRECTS or location is None:
                return url, response
            url = urljoin(url, location)
        raise FetchFailed(f"more than {self._settings.redirects_max} redirects, the last to {url[:500]}")

    async def _request(self, target: SplitResult, method: str) -> _Response:
        host, is_tls = target.hostname or "", target.scheme == "https"
        connection = await self._dialer.dial(host, target.port or (443 if is_tls else 80))
        try:
            reader, writer = await asyncio.open_connection(
                sock=connection, ssl=self._tls if is_tls else None, server_hostname=host if is_tls else None
            )
        except (OSError, ssl.SSLError) as exc:
            connection.close()
            raise EgressFailed(f"{host}: {exc}") from exc
        try:
            return await self._exchange(reader, writer, target, method)
        except (OSError, ssl.SSLError, h11.ProtocolError, zlib.error) as exc:
            raise EgressFailed(f"{host} answered with something that is no web page: {exc}") from exc
        finally:
            writer.transport.abort()  # nothing of it is wanted any more, least of all a slow good-bye

    async def _exchange(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, target: SplitResult, method: str
    ) -> _Response:
        protocol = h11.Connection(h11.CLIENT)
        path = (target.path or "/") + (f"?{target.query}" if target.query else "")
        headers = [
            ("host", target.netloc.rpartition("@")[2]),
            ("user-agent", "continuum-http-fetch"),
            ("accept", "*/*"),
        ]
        headers += [("accept-encoding", "identity"), ("connection", "close")]
        writer.write(protocol.send(h11.Request(method=method, target=path.encode("ascii"), headers=headers)) or b"")
        writer.write(protocol.send(h11.EndOfMessage()) or b"")
        await writer.drain()
        head = await _next(protocol, reader)
        while isinstance(head, h11.InformationalResponse):
            head = await _next(protocol, reader)
        if not isinstance(head, h11.Response):
            raise h11.RemoteProtocolError("no response")
        named = {name.decode("ascii"): value.decode("latin-1") for name, value in head.headers}
        body, is_cut = await self._body(protocol, reader, named.get("content-encoding", "identity"))
        return _Response(
            status=head.status_code,
            reason=head.reason.decode("latin-1"),
            headers=named,
            body=body,
            is_cut=is_cut,
        )

    async def _body(self, protocol: h11.Connection, reader: asyncio.StreamReader, encoding: str) -> tuple[bytes, bool]:
        """At most `response_bytes_max` of the body, unpacked: what a small bomb would unpack to is never made."""
        unpacking = _unpacker(encoding)
        body = bytearray()
        while isinstance(event := await _next(protocol, reader), h11.Data):
            room = self._settings.response_bytes_max + 1 - len(body)
            body += bytes(event.data) if unpacking is None else unpacking.decompress(bytes(event.data), room)
            if len(body) > self._settings.response_bytes_max:
                return bytes(body[: self._settings.response_bytes_max]), True
        return bytes(body), False


def _target(url: str) -> SplitResult:
    """The parts of an address that can be fetched.

    Raises:
        FetchFailed: it cannot.
    """
    try:
        target = urlsplit(url)
        _ = target.port  # read for its check
    except ValueError as exc:
        raise FetchFailed(f"this is no address: {exc}") from exc
    if target.scheme not in ("http", "https") or not target.hostname:
        raise FetchFailed("write a whole http or https address, such as https://example.com/page")
    if target.username is not None or target.password is not None:
        raise FetchFailed("addresses with a user name are not fetched")
    if not (target.path + target.query).isascii() or any(char <= " " for char in target.path + target.query):
        raise FetchFailed("the path of the address must be percent-encoded")
    return target


async def _next(protocol: h11.Connection, reader: asyncio.StreamReader) -> object:
    while (event := protocol.next_event()) is h11.NEED_DATA:
        protocol.receive_data(await reader.read(_READ_BYTES))
    return event


def _unpacker(encoding: str) -> zlib._Decompress | None:
    if encoding in ("", "identity"):
        return None
    if encoding in ("gzip", "x-gzip", "deflate"):
        return zlib.decompressobj(wbits=47)
    raise EgressFailed(f"the server packs its answer in a way that is not understood: {encoding[:50]}")


def _told(url: str, response: _Response, output: OutputLimits) -> BoundedText:
    """The response as the model reads it."""
    kind = Message()
    kind["content-type"] = response.headers.get("content-type", "application/octet-stream")
    head = f"HTTP {response.status} {response.reason}\nurl: {url}\ncontent-type: {kind['content-type']}\n\n"
    name = kind.get_content_type()
    if not (name.startswith(_TEXT_TYPES) or name.endswith(_TEXT_SUFFIXES)):
        return BoundedText(text=f"{head}[{len(response.body)} bytes that are not text]")
    kept = bounded(output)
    kept.feed(_utf8(response.body, kind.get_content_charset()))
    body = kept.result()
    cut = "\n[The response goes on; only its beginning was read.]" if response.is_cut else ""
    return BoundedText(text=head + body.text + cut, truncated_bytes=body.truncated_bytes)


def _utf8(body: bytes, charset: str | None) -> bytes:
    if charset is None or charset == "utf-8":
        return body
    try:
        return body.decode(charset, "replace").encode()
    except LookupError:
        return body
