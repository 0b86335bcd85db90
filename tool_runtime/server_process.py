"""A server in a sandbox of its own, and the lines that it and the host exchange.

Nothing that it sends can hurt: a line that is too long, or lines that come too fast, end it. It ends with its sandbox, and the
sandbox with everything in it, so that a server which forks away leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket

from agent_program.clock import Clock
from agent_program.errors import SandboxUnavailable
from tool_runtime.egress_proxy import EgressProxy
from tool_runtime.listener_handover import received_listener
from tool_runtime.sandbox import SpawnPlan
from tool_runtime.spawning import Launcher, Spawned

_LOG = logging.getLogger(__name__)

LINE_BYTES_MAX = 16 * 1024 * 1024
LINES_PER_SECOND_MAX = 2000
#: Between the end of what the host says and SIGKILL, for a server that wants to put its things in order.
_GOODBYE_S = 2.0
_DEATH_S = 10.0
_LAST_WORDS_S = 1.0


class ServerProcess:
    """A running server. Use `start`."""

    def __init__(self, launcher: Launcher, child: Spawned, clock: Clock) -> None:
        self._launcher = launcher
        self._child = child
        self._clock = clock
        self._proxy_server: asyncio.Server | None = None
        self._reader = asyncio.StreamReader(limit=LINE_BYTES_MAX)
        self._writer: asyncio.StreamWriter | None = None
        #: What it did that ended it; empty if nothing.
        self._offence = ""
        self._second = 0
        self._lines = 0

    @classmethod
    async def start(
        cls, launcher: Launcher, plan: SpawnPlan, proxy: EgressProxy | None, *, timeout_s: float, clock: Clock
    ) -> ServerProcess:
        """Start `plan`; that the program can be run and speaks is not waited for.

        Raises:
            SandboxUnavailable: there is no sandbox for it; the message has what it said.
        """
        process = cls(launcher, await launcher.spawn(plan), clock)
        try:
            await process._connect(plan, proxy, timeout_s)
        except BaseException:
            await process.close()
            raise
        return process

    @property
    def is_alive(self) -> bool:
        """It has not ended."""
        return not self._child.exited.done()

    async def exited(self) -> str:
        """Wait for its end; returns why it ended, in words."""
        await asyncio.wait({self._child.exited})
        return self.reason()

    def reason(self) -> str:
        """Why it ended, in words."""
        if self._offence or not self._child.exited.done():
            return self._offence or "it runs"
        ended = self._child.exited.result()
        last_words = ended.stderr.strip()[-1000:]
        return ended.reason or f"it ended (status {ended.status})" + (f": {last_words}" if last_words else "")

    async def last_words(self) -> str:
        """`reason`, after a moment for an end that is just coming."""
        await asyncio.wait({self._child.exited}, timeout=_LAST_WORDS_S)
        return self.reason()

    async def read_line(self) -> bytes:
        """The next line without its end; empty when there are no more."""
        try:
            line = await self._reader.readuntil(b"\n")
        except asyncio.IncompleteReadError:
            return b""
        except asyncio.LimitOverrunError:
            await self._end(f"it sent a line of more than {LINE_BYTES_MAX // 2**20} MiB")
            return b""
        except OSError:
            return b""
        second = int(self._clock.now_s())
        self._lines = self._lines + 1 if second == self._second else 1
        self._second = second
        if self._lines > LINES_PER_SECOND_MAX:
            await self._end(f"it sent more than {LINES_PER_SECOND_MAX} messages in a second")
            return b""
        return line.rstrip(b"\r\n") or b" "

    async def write_line(self, line: bytes) -> None:
        """Send a line.

        Raises:
            OSError: it hung up.
        """
        assert self._writer is not None
        self._writer.write(line + b"\n")
        await self._writer.drain()

    async def watch(self, *, is_busy: bool) -> None:
        """Say whether a call runs, which decides how closely its memory is watched."""
        await self._launcher.watch(self._child, is_busy=is_busy)

    async def exceed(self, limit: str) -> None:
        """It used more than it may of what `limit` names in words: end it."""
        await self._end(limit)

    async def close(self) -> None:
        """Hang up, and kill everything in its sandbox if that does not end it."""
        if self._writer is not None:
            with contextlib.suppress(OSError):
                if self._writer.can_write_eof():
                    self._writer.write_eof()
            await asyncio.wait({self._child.exited}, timeout=_GOODBYE_S)
        await self._launcher.kill(self._child)
        await asyncio.wait({self._child.exited}, timeout=_DEATH_S)
        if not self._child.exited.done():
            _LOG.error("the sandbox of a server does not die (process %s)", self._child.pid)
        if self._proxy_server is not None:
            self._proxy_server.close()
        if self._writer is None:
            self._child.socket.close()
        else:
            self._writer.transport.abort()

    async def _end(self, offence: str) -> None:
        self._offence = self._offence or offence
        await self._launcher.kill(self._child)

    async def _connect(self, plan: SpawnPlan, proxy: EgressProxy | None, timeout_s: float) -> None:
        if plan.hands_out_listener:
            listener, _ = await received_listener(self._child.socket, timeout_s)
            if listener is None:
                raise SandboxUnavailable(f"the server's sandbox does not start: {await self.last_words()}")
            await self._serve_proxy(listener, proxy)
        self._reader, self._writer = await asyncio.open_unix_connection(sock=self._child.socket, limit=LINE_BYTES_MAX)

    async def _serve_proxy(self, listener: socket.socket, proxy: EgressProxy | None) -> None:
        if proxy is None:
            listener.close()
        else:
            self._proxy_server = await proxy.serve(listener)
