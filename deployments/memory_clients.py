"""Engine and tools in memory, for tests: they answer from a script, record what they were asked, and decide nothing.

A script's entries are consumed in order. An entry that is an exception is raised; an entry that is a `Gate` is waited for
and stands for the entry it holds, so that a test can act while a turn or a tool is in progress.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from agent_program.ids import TenantId
from agent_program.tool_events import ToolEvent, ToolOutcome
from agent_program.turn import TurnHints
from deployments.ports import ReleasedProgram, TurnOutcome
from tool_runtime.held_program import HeldProgram
from tool_runtime.tool_call import ToolCall, ToolProgress, ToolResult, ToolStarted
from tool_runtime.tool_key import tool_key

_T = TypeVar("_T")


@dataclass
class Gate(Generic[_T]):
    """An entry that is not given before the test opens it."""

    entry: _T | Exception
    #: Somebody waits at the gate.
    reached: asyncio.Event = field(default_factory=asyncio.Event)
    opened: asyncio.Event = field(default_factory=asyncio.Event)
    #: Whoever waited was cancelled.
    was_cancelled: bool = False

    async def pass_through(self) -> _T:
        self.reached.set()
        try:
            await self.opened.wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        return _given(self.entry)


def _given(entry: _T | Exception) -> _T:
    if isinstance(entry, Exception):
        raise entry
    return entry


async def _next(script: deque[_T | Exception | Gate[_T]], what: str) -> _T:
    if not script:
        raise AssertionError(f"the script has no {what} left")
    entry = script.popleft()
    return await entry.pass_through() if isinstance(entry, Gate) else _given(entry)


def answer(text: str, *, finish_reason: str = "stop", **numbers: Any) -> TurnOutcome:
    """A turn that says `text` and calls no tool."""
    return _outcome({"role": "assistant", "content": text}, finish_reason, numbers)


def tool_calls(*calls: tuple[str, str, Mapping[str, Any] | str], **numbers: Any) -> TurnOutcome:
    """A turn that calls tools: (call id, tool, arguments) each."""
    entries = [
        {
            "id": call_id,
            "type": "function",
            "function": {
                "name": name,
                "arguments": arguments if isinstance(arguments, str) else json.dumps(dict(arguments)),
            },
        }
        for call_id, name, arguments in calls
    ]
    return _outcome({"role": "assistant", "content": None, "tool_calls": entries}, "tool_calls", numbers)


def _outcome(message: dict[str, Any], finish_reason: str, numbers: Mapping[str, Any]) -> TurnOutcome:
    defaults: dict[str, Any] = {
        "prompt_tokens": 100,
        "cached_tokens": 0,
        "output_tokens": 10,
        "replica": "replica-1",
        "lease": None,
    }
    return TurnOutcome(message=message, finish_reason=finish_reason, **{**defaults, **numbers})


class ScriptedEngine:
    """`EngineClient` whose turns are given in advance."""

    def __init__(
        self,
        turns: Iterable[TurnOutcome | Exception | Gate[TurnOutcome]] = (),
        *,
        released_as: ReleasedProgram | None = None,
    ) -> None:
        self._script: deque[TurnOutcome | Exception | Gate[TurnOutcome]] = deque(turns)
        self.bodies: list[Mapping[str, Any]] = []
        self.hints: list[TurnHints] = []
        self.events: list[ToolEvent] = []
        self.released: list[str] = []
        self._released_as = released_as

    async def run_turn(self, body: Mapping[str, Any], hints: TurnHints) -> TurnOutcome:
        self.bodies.append(body)
        self.hints.append(hints)
        return await _next(self._script, "turn")

    async def tool_event(self, event: ToolEvent) -> None:
        self.events.append(event)

    async def release(self, program_id: str) -> ReleasedProgram | None:
        self.released.append(program_id)
        return self._released_as


class ScriptedTools:
    """`ToolClient` whose tools are given as entries by tool name: the output, an exception, or a gate before either."""

    def __init__(self, outputs: Mapping[str, Iterable[str | Exception | Gate[str]]] | None = None) -> None:
        self._scripts = {tool: deque(entries) for tool, entries in (outputs or {}).items()}
        self.calls: list[ToolCall] = []
        self.cancelled: list[tuple[str, str | None]] = []
        self.released: list[tuple[str, bool]] = []
        self.leftovers: list[HeldProgram] = []

    async def call(
        self, call: ToolCall, on_started: Callable[[ToolStarted | ToolProgress], Awaitable[None]]
    ) -> ToolResult:
        self.calls.append(call)
        key = tool_key(call.tool, call.arguments)
        await on_started(ToolStarted(call_id=call.call_id, tool_key=key, queue_s=0.0))
        output = await _next(self._scripts.get(call.tool, deque()), f"output of {call.tool}")
        return ToolResult(
            call_id=call.call_id, tool=call.tool, tool_key=key, outcome=ToolOutcome.OK, output=output, duration_s=1.0
        )

    async def cancel(self, program_id: str, call_id: str | None = None) -> None:
        self.cancelled.append((program_id, call_id))

    async def release(self, program_id: str, *, tenant_id: TenantId, delete_workspace: bool) -> None:
        self.released.append((program_id, delete_workspace))

    async def held(self, quiet_s: float) -> Sequence[HeldProgram]:
        return list(self.leftovers)

    async def release_everywhere(self, held: HeldProgram, *, delete_workspace: bool) -> None:
        self.leftovers.remove(held)
        self.released.append((held.program_id, delete_workspace))
