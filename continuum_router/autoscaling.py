"""How many engine replicas there should be, and which one goes when there should be fewer.

In-flight requests, what Serve scales by, are the wrong measure for agents: one whose tool runs has none, and holds KV. So:

    by memory    the working set (KV of running turns, and of paused programs that is kept) over the share of a replica's KV that
                 it should fill
    by waiting   a replica for each so many turns that wait

The larger of the two, within bounds. Growing is at once. Shrinking goes through a drain, because a replica with live leases takes
its programs' KV with it:

    STEADY ──fewer wanted for long enough──► DRAINING(victim) ──it is empty, or its deadline──► one replica fewer ──► STEADY
                                                │
                                                └──more wanted again, or it is gone──► the order is withdrawn ──► STEADY

One at a time. The victim is the replica that Serve itself would stop: the newest (`deployment_scheduler._get_replicas_to_stop`; all
else, such as nodes, being equal). Serve cannot be told which; were it to choose another one, that one's programs would be placed
anew like those of a lost replica, and lose no more than KV.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import ceil
from typing import TYPE_CHECKING

from agent_program.ids import ReplicaId

if TYPE_CHECKING:
    from continuum_router.config import AutoscalingSettings


class ScaleReason(StrEnum):
    """Why there should be so many."""

    ENOUGH = "enough"
    MEMORY = "memory"
    WAITING = "waiting"
    #: Fewer would do, but not for long enough yet.
    SHRINK_PENDING = "shrink_pending"
    #: A replica is being left by its programs.
    DRAINING = "draining"
    #: The drained replica may go.
    DRAINED = "drained"
    #: Some replicas have not said how they are.
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaLoad:
    """What one replica says of itself."""

    replica_id: ReplicaId
    #: Blocks of running turns, and blocks retained for paused programs.
    working_blocks: float
    total_blocks: float
    waiting_turns: float
    running_turns: float
    live_leases: float
    is_draining: bool = False
    #: It drains, and neither turns nor its deadline keep it.
    is_drained: bool = False

    @property
    def is_empty(self) -> bool:
        """Nothing would be lost with it."""
        return self.waiting_turns == 0 and self.running_turns == 0 and self.live_leases == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingState:
    """What the policy remembers from one look to the next; plain values, for Serve keeps it."""

    #: Since when fewer replicas would do; None while they would not.
    surplus_since_s: float | None = None
    #: The replica that is being drained, and since when.
    victim: ReplicaId | None = None
    victim_since_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Scaling:
    """What to do."""

    replicas: int
    reason: ScaleReason
    state: ScalingState
    #: Order this replica to drain.
    drain: ReplicaId | None = None
    #: Withdraw that order.
    undrain: ReplicaId | None = None


def wanted_replicas(loads: Sequence[ReplicaLoad], settings: AutoscalingSettings) -> tuple[int, ScaleReason]:
    """How many replicas the programs need, and by which measure; within bounds."""
    replicas = len(loads)
    total = sum(load.total_blocks for load in loads)
    working = sum(load.working_blocks for load in loads)
    waiting = sum(load.waiting_turns for load in loads)
    by_memory = ceil(replicas * working / (total * settings.kv_fraction_target)) if total else replicas
    by_waiting = ceil(waiting / settings.waiting_turns_per_replica)
    wanted = max(by_memory, by_waiting)
    bounded = max(settings.replicas_min, min(wanted, settings.replicas_max))
    if bounded <= replicas:
        return bounded, ScaleReason.ENOUGH
    return bounded, ScaleReason.WAITING if by_waiting > by_memory else ScaleReason.MEMORY


def scale(
    loads: Sequence[ReplicaLoad],
    *,
    running: Sequence[ReplicaId],
    target: int,
    state: ScalingState,
    now_s: float,
    settings: AutoscalingSettings,
) -> Scaling:
    """One look.

    Args:
        loads: what replicas say; those that have not said anything are missing.
        running: the replicas that run, oldest first.
        target: how many there are to be by the last decision.
    """
    within = max(settings.replicas_min, min(target, settings.replicas_max))
    victim = state.victim
    if victim is not None and victim not in running:
        # It died, or Serve has stopped it: either way the drain is over.
        state, victim = ScalingState(), None
    if len(loads) < len(running) or not running:
        return Scaling(replicas=within, reason=ScaleReason.UNKNOWN, state=state)
    wanted, reason = wanted_replicas(loads, settings)
    if victim is not None and target < len(running):
        # It has been let go and Serve is about to stop it; what more is wanted by now comes as another replica.
        return Scaling(replicas=max(wanted, within), reason=ScaleReason.DRAINED, state=state)
    if wanted >= target:
        return Scaling(replicas=wanted, reason=reason, state=ScalingState(), undrain=victim)
    if victim is not None:
        return _drain_on(loads, victim, target=within, state=state, now_s=now_s, settings=settings)
    since_s = now_s if state.surplus_since_s is None else state.surplus_since_s
    if now_s - since_s < settings.shrink_after_s or target > len(running):
        pending = ScalingState(surplus_since_s=since_s)
        return Scaling(replicas=within, reason=ScaleReason.SHRINK_PENDING, state=pending)
    chosen = running[-1]
    draining = ScalingState(surplus_since_s=since_s, victim=chosen, victim_since_s=now_s)
    return Scaling(replicas=within, reason=ScaleReason.DRAINING, state=draining, drain=chosen)


def _drain_on(
    loads: Sequence[ReplicaLoad],
    victim: ReplicaId,
    *,
    target: int,
    state: ScalingState,
    now_s: float,
    settings: AutoscalingSettings,
) -> Scaling:
    load = next(load for load in loads if load.replica_id == victim)
    is_late = now_s - state.victim_since_s >= settings.drain_s
    if (load.is_draining and (load.is_drained or load.is_empty)) or is_late:
        fewer = max(settings.replicas_min, target - 1)
        # The state stays until Serve has stopped it, so that the order is not given to the next one meanwhile.
        return Scaling(replicas=fewer, reason=ScaleReason.DRAINED, state=state)
    return Scaling(replicas=target, reason=ScaleReason.DRAINING, state=state, drain=victim)
