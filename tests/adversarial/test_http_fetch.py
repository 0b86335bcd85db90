"""Attacks through `http_fetch`: names that turn private, redirects inwards, servers that flood, stall, lie or never end."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from tool_runtime.config import KIB, EgressSettings, OutputLimits
from tool_runtime.egress import EgressPolicy
from tool_runtime.egress_dialer import EgressDialer
from tool_runtime.http_fetch import HttpFetch
from tool_runtime.sandbox import Ending, Execution

pytestmark = pytest.mark.adversarial

Handler = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]
NAMES = {
    "site.test": ["127.0.0.1"],
    "other.test": ["127.0.0.1"],
    "rebound.test": ["169.254.169.254"],
    "mixed.test": ["169.254.169.254", "127.0.0.1"],
    "inside.test": ["10.0.0.1", "::1", "::ffff:10.0.0.1"],
    "unlisted.test": ["127.0.0.1"],
}


@asynccontextmanager
async def server(handler: Handler) -> AsyncIterator[int]:
    """A server whose handler gets the request's first bytes and writes what it likes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await handler(await reader.readuntil(b"\r\n\r\n"), writer)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listening:
        yield listening.sockets[0].getsockname()[1]


class Resolver:
    """Answers from a table, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def __call__(self, host: str) -> list[str]:
        self.asked.append(host)
        if host not in NAMES:
            raise OSError("no such name")
        return NAMES[host]


async def fetch(
    url: str, port: int, *, timeout_s: float = 30.0, resolver: Resolver | None = None, **settings: int
) -> Execution:
    listed = [f"{name}:{port}" for name in NAMES if name != "unlisted.test"]
    # Only this one loopback address is opened for the test's own server; all else is as in production.
    policy = EgressPolicy([*listed, "site.test", "unknown.test"], ["127.0.0.1/32"])
    dialer = EgressDialer(policy, timeout_s=5, resolver=resolver or Resolver())
    tool = HttpFetch(dialer, EgressSettings(**settings))
    return await tool.execute(
        "http_fetch", {"url": url}, timeout_s=timeout_s, grace_s=0, output=OutputLimits(head_bytes=KIB, tail_bytes=KIB)
    )


def answering(head: str, body: bytes = b"") -> Handler:
    async def handler(_request: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(head.replace("\n", "\r\n").encode() + b"\r\n\r\n" + body)
        await writer.drain()

    return handler


HTML = "HTTP/1.1 200 OK\ncontent-type: text/html; charset=latin-1"


async def test_a_page_is_told_as_text() -> None:
    async with server(answering(f"{HTML}\ncontent-length: 5", b"gr\xfcn!")) as port:
        result = await fetch(f"http://site.test:{port}/a?b=c", port)
    assert (result.ending, result.exit_code) == (Ending.FINISHED, 0)
    assert result.stdout.text == (
        f"HTTP 200 OK\nurl: http://site.test:{port}/a?b=c\ncontent-type: text/html; charset=latin-1\n\ngrün!"
    )


async def test_the_request_tells_nothing_that_was_not_asked() -> None:
    seen: list[bytes] = []

    async def handler(request: bytes, writer: asyncio.StreamWriter) -> None:
        seen.append(request)
        writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")

    async with server(handler) as port:
        await fetch(f"http://site.test:{port}/x", port)
    lines = seen[0].decode().splitlines()
    assert lines[0] == "GET /x HTTP/1.1"
    assert {line.split(":")[0] for line in lines[1:] if line} == {
        *("host", "user-agent", "accept", "accept-encoding", "connection")
    }


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("http://unlisted.test:{port}/", "not on the operator's list"),
        ("http://site.test:6379/", "port of the host is not on the operator's list"),
        ("http://127.0.0.1:{port}/", "only host names"),
        ("http://2130706433:{port}/", "only host names"),
        ("http://[::1]:{port}/", "only host names"),
        ("http://169.254.169.254/latest/meta-data", "only host names"),
        ("http://rebound.test:{port}/", "must not be reached"),
        ("http://inside.test:{port}/", "must not be reached"),
        ("http://unknown.test/", "cannot be resolved"),
        ("file:///etc/passwd", "whole http or https address"),
        ("gopher://site.test:{port}/", "whole http or https address"),
        ("site.test", "whole http or https address"),
        ("http://user:word@site.test:{port}/", "user name"),
        ("http://site.test:{port}@rebound.test:{port}/", "user name"),
        ("http://site.test:99999/", "this is no address"),
        ("http://site.test:{port}/a b", "percent-encoded"),
        ("http://site.test:{port}/\r\nx: y", "percent-encoded"),
        ("http://site.test\\@rebound.test:{port}/", "user name"),
    ],
)
async def test_what_may_not_be_reached_is_not(address: str, told: str) -> None:
    reached: list[bytes] = []

    async def handler(request: bytes, writer: asyncio.StreamWriter) -> None:
        reached.append(request)

    async with server(handler) as port:
        result = await fetch(address.replace("{port}", str(port)), port)
    assert result.exit_code == 1
    assert told in result.stdout.text or "not a host name" in result.stdout.text or "no address" in result.stdout.text
    assert reached == []


async def test_of_several_addresses_only_those_that_may_be_are_dialled() -> None:
    async with server(answering(f"{HTML}\ncontent-length: 2", b"ok")) as port:
        result = await fetch(f"http://mixed.test:{port}/", port)
    assert result.stdout.text.endswith("\n\nok")


async def test_a_name_is_resolved_once_and_what_it_was_then_is_dialled() -> None:
    resolver = Resolver()
    async with server(answering(f"{HTML}\ncontent-length: 2", b"ok")) as port:
        await fetch(f"http://site.test:{port}/", port, resolver=resolver)
    assert resolver.asked == ["site.test"]


@pytest.mark.parametrize(
    "location",
    [
        *(
            "http://rebound.test:{port}/",
            "http://127.0.0.1:{port}/",
            "//169.254.169.254/",
            "http://unlisted.test:{port}/",
        ),
        *("file:///etc/passwd", "http://site.test:22/", "http://[::ffff:127.0.0.1]:{port}/"),
    ],
)
async def test_a_redirect_passes_the_same_gates(location: str) -> None:
    requests: list[bytes] = []

    async def handler(request: bytes, writer: asyncio.StreamWriter) -> None:
        requests.append(request)
        target = location.replace("{port}", str(writer.get_extra_info("sockname")[1]))
        writer.write(f"HTTP/1.1 302 Found\r\nlocation: {target}\r\ncontent-length: 0\r\n\r\n".encode())

    async with server(handler) as port:
        result = await fetch(f"http://site.test:{port}/", port)
    assert result.exit_code == 1
    assert len(requests) == 1


async def test_redirects_that_are_allowed_are_followed_and_end() -> None:
    async def handler(request: bytes, writer: asyncio.StreamWriter) -> None:
        port = writer.get_extra_info("sockname")[1]
        if b"/end" in request:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 3\r\n\r\nend")
        elif b"/loop" in request:
            writer.write(b"HTTP/1.1 301 Moved\r\nlocation: /loop\r\ncontent-length: 0\r\n\r\n")
        else:
            writer.write(
                f"HTTP/1.1 307 Go\r\nlocation: http://other.test:{port}/end\r\ncontent-length: 0\r\n\r\n".encode()
            )

    async with server(handler) as port:
        followed = await fetch(f"http://site.test:{port}/", port)
        looping = await fetch(f"http://site.test:{port}/loop", port, redirects_max=3)
    assert f"url: http://other.test:{port}/end" in followed.stdout.text
    assert "more than 3 redirects" in looping.stdout.text


async def endless(_request: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n\r\n")
    while True:
        writer.write(b"x" * 65536)
        await writer.drain()


async def test_a_body_without_end_is_cut() -> None:
    async with server(endless) as port:
        result = await fetch(f"http://site.test:{port}/", port, response_bytes_max=100 * KIB)
    assert result.exit_code == 0
    assert "only its beginning was read" in result.stdout.text
    assert len(result.stdout.text) < 4000
    assert result.stdout.truncated_bytes == 98 * KIB


async def test_a_small_bomb_is_not_unpacked_to_its_end() -> None:
    bomb = gzip.compress(bytes(50 * 1024 * KIB))
    head = f"HTTP/1.1 200 OK\ncontent-type: text/plain\ncontent-encoding: gzip\ncontent-length: {len(bomb)}"
    async with server(answering(head, bomb)) as port:
        result = await fetch(f"http://site.test:{port}/", port, response_bytes_max=100 * KIB)
    assert "only its beginning was read" in result.stdout.text


async def never(_request: bytes, _writer: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


async def drip(_request: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n")
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("handler", [never, drip])
async def test_a_server_that_stalls_is_left_at_the_deadline(handler: Handler) -> None:
    async with server(handler) as port:
        result = await fetch(f"http://site.test:{port}/", port, timeout_s=0.5)
    assert result.ending is Ending.TIMED_OUT


NONSENSE = {
    "no http": b"SSH-2.0-OpenSSH_9\r\n",
    "nothing": b"",
    "headers without end": b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 100_000,
    "a length that is none": b"HTTP/1.1 200 OK\r\ncontent-length: -5\r\n\r\n",
    "two lengths": b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nabcdef",
    "a body that breaks off": b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 100\r\n\r\nabc",
    "a packing that is none": b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 4\r\n\r\nabcd",
    "a packing nobody knows": b"HTTP/1.1 200 OK\r\ncontent-encoding: br\r\ncontent-length: 4\r\n\r\nabcd",
    "binary zeros": bytes(10_000),
}


@pytest.mark.parametrize("answer", NONSENSE.values(), ids=NONSENSE)
async def test_nonsense_is_an_error_that_is_told(answer: bytes) -> None:
    async def handler(_request: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        await writer.drain()

    async with server(handler) as port:
        result = await fetch(f"http://site.test:{port}/", port)
    assert (result.ending, result.exit_code) == (Ending.FINISHED, 1)
    assert (
        result.stdout.text.startswith("site.test answered with something") or "is not understood" in result.stdout.text
    )


async def test_what_is_no_text_is_counted_and_control_characters_removed() -> None:
    async with server(answering("HTTP/1.1 200 OK\ncontent-type: image/png\ncontent-length: 4", b"\x89PNG")) as port:
        assert "[4 bytes that are not text]" in (await fetch(f"http://site.test:{port}/", port)).stdout.text
    async with server(answering("HTTP/1.1 200 OK\ncontent-type: text/plain\ncontent-length: 6", b"\x1b[31m\0")) as port:
        assert "\x1b" not in (await fetch(f"http://site.test:{port}/", port)).stdout.text


async def test_a_cancelled_fetch_ends_at_once() -> None:
    cancelled = asyncio.Event()
    async with server(never) as port:
        policy = EgressPolicy([f"site.test:{port}"], ["127.0.0.1/32"])
        tool = HttpFetch(EgressDialer(policy, timeout_s=5, resolver=Resolver()), EgressSettings())
        running = asyncio.create_task(
            tool.execute(
                "http_fetch",
                {"url": f"http://site.test:{port}/"},
                timeout_s=60,
                grace_s=0,
                output=OutputLimits(),
                cancelled=cancelled,
            )
        )
        await asyncio.sleep(0)
        cancelled.set()
        assert (await running).ending is Ending.CANCELLED
