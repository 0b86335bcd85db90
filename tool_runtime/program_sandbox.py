"""One program on a tool actor: its sandbox, whether it is in use, and what state of it was lost and not told yet."""

from __future__ import annotations

import asyncio

from agent_program.ids import ProgramId, TenantId
from tool_runtime.live_sandbox import LiveSandbox
from tool_runtime.sandbox import Ending, Execution

#: Tools that keep something between calls, which overlapping calls would tear apart.
SESSION_TOOLS = frozenset({"shell", "python"})


class ProgramReleased(Exception):
    """The program was released while a call of it waited."""


class WorkspaceFull(Exception):
    """The program's workspace stays above its limit; the message says which."""


class ProgramSandbox:
    """One program's sandbox, or the place where it will be."""

    def __init__(self, tenant_id: TenantId, program_id: ProgramId) -> None:
        self.tenant_id = tenant_id
        self.program_id = program_id
        self.session_locks = {tool: asyncio.Lock() for tool in SESSION_TOOLS}
        #: Held while the sandbox is started or closed.
        self.changing = asyncio.Lock()
        self.sandbox: LiveSandbox | None = None
        #: Calls under way, those that wait included; while there are any it is not forgotten.
        self.calls = 0
        #: What uses the sandbox now, or is about to; while something does it is not closed for room.
        self.busy = 0
        self.busy_since_s = 0.0
        self.last_used_s = 0.0
        self.is_sleep_asked = False
        #: Something ran since the workspace was last looked at.
        self.is_disk_unchecked = False
        #: What the workspace has too much of, and how often in a row it was found to.
        self.disk_excess: str | None = None
        self.disk_strikes = 0
        #: Something ran since the sandbox's own files, where it has any, were last copied out.
        self.has_new_files = False
        #: A sandbox ended with files that had not been copied out, and the program was not told yet.
        self.are_files_lost = False
        #: The program is over; nothing starts for it any more.
        self.is_released = False
        self._with_state: set[str] = set()
        self._lost: set[str] = set()

    def executed(self, tool: str, execution: Execution, sandbox: LiveSandbox) -> bool:
        """Keep track of which sessions hold state; True if the tool's had been lost before this execution, which is news."""
        lost = sandbox.take_lost_sessions()  # what died between calls is heard of during the next one at the latest
        self._lost |= lost & self._with_state
        self._with_state -= lost
        is_news = tool in self._lost
        self._lost.discard(tool)
        if execution.ending is not Ending.FINISHED:
            self._with_state.discard(tool)  # its own result says so
            self.all_state_lost()
        if tool in SESSION_TOOLS:
            self._with_state.discard(tool) if execution.session_lost else self._with_state.add(tool)
        return is_news

    def take_files_lost(self) -> bool:
        """Whether files were lost since this was last asked."""
        lost, self.are_files_lost = self.are_files_lost, False
        return lost

    def all_state_lost(self) -> None:
        """The sandbox, or every process in it, is gone."""
        self._lost |= self._with_state
        self._with_state.clear()
