"""A replica that is to leave: no new programs, the old ones move when their next turn comes, and then it may go.

    SERVING ──order──► DRAINING ──nothing left, or the deadline──► DRAINED
       ▲                  │
       └──order withdrawn─┘

A program moves at a tool-call boundary because the router binds it anew only when its next turn arrives; a turn that runs is never
interrupted by draining. So what keeps a replica are its running turns. Leases do not: their programs' next turns go elsewhere, and
what they keep is worth nothing from the moment of the order on.

An order names one incarnation of a replica, so that it can never reach a successor.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from agent_program.ids import ReplicaId


class Departure(StrEnum):
    """What a drained replica does."""

    #: It reports unhealthy, and is replaced: an upgrade, or a node that is to be emptied.
    LEAVE = "leave"
    #: It waits to be stopped: there will be one replica fewer.
    WAIT = "wait"


class DrainState(StrEnum):
    """Where a replica is on its way out."""

    SERVING = "serving"
    DRAINING = "draining"
    DRAINED = "drained"


class DrainReason(StrEnum):
    """Why a replica counts as drained."""

    EMPTY = "empty"
    DEADLINE = "deadline"


@dataclass(frozen=True, kw_only=True, slots=True)
class DrainOrder:
    """That one replica is to leave."""

    replica_id: ReplicaId
    #: Unix seconds at which it counts as drained whatever it still does.
    deadline_wall_s: float
    departure: Departure


@dataclass(frozen=True, kw_only=True, slots=True)
class DrainStatus:
    """How far a replica is."""

    state: DrainState
    reason: DrainReason | None = None
    order: DrainOrder | None = None

    @property
    def takes_programs(self) -> bool:
        return self.state is DrainState.SERVING

    @property
    def must_leave(self) -> bool:
        """It is drained, and nobody else will stop it."""
        return self.state is DrainState.DRAINED and self.order is not None and self.order.departure is Departure.LEAVE


SERVING = DrainStatus(state=DrainState.SERVING)


def drain_status(
    order: DrainOrder | None, *, turns_open: int, quiet_s: float, now_wall_s: float, settle_s: float
) -> DrainStatus:
    """How far the replica is.

    Args:
        order: the order that stands for it, if any.
        turns_open: turns (or tool calls) that it works on.
        quiet_s: seconds since the last of them ended or came.
        settle_s: after so long without a turn every router has heard that it drains, and none is still on its way.
    """
    if order is None:
        return SERVING
    if now_wall_s >= order.deadline_wall_s:
        return DrainStatus(state=DrainState.DRAINED, reason=DrainReason.DEADLINE, order=order)
    if turns_open == 0 and quiet_s >= settle_s:
        return DrainStatus(state=DrainState.DRAINED, reason=DrainReason.EMPTY, order=order)
    return DrainStatus(state=DrainState.DRAINING, order=order)
