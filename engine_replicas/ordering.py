"""Which waiting turn runs next, and which running turn is preempted first: one small class per ordering.

An ordering gives each turn a key; the queue is sorted by it, stably, and preemption takes from the other end. An ordering
without a key leaves the engine's own order alone.

No order of programs bounds a wait by itself: programs that came earlier may keep coming back for ever. So a turn that has
waited too long runs next, whatever its program.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class OrderedTurn:
    """What an ordering knows about a turn in the engine."""

    turn_id: str = ""
    #: It has waited for longer than any turn may.
    is_overdue: bool
    #: It ran, lost its blocks to another turn, and waits again.
    is_preempted: bool
    #: A lease holds the KV of its branch's previous turn.
    is_retained: bool
    #: When its program was first seen here; a turn without a program is a program of its own.
    program_arrival_s: float
    #: It is a program's first turn, and the lane for those has room.
    is_in_lane: bool = False
    #: Seconds for which the program's turns have run so far.
    attained_s: float = 0.0
    #: Seconds for which they are expected to run from now on, the same for all that declared nothing.
    remaining_s: float = 0.0


class Ordering(Protocol):
    """An order of turns."""

    #: Whether turns are reordered at all.
    reorders: bool
    #: Whether first turns have a lane, and turns that do not fit may be passed.
    has_lanes: bool

    def waiting_key(self, turn: OrderedTurn) -> tuple[float, ...]:
        """Smaller runs earlier."""
        ...

    def running_key(self, turn: OrderedTurn) -> tuple[float, ...]:
        """Smaller is preempted later."""
        ...


class Fcfs:
    """Stock vLLM: first come, first served, turn by turn."""

    reorders = False
    has_lanes = False

    def waiting_key(self, turn: OrderedTurn) -> tuple[float, ...]:
        return ()

    def running_key(self, turn: OrderedTurn) -> tuple[float, ...]:
        return ()


class ProgramFcfs:
    """The paper's order: preempted turns, then turns whose KV is retained, then by the arrival of the program."""

    reorders = True
    has_lanes = False

    def waiting_key(self, turn: OrderedTurn) -> tuple[float, ...]:
        return (not turn.is_overdue, not turn.is_preempted, not turn.is_retained, turn.program_arrival_s)

    def running_key(self, turn: OrderedTurn) -> tuple[float, ...]:
        return (turn.program_arrival_s,)


class Plas:
    """Autellix: the program whose turns have run for the least time so far goes first (program-level least attained service).

    Service is counted in levels, each twice as long as the one before, so that programs of about equal service keep their
    order of arrival and do not take turns preempting each other.
    """

    reorders = True
    has_lanes = False

    def waiting_key(self, turn: OrderedTurn) -> tuple[float, ...]:
        return (not turn.is_overdue, _service_level(turn.attained_s), turn.program_arrival_s)

    def running_key(self, turn: OrderedTurn) -> tuple[float, ...]:
        return (_service_level(turn.attained_s), turn.program_arrival_s)


class Adaptive:
    """Ours: first turns while their lane has room, then resident turns, then the least remaining work, then arrival.

    - The lane keeps a new program from waiting minutes for its first token, at the price of a small share of the memory.
    - A turn whose KV is here costs next to nothing to start, and holds memory until it has run.
    - Remaining work is known where it is declared; programs that declare nothing all count as typical, so among them the order
      is the paper's, by arrival.
    """

    reorders = True
    has_lanes = True

    def waiting_key(self, turn: OrderedTurn) -> tuple[float, ...]:
        is_resident = turn.is_preempted or turn.is_retained
        return (not turn.is_overdue, not turn.is_in_lane, not is_resident, turn.remaining_s, turn.program_arrival_s)

    def running_key(self, turn: OrderedTurn) -> tuple[float, ...]:
        return (turn.remaining_s, turn.program_arrival_s)


def _service_level(attained_s: float) -> int:
    return int(math.log2(1.0 + max(0.0, attained_s)))


class FirstTurnLane:
    """Whether a first turn may go before all others.

    The lane is bounded twice: first turns that run in it hold no more than a share of the memory, and their prefills take no
    more than a share of the engine's time, counted as a bucket that fills with time and that each of them empties. So a flood
    of new programs delays the others by no more than that share.
    """

    #: Seconds of lane time that may be saved up while no program comes.
    _SAVED_S_MAX = 1.0

    def __init__(self, *, tokens_max: float, time_share: float) -> None:
        self._tokens_max = tokens_max
        self._time_share = time_share
        self._running: dict[str, int] = {}
        self._tokens = 0
        self._saved_s = self._SAVED_S_MAX
        self._saved_at_s = 0.0

    @property
    def tokens(self) -> int:
        """Tokens of the first turns that run in the lane."""
        return self._tokens

    def is_open(self, now_s: float) -> bool:
        """Whether the next first turn may go before all others."""
        return self._tokens < self._tokens_max and self._saved(now_s) > 0.0

    def scheduled(self, turn_id: str, *, tokens: int, prefill_s: float, now_s: float) -> None:
        """A first turn runs in the lane; its prefill takes about `prefill_s`."""
        self.left(turn_id)
        self._running[turn_id] = tokens
        self._tokens += tokens
        self._saved_s, self._saved_at_s = self._saved(now_s) - prefill_s, now_s

    def left(self, turn_id: str) -> None:
        """It does not run any more."""
        self._tokens -= self._running.pop(turn_id, 0)

    def _saved(self, now_s: float) -> float:
        return min(self._SAVED_S_MAX, self._saved_s + self._time_share * (now_s - self._saved_at_s))


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

    @property
    def overdue(self) -> int:
        """Turns that have waited too long, and go first."""
        return len(self._overdue)

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

    def longest_wait_s(self, now_s: float) -> float:
        """No waiting turn has waited for longer; infinite while one is overdue."""
        if self._overdue:
            return math.inf
        return now_s - next(iter(self._waiting.values())) if self._waiting else 0.0

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
