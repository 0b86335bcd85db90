"""Chat turns and a fleet in memory, for tests of the API: scripted, recording, deciding nothing."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from agent_program.tool_events import ToolEvent
from agent_program.turn import TurnHints
from deployments.fleet import PartAnswer
from deployments.ports import ReleasedProgram
from engine_replicas.turn_stream import TurnClosed, TurnOpened

Item = TurnOpened | TurnClosed | str | Exception | asyncio.Event


class ScriptedChat:
    """Turns as lists of items. An exception is raised in its place; an event is waited for."""

    def __init__(self, turns: Iterable[Sequence[Item]] = ()) -> None:
        self._turns = deque(turns)
        self.bodies: list[Mapping[str, Any]] = []
        self.hints: list[TurnHints | None] = []
        #: Turns whose context was left, in order; True where that was before their end.
        self.aborted: list[bool] = []
        self.events: list[ToolEvent] = []
        self.released: list[str] = []

    @asynccontextmanager
    async def chat(
        self, body: Mapping[str, Any], hints: TurnHints | None
    ) -> AsyncIterator[AsyncIterator[TurnOpened | TurnClosed | str]]:
        self.bodies.append(body)
        self.hints.append(hints)
        script = self._turns.popleft()
        is_complete = False

        async def items() -> AsyncIterator[TurnOpened | TurnClosed | str]:
            nonlocal is_complete
            for item in script:
                if isinstance(item, Exception):
                    raise item
                if isinstance(item, asyncio.Event):
                    await item.wait()
                else:
                    yield item
            is_complete = True

        try:
            yield items()
        finally:
            self.aborted.append(not is_complete)

    async def tool_event(self, event: ToolEvent) -> None:
        self.events.append(event)

    async def release(self, program_id: str) -> ReleasedProgram | None:
        self.released.append(program_id)
        return None


class TableFleet:
    """`Fleet` whose answers are given: (part, method, arguments ...) → answer."""

    def __init__(self, answers: Mapping[tuple[str, ...], PartAnswer]) -> None:
        self.answers = dict(answers)

    @property
    def parts(self) -> Sequence[str]:
        return tuple(dict.fromkeys(part for part, *_ in self.answers))

    async def ask(self, part: str, method: str, *arguments: Any, timeout_s: float) -> PartAnswer:
        return self.answers[(part, method, *arguments)]
