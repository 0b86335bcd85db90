"""One session with one MCP server, through the official SDK.

The SDK's contexts must be left by the task that entered them, so each session has a task of its own, which opens it, waits and
closes it; calls come from other tasks. A session speaks the handshake protocol (2025-11-25 and earlier), which every server knows.

Whatever goes wrong is a `McpFailed` with words for the model; `is_over` says whether the session can still be used. What a server
asks of its client (sampling, elicitation, roots) is declined: nobody here answers in a user's name.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Protocol

import httpx2
import mcp_types as types
from mcp.client.session import ClientSession
from mcp.shared.exceptions import MCPError
from pydantic import ValidationError

from tool_runtime import mcp_results
from tool_runtime.registry import ToolRefused

_LOG = logging.getLogger(__name__)

PAGES_MAX, TOOLS_MAX = 20, 256
#: JSON-RPC errors after which the session goes on: the server understood the request and refused it.
_REFUSALS = frozenset({types.INVALID_PARAMS, types.METHOD_NOT_FOUND, types.INTERNAL_ERROR})
_CLOSE_S = 10.0

#: The SDK's pair of streams, read and write.
Streams = tuple[Any, Any]
Transport = Callable[[], AbstractAsyncContextManager[Streams]]
ReportProgress = Callable[[float, float | None, str | None], Awaitable[None]]


class Peer(Protocol):
    """The server's process, where it runs here."""

    async def busy(self, is_busy: bool) -> None:
        """A call runs, or none does any more."""
        ...

    async def last_words(self) -> str:
        """Why it ended, in words; empty if it did not."""
        ...

    async def kill(self) -> None:
        """End it without a good-bye."""
        ...


