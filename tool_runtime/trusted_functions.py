"""Runs functions that were declared to run in the actor: on its event loop, or in a thread.

A thread cannot be stopped. At its limit the call ends with what it is, a timeout, and the thread goes on until it returns; it
keeps its place meanwhile, so that there are never more than so many, and with all places taken calls are refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

from agent_program.clock import Clock
from tool_runtime.config import OutputLimits
from tool_runtime.functions import FunctionTool, ToolContext
from tool_runtime.output import bounded
from tool_runtime.queueing import wait_unless
from tool_runtime.sandbox import BoundedText, Ending, Execution

_LOG = logging.getLogger(__name__)


class _Refused(Exception):
    """The function did not run, or what it returned is nothing that can be handed on; the message is for the model."""


class TrustedFunctions:
    """The threads that functions run in."""

    def __init__(self, clock: Clock, *, threads_max: int) -> None:
        self._clock = clock
        self._threads_max = threads_max
        #: Threads that run a function now, also those whose call has ended.
        self.threads = 0

    def executor(self, tool: FunctionTool, context: ToolContext) -> TrustedCall:
        """What runs one call of `tool`."""
        return TrustedCall(self, tool, context, self._clock)

    async def in_thread(self, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        """Call `function` in a thread of its own; cancelled, nobody waits for the thread any more."""
        if self.threads >= self._threads_max:
            raise _Refused(f"all {self._threads_max} threads for such functions are busy; try again later")
        loop, done = asyncio.get_running_loop(), asyncio.Event()
        outcome: list[tuple[bool, Any]] = []

        def finish() -> None:
            self.threads -= 1
            done.set()

        def run() -> None:
            try:
                outcome.append((True, function(**arguments)))
            except BaseException as exc:  # noqa: BLE001 - handed to the waiting call, whatever it is
                outcome.append((False, exc))
            with contextlib.suppress(RuntimeError):  # the actor's loop is closed: there is nobody to tell
                loop.call_soon_threadsafe(finish)

        self.threads += 1
        # Daemons, not a pool: a pool's threads are waited for at the interpreter's exit, and one of these may never return.
        threading.Thread(target=run, name=f"tool-{getattr(function, '__name__', 'function')}", daemon=True).start()
        await done.wait()
        succeeded, value = outcome[0]
        if succeeded:
            return value
        raise value


class TrustedCall:
    """An `Executor` for one call."""

    def __init__(self, functions: TrustedFunctions, tool: FunctionTool, context: ToolContext, clock: Clock) -> None:
        self._functions = functions
        self._tool = tool
        self._context = context
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
        """Call the function, for no longer than `timeout_s`, unless `cancelled` is set first."""
        started_s = self._clock.now_s()
        calling = asyncio.create_task(self._call(fields))
        try:
            await wait_unless(cancelled, calling, timeout_s=timeout_s)
        finally:
            is_done = calling.done()
            if not is_done:
                calling.cancel()
                # A coroutine that does not let itself be cancelled is left behind like a thread.
                await asyncio.wait({calling}, timeout=grace_s)
        ending, code, text = Ending.FINISHED, 0, ""
        if is_done:
            code, text = calling.result()
        else:
            ending = Ending.CANCELLED if cancelled is not None and cancelled.is_set() else Ending.TIMED_OUT
        kept = bounded(output)
        kept.feed(text.encode("utf-8", "replace"))
        return Execution(
            ending=ending,
            exit_code=code if is_done else None,
            stdout=kept.result(),
            stderr=BoundedText(),
            duration_s=self._clock.now_s() - started_s,
        )

    async def _call(self, fields: Mapping[str, Any]) -> tuple[int, str]:
        function = self._tool.function
        try:
            arguments = self._tool.parsed(fields)
            if self._tool.context_parameter is not None:
                arguments[self._tool.context_parameter] = self._context
            if inspect.iscoroutinefunction(function):
                value = await function(**arguments)
            else:
                value = await self._functions.in_thread(function, arguments)
            return 0, text_of(value)
        except _Refused as exc:
            return 1, str(exc)
        except Exception as exc:  # noqa: BLE001 - whatever a function raises is its result
            _LOG.info("the function %s raised", self._tool.spec.name, exc_info=True)
            return 1, f"{type(exc).__name__}: {exc}"


def text_of(value: Any) -> str:
    """What a function returned, for a model: text as it is, nothing as nothing, all else as JSON.

    Raises:
        _Refused: it is not JSON.
    """
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as exc:
        raise _Refused(f"the function returned a {type(value).__name__}, which is not JSON: {exc}") from exc
