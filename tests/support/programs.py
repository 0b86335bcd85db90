"""Builders of programs, and a loop over them in memory."""

from __future__ import annotations

from typing import Any

from agent_program.clock import Clock, ManualClock
from agent_program.ids import new_program_id
from deployments.journal import Claim, Journal
from deployments.memory_clients import ScriptedEngine, ScriptedTools
from deployments.memory_journal import MemoryJournal
from deployments.program import Limits, ProgramSpec
from deployments.program_loop import ProgramLoop
from deployments.program_settings import ProgramSettings
from tool_runtime.registry import BUILTIN_TOOLS
from tool_runtime.tool_selection import select_tools


def limits(**changes: Any) -> Limits:
    defaults = {"max_turns": 8, "max_tokens_per_turn": 64, "max_seconds": 3600.0, "action_expires_s": 600.0}
    return Limits(**{**defaults, **changes})


def spec(**changes: Any) -> ProgramSpec:
    """A program that may use a shell and read files; `tools` are names of registered tools, or entries as a client sends."""
    defaults: dict[str, Any] = {
        "id": new_program_id(),
        "tenant_id": "default",
        "model": "small",
        "messages": [{"role": "user", "content": "Do it."}],
        "tool_choice": "auto",
        "limits": limits(),
        "sampling": {},
        "metadata": {},
        "created_at": ManualClock().wall_s(),
    }
    tools = select_tools(changes.pop("tools", ["shell", "read_file"]), BUILTIN_TOOLS, tools_max=64)
    return ProgramSpec(**{**defaults, "tool_specs": [tool.to_wire() for tool in tools], **changes})


class Bench:
    """One program, the journal that holds it, and everything that a loop over it needs."""

    def __init__(
        self,
        program: ProgramSpec,
        *,
        engine: ScriptedEngine,
        tools: ScriptedTools | None = None,
        journal: Journal | None = None,
        clock: Clock | None = None,
        settings: ProgramSettings | None = None,
    ) -> None:
        self.program = program
        self.clock = clock or ManualClock()
        self.journal = journal or MemoryJournal(self.clock)
        self.engine = engine
        self.tools = tools or ScriptedTools()
        self.settings = settings or ProgramSettings()

    async def submit(self) -> None:
        await self.journal.create(self.program, queued_max=10)

    async def claim(self, runner: str = "runner_1", *, lease_s: float = 10.0) -> tuple[Claim, ProgramLoop]:
        """Claim the program and make a loop over what the journal says of it."""
        claim = await self.journal.claim(runner, lease_s=lease_s)
        assert claim is not None
        assert claim.program_id == self.program.id
        loop = ProgramLoop(
            claim,
            await self.journal.load(claim.program_id),
            runner=runner,
            journal=self.journal,
            engine=self.engine,
            tools=self.tools,
            clock=self.clock,
            settings=self.settings,
        )
        return claim, loop

    async def run(self) -> None:
        """Submit, claim, run to the end."""
        await self.submit()
        _, loop = await self.claim()
        await loop.run()

    async def kinds(self) -> list[str]:
        """The journal's step kinds, in order."""
        return [step.kind.value for step in await self.journal.steps(self.program.id)]

    async def data(self, kind: str) -> list[dict[str, Any]]:
        """The data of every step of one kind."""
        return [dict(step.data) for step in await self.journal.steps(self.program.id) if step.kind == kind]
