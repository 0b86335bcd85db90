"""Tool durations measured from outside: the gap between the end of a turn and the arrival of the program's next one.

It is all there is to know of a client that runs its own tools and reports nothing. It is not used where something better is
known: the next turn says exactly how long the tool took, or tool events came for the program in between. Pure.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from agent_program.ids import ProgramId, ToolKey
from agent_program.tool_events import LatencySample, SampleSource, ToolOutcome
from agent_program.turn import TurnHints

#: A longer gap is a client that went away and came back, not a tool.
GAP_MAX_S = 1800.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Waiting:
    tool: ToolKey
    since_s: float


class RequestGaps:
    """Programs that are waiting for a tool, as far as can be seen from their turns."""

    def __init__(self, *, programs_max: int = 8192, branches_max: int = 64):
        self._programs_max = programs_max
        self._branches_max = branches_max
        self._waiting: OrderedDict[ProgramId, dict[str, _Waiting]] = OrderedDict()

    def turn_closed(self, program_id: ProgramId, branch: str, tool: ToolKey | None, now_s: float) -> None:
        """A turn ended; `tool` runs next, or None where the turn called none. Where there are too many, the oldest go."""
        self._take(program_id, branch)
        if tool is None:
            return
        branches = self._waiting.pop(program_id, {})
        branches[branch] = _Waiting(tool=tool, since_s=now_s)
        if len(branches) > self._branches_max:
            del branches[next(iter(branches))]
        self._waiting[program_id] = branches
        if len(self._waiting) > self._programs_max:
            self._waiting.popitem(last=False)

    def forget(self, program_id: ProgramId) -> None:
        """Somebody measures this program's tools exactly, or the program is over."""
        self._waiting.pop(program_id, None)

    def turn_arrived(self, hints: TurnHints, now_s: float, now_wall_s: float) -> LatencySample | None:
        """The sample that the arrival gives, if any."""
        wait = self._take(hints.program_id, hints.branch)
        if wait is None or hints.last_tool_s is not None:
            return None
        gap_s = now_s - wait.since_s
        if not 0 <= gap_s <= GAP_MAX_S:
            return None
        return LatencySample(
            tool=wait.tool,
            duration_s=gap_s,
            outcome=ToolOutcome.OK,
            source=SampleSource.REQUEST_GAP,
            at_wall_s=now_wall_s,
        )

    def _take(self, program_id: ProgramId, branch: str) -> _Waiting | None:
        branches = self._waiting.get(program_id, {})
        wait = branches.pop(branch, None)
        if not branches:
            self._waiting.pop(program_id, None)
        return wait
