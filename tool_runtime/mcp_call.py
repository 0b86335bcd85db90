"""One call of an MCP server's tool, as an `Executor`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

from agent_program.clock import Clock
from tool_runtime.config import OutputLimits
from tool_runtime.mcp_client import Answer, McpFailed, McpSession, ReportProgress
from tool_runtime.output import bounded
from tool_runtime.queueing import wait_unless
from tool_runtime.sandbox import BoundedText, Ending, Execution


class McpCall:
    """Runs once, in a session that is kept open meanwhile."""

    def __init__(
        self, session: McpSession, tool: str, report_progress: ReportProgress, clock: Clock, *, ends_server: bool
    ) -> None:
        """`tool` is what the server calls it; `ends_server`: a call that is stopped takes the server with it."""
        self.session = session
        #: The session broke under the call.
        self.broke = False
        #: Only the end of the server surely ends what the call began.
        self.must_end = False
        self._tool = tool
        self._report_progress = report_progress
        self._ends_server = ends_server
        self._clock = clock

    async def execute(
        self,
        tool: str,
        fields: Mapping[str, Any],
        *,
        timeout_s: float,
        grace_s: float,
        output: OutputLimits,
        cancelled: asyncio.Event | None = None,
    ) -> Execution:
        """Call the tool, for no longer than `timeout_s`, unless `cancelled` is set first."""
        started_s = self._clock.now_s()
        calling = asyncio.create_task(self.session.call(self._tool, dict(fields), self._report_progress))
        try:
            await wait_unless(cancelled, calling, timeout_s=timeout_s)
        finally:
            if not calling.done():
                self.must_end = self._ends_server
                calling.cancel()  # the server is told so
                with contextlib.suppress(asyncio.CancelledError, McpFailed):
                    await calling
        is_cancelled = cancelled is not None and cancelled.is_set()
        ending, answer, reason = self._outcome(calling, is_cancelled=is_cancelled)
        kept = bounded(output)
        kept.feed(answer.text.encode("utf-8", "replace"))
        return Execution(
            ending=ending,
            exit_code=(1 if answer.is_error else 0) if ending is Ending.FINISHED else None,
            stdout=kept.result(),
            stderr=BoundedText(),
            duration_s=self._clock.now_s() - started_s,
            reason=reason,
        )

    def _outcome(self, calling: asyncio.Task[Answer], *, is_cancelled: bool) -> tuple[Ending, Answer, str]:
        nothing = Answer(text="", is_error=True)
        if calling.cancelled():
            return Ending.CANCELLED if is_cancelled else Ending.TIMED_OUT, nothing, ""
        failure = calling.exception()
        if failure is None:
            return Ending.FINISHED, calling.result(), ""
        if not isinstance(failure, McpFailed):
            raise failure
        if failure.is_over:
            self.broke = True
            return Ending.INTERRUPTED, nothing, str(failure)
        return Ending.FINISHED, Answer(text=str(failure), is_error=True), ""
