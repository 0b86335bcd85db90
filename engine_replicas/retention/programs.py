"""Which programs this engine knows, and what it remembers of each.

A program is known from its first turn until it ends: by its last turn, by being released, by silence, or because too many
others came (the least recently active idle one goes). Then it counts as finished, with the turns it took. One with live
turns is never forgotten, so the table is bounded by `programs_max` plus the turns in the engine. What was decided about a
program stays readable for a while after its end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from agent_program.ids import ProgramId, TenantId, ToolKey
from agent_program.turn import TurnHints
from engine_replicas.retention.lease import BranchKey

_BRANCHES_MAX = 64
_DECISIONS_MAX = 16
_ENDED_MAX = 512


@dataclass(slots=True)
class Branch:
    """One line of context, between two of its turns."""

    #: When its last turn ended.
    finished_s: float
    #: Tokens whose KV that turn left behind.
    context_tokens: int
    #: The tool it waits for, as far as known.
    tool: ToolKey | None = None
    #: Its wait is in the latency history already.
    is_wait_counted: bool = False


@dataclass(slots=True)
class ToolWait:
    """Tool calls of a program since its last turn, from exact events."""

    running: int = 0
    #: Tools that ended and the seconds they took.
    finished: list[tuple[ToolKey, float]] = field(default_factory=list)


@dataclass(slots=True)
class Program:
    """What is remembered of one program."""

    program_id: ProgramId
    tenant_id: TenantId
    arrived_s: float
    active_s: float
    turns_finished: int = 0
    #: Seconds for which its turns have run, their time in the queue apart.
    attained_s: float = 0.0
    #: Turns that it declared to take in all, as last heard; None where it declares nothing.
    declared_turns: int | None = None
    #: It has started for good: a turn of it ran that was not let through for the sake of its first token alone.
    is_admitted: bool = False
    #: Turns queued or running now.
    live_turns: int = 0
    #: It has ended; turns that are still live leave nothing behind.
    is_over: bool = False
    branches: dict[str, Branch] = field(default_factory=dict)
    tools: ToolWait = field(default_factory=ToolWait)
    #: How its leases ended: outcome → count.
    lease_outcomes: dict[str, int] = field(default_factory=dict)
    #: The last decisions about it, each with its inputs and `at_s`.
    decisions: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_DECISIONS_MAX))

    def turn_ended(self, branch_name: str, branch: Branch) -> None:
        """Remember what a turn left behind; the branch that was silent longest goes when there are too many."""
        self.turns_finished += 1
        self.branches.pop(branch_name, None)
        self.branches[branch_name] = branch
        if len(self.branches) > _BRANCHES_MAX:
            del self.branches[next(iter(self.branches))]

    def lease_ended(self, outcome: str) -> None:
        """Count one more end of a lease."""
        self.lease_outcomes[outcome] = self.lease_outcomes.get(outcome, 0) + 1

    def decided(self, event: str, now_s: float, **inputs: Any) -> None:
        """Keep what was decided and why."""
        self.decisions.append({"event": event, "at_s": now_s, **inputs})


@dataclass(slots=True)
class LiveTurn:
    """A turn in the engine."""

    program: Program
    hints: TurnHints
    key: BranchKey
    arrived_s: float
    #: The lease it will run on.
    lease_id: int | None
    #: Context tokens that the branch's previous turn left behind; None for a first turn.
    context_tokens: int | None
    #: The front end looks for strings in its output, and ends it when it finds one.
    has_stop_strings: bool
    is_scheduled: bool = False
    #: When it got its first blocks.
    scheduled_s: float = 0.0
    #: A lease held its branch's KV until it took it over.
    had_lease: bool = False
    #: Tokens of its context that came from a tier below.
    loaded_tokens: int = 0
    #: The tool of an arm request that came before the turn's end was seen here.
    early_tool: ToolKey | None = None
    is_armed_early: bool = False
    is_last: bool = False


class ProgramTable:
    """All known programs, least recently active first."""

    def __init__(
        self, *, programs_max: int, idle_max_s: float, when_ended: Callable[[ProgramId], None] = lambda _: None
    ) -> None:
        """Know nobody; `when_ended` is told of each program that ends, however it does."""
        self._when_ended = when_ended
        self._programs: dict[ProgramId, Program] = {}
        self._ended: dict[ProgramId, Program] = {}
        self._programs_max = programs_max
        self._idle_max_s = idle_max_s

    def __len__(self) -> int:
        return len(self._programs)

    def get(self, program_id: ProgramId) -> Program | None:
        """The program, if it has not ended."""
        return self._programs.get(program_id)

    def recall(self, program_id: ProgramId) -> Program | None:
        """The program, also for a while after it has ended."""
        return self._programs.get(program_id) or self._ended.get(program_id)

    def arrived(self, program_id: ProgramId, tenant_id: TenantId, now_s: float) -> tuple[Program, tuple[Program, ...]]:
        """A turn of the program came: the program, new or known, and those that are forgotten for it or for their silence."""
        program = self._programs.get(program_id)
        if program is None:
            program = Program(program_id=program_id, tenant_id=tenant_id, arrived_s=now_s, active_s=now_s)
        self.active(program, now_s)
        return program, self._forget_some(now_s, keep=program)

    def active(self, program: Program, now_s: float) -> None:
        """Something happened to a program that has not ended: it is the most recently active one."""
        program.active_s = now_s
        self._programs.pop(program.program_id, None)
        self._programs[program.program_id] = program

    def end(self, program: Program) -> None:
        """The program has ended; another may come under its id."""
        program.is_over = True
        if self._programs.get(program.program_id) is program:
            del self._programs[program.program_id]
        self._ended.pop(program.program_id, None)
        self._ended[program.program_id] = program
        if len(self._ended) > _ENDED_MAX:
            del self._ended[next(iter(self._ended))]
        self._when_ended(program.program_id)

    def _forget_some(self, now_s: float, *, keep: Program) -> tuple[Program, ...]:
        """At most two at a time, so that no single arrival pays for a crowd."""
        forgotten: list[Program] = []
        for program in self._programs.values():
            is_surplus = len(self._programs) - len(forgotten) > self._programs_max
            if len(forgotten) == 2 or not (is_surplus or now_s - program.active_s > self._idle_max_s):
                break
            if not program.live_turns and program is not keep:
                forgotten.append(program)
        for program in forgotten:
            self.end(program)
        return tuple(forgotten)
