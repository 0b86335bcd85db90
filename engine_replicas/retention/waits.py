"""How long programs wait for their tools, each wait counted once.

A wait lies between the end of a turn and the arrival of the branch's next one. The best measure that comes is taken: exact
times of tool events; else the exact time that the next turn carries in its hints; else the gap between the two turns, which
also holds what client and network add.

Calls that run side by side are several calls and one wait: the wait is the longest, under the combined key.
"""

from __future__ import annotations

from agent_program.ids import ToolKey
from agent_program.tool_events import ToolOutcome
from agent_program.turn import TurnHints
from engine_replicas.retention.programs import Branch, Program, ToolWait
from engine_replicas.retention.tool_latency import ToolLatencyView
from tool_runtime.tool_key import combine

#: A longer gap is a client that went away and came back, not a tool.
GAP_MAX_S = 1800.0
_CALLS_MAX = 64


class WaitCounter:
    """Feeds the engine's own waits into its view of tool latency."""

    def __init__(self, tools: ToolLatencyView) -> None:
        self._tools = tools

    def next_turn_arrived(self, branch: Branch, hints: TurnHints, now_s: float) -> None:
        """The branch's wait is over."""
        if branch.is_wait_counted:
            return
        branch.is_wait_counted = True
        if hints.last_tool_s is not None:
            self._tools.add_wait(hints.last_tool or branch.tool, hints.last_tool_s)
        elif 0 <= now_s - branch.finished_s <= GAP_MAX_S:
            self._tools.add_wait(branch.tool or hints.last_tool, now_s - branch.finished_s)

    def tool_started(self, program: Program) -> None:
        """A call of the program runs."""
        program.tools.running = min(program.tools.running + 1, _CALLS_MAX)

    def tool_finished(self, program: Program, tool: ToolKey, elapsed_s: float, outcome: ToolOutcome | None) -> bool:
        """A call ended. True when it was the last one that ran: the next turn is on its way.

        A call that its owner cancelled says nothing about how long the tool takes. One that timed out does: the program
        waited that long and goes on.
        """
        wait = program.tools
        wait.running = max(0, wait.running - 1)
        if outcome is not ToolOutcome.CANCELLED and len(wait.finished) < _CALLS_MAX:
            wait.finished.append((tool, elapsed_s))
        if wait.running:
            return False
        program.tools = ToolWait()
        if wait.finished:
            self._count(wait.finished)
            for branch in program.branches.values():
                branch.is_wait_counted = True
        return True

    def _count(self, calls: list[tuple[ToolKey, float]]) -> None:
        longest_s = max(elapsed_s for _, elapsed_s in calls)
        together = combine(tool for tool, _ in calls)
        for tool, elapsed_s in calls if len(calls) > 1 else ():
            if tool != together:
                self._tools.add_call(tool, elapsed_s)
        self._tools.add_wait(together, longest_s)
