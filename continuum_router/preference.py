"""The replica for a program that has none: the least loaded one, or one that has something of it already.

Candidates are few: the least loaded replica, the one where a relative is, and those that have the beginning of its prompt. So a
decision costs the same however many replicas there are.

    a relative's replica that has room      PARENT, else PREVIOUS
    otherwise the least (load − credit)     SHARED_PREFIX where the beginning is there, NEW where it is not

*Room*: the replica takes programs, its KV in use and half of that retained leave a share free, and it is no more than
`family_turns_max` turns busier than the least loaded one. So a crowd of sub-programs fills its parent's replica only so far.

*Credit*: the tokens of the beginning, in the unit of load (`queued_tokens_per_turn`): what need not be computed weighs as much as
the same tokens waiting. The credit is bounded by `prefix_turns_max`, so that one hot system prompt never draws everybody to
one replica: a replica is at most that much busier than the others because of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agent_program.ids import ReplicaId
from continuum_router.placement import Fleet, Placement, Reason, Standing

if TYPE_CHECKING:
    from continuum_router.config import LoadWeights


@dataclass(frozen=True, kw_only=True, slots=True)
class Ties:
    """Where something of the program is already."""

    #: The replica of the program that started it.
    parent: ReplicaId | None = None
    #: The replica of the program that it goes on with.
    previous: ReplicaId | None = None
    #: Replicas that have the beginning of its prompt.
    prefix: tuple[ReplicaId, ...] = ()
    #: About how many tokens that beginning has.
    prefix_tokens: int = 0


NO_TIES = Ties()


def choose(
    fleet: Fleet, key: str, *, ties: Ties, weights: LoadWeights, avoid: Collection[ReplicaId] = ()
) -> Placement | None:
    """The replica for a program without one, with what was weighed. None where no replica lives.

    Args:
        key: breaks ties between equals.
        avoid: replicas where this very turn has failed; used only where there is no other.
    """
    least = fleet.choose(key, avoid=avoid)
    if least is None:
        return None
    base = fleet.standing(least)
    assert base is not None
    for reason, replica_id in ((Reason.PARENT, ties.parent), (Reason.PREVIOUS, ties.previous)):
        if replica_id is None or replica_id in avoid:
            continue
        standing = fleet.standing(replica_id)
        if standing is not None and has_room(standing, base, weights):
            return Placement(replica_id=replica_id, reason=reason, detail=_loads(standing, base))
    credit = min(ties.prefix_tokens / weights.queued_tokens_per_turn, weights.prefix_turns_max)
    best = min(
        _standings(fleet, ties.prefix, avoid),
        key=lambda standing: (standing.load_turns, standing.replica_id),
        default=None,
    )
    if least in ties.prefix or best is None or best.load_turns - credit >= base.load_turns:
        is_shared = least in ties.prefix
        return Placement(replica_id=least, reason=Reason.SHARED_PREFIX if is_shared else Reason.NEW)
    detail = {**_loads(best, base), "prefix_credit_turns": credit}
    return Placement(replica_id=best.replica_id, reason=Reason.SHARED_PREFIX, detail=detail)


def has_room(standing: Standing, least: Standing, weights: LoadWeights) -> bool:
    """A relative may be put there although it is not the least loaded replica."""
    is_busier_turns = standing.load_turns - least.load_turns
    return (
        standing.is_open
        and standing.kv_pressure <= weights.family_kv_fraction_max
        and is_busier_turns <= weights.family_turns_max
    )


def _standings(fleet: Fleet, replicas: Iterable[ReplicaId], avoid: Collection[ReplicaId]) -> list[Standing]:
    found = (fleet.standing(replica_id) for replica_id in replicas if replica_id not in avoid)
    return [standing for standing in found if standing is not None and standing.is_open]


def _loads(chosen: Standing, least: Standing) -> dict[str, float | str]:
    return {
        "load_turns": chosen.load_turns,
        "least_loaded": least.replica_id,
        "least_load_turns": least.load_turns,
        "kv_pressure": chosen.kv_pressure,
    }