class McpFailed(ToolRefused):
    """The server did not do what it was asked; the message is for the model."""

    def __init__(self, message: str, *, is_over: bool = False) -> None:
        """`is_over`: the session cannot be used any more."""
        super().__init__(message)
        self.is_over = is_over


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What a call came to."""

    text: str
    #: The tool says that it failed.
    is_error: bool


class McpSession:
    """A session. Use `open`."""

    def __init__(
        self, server: str, transport: Transport, on_tools_changed: Callable[[], None], peer: Peer | None
    ) -> None:
        self._server = server
        self._peer = peer
        self._calls = 0
        self._transport = transport
        self._on_tools_changed = on_tools_changed
        self._session: ClientSession | None = None
        self._closing = asyncio.Event()
        self._owner: asyncio.Task[None] | None = None

    @classmethod
    async def open(
        cls,
        server: str,
        transport: Transport,
        *,
        timeout_s: float,
        on_tools_changed: Callable[[], None],
        peer: Peer | None = None,
    ) -> McpSession:
        """Open a session and greet; `on_tools_changed` is called when the server says that its tools are others now.

        Raises:
            McpFailed: it cannot be reached, or is no MCP server.
        """
        session = cls(server, transport, on_tools_changed, peer)
        opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        session._owner = asyncio.create_task(session._own(opened))
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(opened)
        except TimeoutError as exc:
            await session.close()
            raise McpFailed(f"the MCP server {server} did not greet within {timeout_s:g} s", is_over=True) from exc
        except McpFailed as exc:
            told = await session._told(exc)
            await session.close()
            raise told from exc
        except BaseException:
            await session.close()
            raise
        return session

    @property
    def is_open(self) -> bool:
        """It takes calls."""
        return self._session is not None and not self._closing.is_set()

    async def tools(self, *, timeout_s: float) -> list[types.Tool]:
        """Every tool that the server lists.

        Raises:
            McpFailed: it does not answer, or lists more than anybody needs.
        """
        found: list[types.Tool] = []
        cursor: str | None = None
        with self._translated():
            async with asyncio.timeout(timeout_s):
                for _ in range(PAGES_MAX):
                    page = await self._live().list_tools(params=types.PaginatedRequestParams(cursor=cursor))
                    found += page.tools
                    cursor = page.next_cursor
                    if cursor is None or len(found) > TOOLS_MAX:
                        break
        if cursor is not None or len(found) > TOOLS_MAX:
            raise McpFailed(f"the MCP server {self._server} lists more than {TOOLS_MAX} tools or {PAGES_MAX} pages")
        return found

    async def call(self, tool: str, arguments: dict[str, Any], report_progress: ReportProgress) -> Answer:
        """Call a tool and wait for its answer; a caller that is cancelled has the server told so.

        Raises:
            McpFailed: there was no answer that could be understood.
        """

        async def on_progress(progress: float, total: float | None, message: str | None) -> None:
            await report_progress(progress, total, message)

        request = types.CallToolRequest(params=types.CallToolRequestParams(name=tool, arguments=arguments))
        await self._count(1)
        try:
            with self._translated():
                # Not `call_tool`: it checks the result against a schema of the server's, whose patterns may take for ever.
                result = await self._live().send_request(request, types.CallToolResult, progress_callback=on_progress)
        except McpFailed as exc:
            raise await self._told(exc) from exc
        finally:
            await self._count(-1)
        return Answer(text=mcp_results.text_of(result), is_error=result.is_error)

    async def close(self, *, at_once: bool = False) -> None:
        """Leave the session; returns when the transport is closed. `at_once`: a process that runs here is killed."""
        if at_once and self._peer is not None:
            await self._peer.kill()
        self._closing.set()
        if self._owner is None:
            return
        if self._session is None:
            self._owner.cancel()
        await asyncio.wait({self._owner}, timeout=_CLOSE_S)
        if not self._owner.done():
            _LOG.error("the session with the MCP server %s does not close", self._server)
            self._owner.cancel()

    async def _count(self, change: int) -> None:
        was_busy, self._calls = self._calls > 0, self._calls + change
        if self._peer is not None and was_busy != (self._calls > 0):
            await self._peer.busy(self._calls > 0)

    async def _told(self, failure: McpFailed) -> McpFailed:
        """The failure with what the server's process said as it ended, if that is what happened."""
        words = await self._peer.last_words() if self._peer is not None and failure.is_over else ""
        return McpFailed(f"the MCP server {self._server} is gone: {words}", is_over=True) if words else failure

    async def _own(self, opened: asyncio.Future[None]) -> None:
        try:
            async with self._transport() as (read, write):
                client = types.Implementation(name="continuum", version=version("continuum-agents"))
                async with ClientSession(read, write, message_handler=self._on_message, client_info=client) as session:
                    with self._translated():
                        await session.initialize()
                    self._session = session
                    if not opened.done():
                        opened.set_result(None)
                    await self._closing.wait()
        except Exception as exc:  # noqa: BLE001 - the SDK raises groups of whatever its transports raise
            failure = _first(exc)
            if not opened.done():
                opened.set_exception(
                    failure
                    if isinstance(failure, McpFailed)
                    else McpFailed(f"the MCP server {self._server} cannot be reached: {failure}", is_over=True)
                )
            else:
                _LOG.warning("the session with the MCP server %s ended: %s", self._server, failure)
        finally:
            self._session = None
            if not opened.done():
                opened.cancel()

    async def _on_message(self, message: Any) -> None:
        if isinstance(message, types.ToolListChangedNotification):
            self._on_tools_changed()
        elif isinstance(message, Exception):
            _LOG.info("the MCP server %s sent something that is no message: %s", self._server, str(message)[:500])

    def _live(self) -> ClientSession:
        if self._session is None:
            raise McpFailed(f"the session with the MCP server {self._server} is over", is_over=True)
        return self._session

    @contextlib.contextmanager
    def _translated(self) -> Any:
        """The SDK's errors as `McpFailed`."""
        try:
            yield
        except MCPError as exc:
            is_over = exc.error.code not in _REFUSALS
            raise McpFailed(
                f"the MCP server {self._server} answered: {exc.error.message[:1000]}", is_over=is_over
            ) from exc
        except TimeoutError as exc:
            raise McpFailed(f"the MCP server {self._server} does not answer", is_over=True) from exc
        except (ValidationError, ValueError, RuntimeError) as exc:
            raise McpFailed(
                f"the MCP server {self._server} answered with something that is no answer: {exc}"[:1500]
            ) from exc
        except (httpx2.HTTPError, OSError) as exc:
            raise McpFailed(f"the MCP server {self._server} cannot be reached: {exc}", is_over=True) from exc


def _first(exc: BaseException) -> BaseException:
    """The first real exception in groups of groups."""
    while isinstance(exc, BaseExceptionGroup):
        exc = exc.exceptions[0]
    return exc
