"""Which waiting turn runs next, and which running turn is preempted first: one small class per ordering.

An ordering gives each turn a key; the queue is sorted by it, stably, and preemption takes from the other end. An ordering
without a key leaves the engine's own order alone.

No order of programs bounds a wait by itself: programs that came earlier may keep coming back for ever. So a turn that has
waited too long runs next, whatever its program.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class OrderedTurn:
    """What an ordering knows about a turn in the engine."""

    #: It has waited for longer than any turn may.
    is_overdue: bool
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
    """The paper's order: preempted turns, then turns whose KV is retained, then by the arrival of the program."""

    reorders = True

    def waiting_key(self, turn: OrderedTurn) -> tuple[float, ...]:
        return (not turn.is_overdue, not turn.is_preempted, not turn.is_retained, turn.program_arrival_s)

    def running_key(self, turn: OrderedTurn) -> tuple[float, ...]:
        return (turn.program_arrival_s,)


class Arrivals:
    """When the turns in an engine arrived, and which of them have waited too long for their first blocks."""

    def __init__(self, *, wait_max_s: float) -> None:
        self._wait_max_s = wait_max_s
        self._arrived_s: dict[str, float] = {}
        #: Turns that wait and are not overdue, earliest first.
        self._waiting: dict[str, float] = {}
        self._overdue: set[str] = set()

    def __len__(self) -> int:
        return len(self._arrived_s)

    def arrived(self, turn_id: str, now_s: float) -> None:
        """A turn entered the queue."""
        self._arrived_s[turn_id] = self._waiting[turn_id] = now_s

    def scheduled(self, turn_id: str) -> None:
        """It got its first blocks."""
        self._waiting.pop(turn_id, None)
        self._overdue.discard(turn_id)

    def left(self, turn_id: str) -> None:
        """It is no longer in the engine."""
        self.scheduled(turn_id)
        self._arrived_s.pop(turn_id, None)

    def arrived_s(self, turn_id: str) -> float:
        """When it arrived; 0 for an unknown turn."""
        return self._arrived_s.get(turn_id, 0.0)

    def is_overdue(self, turn_id: str) -> bool:
        """Whether it had waited too long when `find_overdue` was last called."""
        return turn_id in self._overdue

    def find_overdue(self, now_s: float) -> bool:
        """Whether more turns have become overdue since the last call. Looks at the earliest only."""
        found = False
        while self._waiting:
            turn_id, arrived_s = next(iter(self._waiting.items()))
            if now_s - arrived_s <= self._wait_max_s:
                break
            del self._waiting[turn_id]
            self._overdue.add(turn_id)
            found = True
        return found
