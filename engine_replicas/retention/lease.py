"""What a lease is, and every way it can end.

A lease is a promise that some KV blocks of a paused program stay where they are until a deadline. It starts when a turn
ends and ends exactly once:

    turn ends ─► provisional ──armed──► armed
                     │                    │
                     └──────────┬─────────┘
              reused │ expired │ reclaimed │ released

A lease never outlives the cache it points into, and never keeps anybody from running (see `ledger.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from agent_program.ids import ProgramId, TenantId, ToolKey


class BranchKey(NamedTuple):
    """One line of context of a program; a program has one lease per branch. A tuple, for it is looked up in every step."""

    program_id: ProgramId
    branch: str


class LeaseState(StrEnum):
    """How sure the lease is of its deadline."""

    #: The turn has ended, the tool is not known yet; a short deadline.
    PROVISIONAL = "provisional"
    #: The retention policy has set the deadline.
    ARMED = "armed"


class LeaseOutcome(StrEnum):
    """The four ways a lease ends."""

    #: The program's next turn was scheduled on it.
    REUSED = "reused"
    #: Its deadline passed.
    EXPIRED = "expired"
    #: Others needed the memory.
    RECLAIMED = "reclaimed"
    #: Nothing is left to wait for, or the cache itself went away.
    RELEASED = "released"


class LeaseEndReason(StrEnum):
    """Why a lease ended; each belongs to one outcome."""

    NEXT_TURN_SCHEDULED = "next_turn_scheduled"
    DEADLINE_PASSED = "deadline_passed"
    #: The deadline passed before anybody said which tool runs.
    NEVER_ARMED = "never_armed"
    #: The next turn waited in the queue for longer than a lease may be held for it.
    QUEUED_TOO_LONG = "queued_too_long"
    #: A running turn needed blocks, and would have been preempted.
    RUNNING_TURN_NEEDS_BLOCKS = "running_turn_needs_blocks"
    #: Nothing ran, and the turn at the head of the queue did not fit.
    NOTHING_RUNS = "nothing_runs"
    #: A waiting turn brings more than what it was worth.
    OUTBID = "outbid"
    #: A cap left no room for a newer lease that is worth more.
    OVER_CAP = "over_cap"
    LAST_TURN = "last_turn"
    #: The policy finds that retaining costs more than it brings.
    NOT_WORTH_IT = "not_worth_it"
    PROGRAM_OVER = "program_over"
    #: A newer turn of the same branch ended.
    SUPERSEDED = "superseded"
    CACHE_RESET = "cache_reset"
    PAUSED = "paused"

    @property
    def outcome(self) -> LeaseOutcome:
        return _OUTCOMES[self]


_R = LeaseEndReason
_OUTCOMES = {
    _R.NEXT_TURN_SCHEDULED: LeaseOutcome.REUSED,
    _R.DEADLINE_PASSED: LeaseOutcome.EXPIRED,
    _R.NEVER_ARMED: LeaseOutcome.EXPIRED,
    _R.QUEUED_TOO_LONG: LeaseOutcome.EXPIRED,
    _R.RUNNING_TURN_NEEDS_BLOCKS: LeaseOutcome.RECLAIMED,
    _R.NOTHING_RUNS: LeaseOutcome.RECLAIMED,
    _R.OUTBID: LeaseOutcome.RECLAIMED,
    _R.OVER_CAP: LeaseOutcome.RECLAIMED,
    _R.LAST_TURN: LeaseOutcome.RELEASED,
    _R.NOT_WORTH_IT: LeaseOutcome.RELEASED,
    _R.PROGRAM_OVER: LeaseOutcome.RELEASED,
    _R.SUPERSEDED: LeaseOutcome.RELEASED,
    _R.CACHE_RESET: LeaseOutcome.RELEASED,
    _R.PAUSED: LeaseOutcome.RELEASED,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """Retained KV of one branch."""

    #: Unique within a ledger; a branch's next lease has another.
    lease_id: int
    key: BranchKey
    tenant_id: TenantId
    #: When the program was first seen: the latest arrival gives up its KV first.
    program_arrival_s: float
    #: Opaque names of the blocks held, each at most once.
    blocks: frozenset[int]
    #: Context tokens that a replay of the turn would find in those blocks.
    tokens: int
    #: When the turn ended.
    started_s: float
    #: Since when the program is expected back: the turn's end, or the end of its tool, where that is known exactly.
    away_since_s: float
    #: Seconds granted from the end of the turn.
    ttl_s: float
    #: When the lease may be collected, unless its next turn waits in the queue.
    deadline_s: float
    state: LeaseState
    #: The tool that the program waits for; None while unknown.
    tool: ToolKey | None = None
    #: Turns of the branch that arrived after the lease began and wait in the queue.
    queued_turns: int = 0
    #: When the first of them arrived; None where none waits.
    queued_since_s: float | None = None
    #: Tokens that the other turns held which ran when this one ended.
    other_tokens: int = 0
    #: How sure the policy was of a return by its deadline; None where it does not say.
    return_probability: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseEnd:
    """A lease that is over: its blocks are to be given back now."""

    lease: Lease
    reason: LeaseEndReason
