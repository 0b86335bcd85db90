"""How a turn stands beside the others in the engine: what an order of turns and an admission may look at."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from engine_replicas.admission import idle_weight
from engine_replicas.declared_work import DeclaredWork
from engine_replicas.retention.lease import Lease
from engine_replicas.retention.ledger import Ledger
from engine_replicas.retention.programs import LiveTurn, Program
from engine_replicas.retention.reclaim import hazard_per_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """What an order of turns may look at, of one turn in the engine."""

    program_arrival_s: float
    #: The program has not finished a turn yet.
    is_first_turn: bool
    #: The program has started for good.
    is_admitted: bool
    #: It waits, and a lease holds its branch's KV for it.
    is_retained: bool
    #: Seconds for which the program's turns have run.
    attained_s: float
    #: Seconds for which they are expected to run from now on.
    remaining_s: float


def standing_of(turn: LiveTurn, ledger: Ledger, work: DeclaredWork) -> Standing:
    """The turn's standing now."""
    program = turn.program
    return Standing(
        program_arrival_s=program.arrived_s,
        is_first_turn=not program.turns_finished,
        is_admitted=program.is_admitted,
        is_retained=is_retained(turn, ledger),
        attained_s=program.attained_s,
        remaining_s=remaining_s(program, work),
    )


def remaining_s(program: Program, work: DeclaredWork) -> float:
    """Seconds for which the program's turns are expected to run from now on."""
    return work.remaining_s(
        program.tenant_id,
        declared_turns=program.declared_turns,
        turns_done=program.turns_finished,
        attained_s=program.attained_s,
    )


def is_retained(turn: LiveTurn, ledger: Ledger) -> bool:
    """Whether the turn waits, and a lease holds its branch's KV for it."""
    if turn.is_scheduled:
        return False
    lease = ledger.get(turn.key)
    return lease is not None and lease.lease_id == turn.lease_id


def idle_tokens(leases: Iterable[Lease], now_s: float) -> float:
    """Context tokens of paused programs, each weighted with how likely it is to be back soon."""
    return sum(lease.tokens * idle_weight(hazard_per_s(lease, now_s)) for lease in leases)
