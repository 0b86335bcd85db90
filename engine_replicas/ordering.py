"""Which waiting turn runs next, and which running turn is preempted first: one small class per ordering.

An ordering gives each turn a key; the queue is sorted by it, stably, and preemption takes from the other end. An ordering
without a key leaves the engine's own order alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class OrderedTurn:
    """What an ordering knows about a turn in the engine."""

    #: It ran, lost its blocks to another turn, and waits again.
    is_preempted: bool
    #: A lease holds the KV of its branch's previous turn.
    is_retained: bool
    #: When its program was first seen here; a turn without a program is a program of its own.
    program_arrival_s: float


class Ordering(Protocol):
    """An order of turns."""

    #: Whether turns are reordered at all.
    reorders: bool

    def waiting_key(self, turn: OrderedTurn) -> tuple[float, ...]:
        """Smaller runs earlier."""
        ...

    def running_key(self, turn: OrderedTurn) -> tuple[float, ...]:
        """Smaller is preempted later."""
        ...


class Fcfs:
    """Stock vLLM: first come, first served, turn by turn."""

    reorders = False

    def waiting_key(self, turn: OrderedTurn) -> tuple[float, ...]:
        return ()

    def running_key(self, turn: OrderedTurn) -> tuple[float, ...]:
        return ()


class ProgramFcfs:
    """The paper's order: preempted turns, then turns whose KV is retained, then by the arrival of the program.

    Turns of programs that arrived later wait for the earlier programs' turns, not for their tool calls. A turn's wait is
    bounded by the programs that arrived before its own, a set that only shrinks, and by retained turns, each of which runs
    once and gives up its lease.
    """

    reorders = True

    def waiting_key(self, turn: OrderedTurn) -> tuple[float, ...]:
        return (not turn.is_preempted, not turn.is_retained, turn.program_arrival_s)

    def running_key(self, turn: OrderedTurn) -> tuple[float, ...]:
        return (turn.program_arrival_s,)
