"""Where a program's turn goes: filter, score, pick.

    bound, and its replica lives            that replica                              BOUND
    bound, and its replica drains           another, if another takes programs        DRAINING
    bound, and its replica is gone          as a new program                          REPLICA_LOST
    new                                     the least loaded replica that takes it    NEW
    no identity                             the same, and nothing is remembered       UNBOUND

*Filter.* Replicas fall into three tiers: open, full (it works on as many turns as Serve lets it), draining. The best tier
that has a replica is used, so that a program is placed as long as any replica lives.

*Score.* Load, in turns (see `LoadWeights`). Of a replica's turns the router knows its own exactly, and those of other routers from
the last report: what was reported, less its own turns in flight when the report came. So what it sent since counts at once, what
ended counts no longer, and what a report missed because it was under way is at most a period late. Bound programs count for
themselves: a program whose tool runs has no turn anywhere and will come back.

*Pick.* Loads are rounded to 1/64 turn; among equals a seeded hash of the program decides, so that many routers that see the
same views do not all favour the same replica, and the same history gives the same placements.

Replicas of equal (tier, load) share a bucket and a heap orders the buckets, so that a decision does not look at every replica:
it costs the same at 10 replicas and at 1,000, and a changed view costs one re-scoring.
"""

from __future__ import annotations

import heapq
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING

from agent_program.ids import ReplicaId
from continuum_router.replica_view import ReplicaView

if TYPE_CHECKING:  # settings are pydantic's; a decision needs the standard library only
    from continuum_router.config import LoadWeights

_LOAD_STEPS_PER_TURN = 64
_REMEMBERED_LOST_MAX = 4096


class Reason(StrEnum):
    """Why a turn goes where it goes."""

    #: Its program is bound to this replica, which lives.
    BOUND = "bound"
    #: Its program had no binding; this is the least loaded replica.
    NEW = "new"
    #: The replica that its program was bound to is gone.
    REPLICA_LOST = "replica_lost"
    #: The replica that its program was bound to is draining, and another takes programs.
    DRAINING = "draining"
    #: It belongs to no program, or may not bind one: nothing is remembered.
    UNBOUND = "unbound"


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """The replica for one turn, and why."""

    replica_id: ReplicaId
    reason: Reason


class _Tier(IntEnum):
    OPEN = 0
    FULL = 1
    DRAINING = 2


_Rank = tuple[_Tier, int]


@dataclass(slots=True, eq=False)
class _Slot:
    """A live replica: its view and what this router did there."""

    view: ReplicaView
    #: When the view came.
    reported_s: float
    #: Turns of other routers, as of the view.
    others: int
    #: Programs that this router knows to be bound to it.
    programs: int = 0
    #: Turns that this router sent and that have not ended.
    in_flight: int = 0
    rank: _Rank = (_Tier.OPEN, 0)
    #: Where it stands in its bucket.
    position: int = -1

    @property
    def turns(self) -> int:
        return self.others + self.in_flight

    def report(self, view: ReplicaView, now_s: float) -> None:
        self.view, self.reported_s = view, now_s
        self.others = max(0, view.waiting + view.running - self.in_flight)


def load_turns(view: ReplicaView, *, turns: int, programs: int, weights: LoadWeights) -> float:
    """The load of a replica in turns, given its turns and bound programs as best known."""
    kv_turns = weights.kv_full_turns * view.kv.pressure(weights.kv_retained_fraction) if view.kv else 0.0
    return turns + view.queued_tokens / weights.queued_tokens_per_turn + kv_turns + weights.program_turns * programs


class Fleet:
    """The live replicas, ordered by load.

    Not thread-safe; one router owns it. Bounded by the number of live replicas, plus a fixed number of lost ones that are
    remembered to tell "gone" from "not heard of yet".
    """

    def __init__(self, *, weights: LoadWeights, seed: int, quarantine_s: float, report_period_s: float) -> None:
        self._weights = weights
        self._seed = seed
        self._quarantine_s = quarantine_s
        self._report_period_s = report_period_s
        self._slots: dict[ReplicaId, _Slot] = {}
        self._buckets: dict[_Rank, list[_Slot]] = {}
        self._heap: list[_Rank] = []
        #: Lost replicas, oldest first → until when a broadcast that lists them is not believed.
        self._lost_until_s: dict[ReplicaId, float] = {}

    # What happens

    def replace(self, views: Iterable[ReplicaView], *, now_s: float) -> list[ReplicaId]:
        """These are the live replicas now; returns those that are new. Missing ones are lost, quarantined ones stay out."""
        current = {view.replica_id: view for view in views if not self._is_quarantined(view.replica_id, now_s)}
        for replica_id in [known for known in self._slots if known not in current]:
            self._remove(replica_id)
            self._remember_lost(replica_id, until_s=now_s)
        added = [replica_id for replica_id in current if replica_id not in self._slots]
        for replica_id, view in current.items():
            slot = self._slots.get(replica_id)
            if slot is None:
                self._lost_until_s.pop(replica_id, None)
                self._slots[replica_id] = slot = _Slot(view=view, reported_s=now_s, others=view.waiting + view.running)
                self._enter(slot)
            elif view != slot.view or now_s - slot.reported_s >= self._report_period_s:
                slot.report(view, now_s)  # an equal view after a period is a new report that says the same
                self._rerank(slot)
        return added

    def lose(self, replica_id: ReplicaId, *, now_s: float) -> None:
        """The replica was seen dying: it is out now, and for the quarantine. Losing it twice changes nothing."""
        if replica_id in self._slots:
            self._remove(replica_id)
        self._remember_lost(replica_id, until_s=now_s + self._quarantine_s)

    def presume_lost(self, replica_id: ReplicaId, *, now_s: float) -> None:
        """Others speak of a replica that is not here; from now on it counts as lost, until it is listed."""
        if replica_id not in self._slots:
            self._remember_lost(replica_id, until_s=now_s)

    def turn_sent(self, replica_id: ReplicaId) -> None:
        """A turn was sent to the replica. Nothing happens for a replica that is gone."""
        if slot := self._slots.get(replica_id):
            slot.in_flight += 1
            self._rerank(slot)

    def turn_ended(self, replica_id: ReplicaId) -> None:
        """A turn that was sent has ended, well or not. Nothing happens for a replica that is gone."""
        if slot := self._slots.get(replica_id):
            slot.in_flight = max(0, slot.in_flight - 1)
            self._rerank(slot)

    def set_programs(self, replica_id: ReplicaId, programs: int) -> None:
        """So many programs are bound to the replica, as far as this router knows."""
        if slot := self._slots.get(replica_id):
            slot.programs = programs
            self._rerank(slot)

    # What is asked

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, replica_id: ReplicaId) -> bool:
        return replica_id in self._slots

    def is_lost(self, replica_id: ReplicaId) -> bool:
        """The replica was here and is gone (as against one that this router has not heard of)."""
        return replica_id not in self._slots and replica_id in self._lost_until_s

    def keeps(self, replica_id: ReplicaId) -> bool:
        """A program bound to this replica stays: it lives, and does not drain while another replica takes programs."""
        slot = self._slots.get(replica_id)
        return slot is not None and (not slot.view.is_draining or self._best()[0] is _Tier.DRAINING)

    def choose(self, key: str) -> ReplicaId | None:
        """The replica for a new program; `key` breaks ties. None when no replica lives."""
        if not self._slots:
            return None
        equals = self._buckets[self._best()]
        if len(equals) == 1:
            return equals[0].view.replica_id
        return equals[zlib.crc32(key.encode(), self._seed) % len(equals)].view.replica_id

    def check_integrity(self) -> None:
        """Assert what must always hold: every replica stands in the bucket of its rank, and the heap knows every bucket and is
        bounded by the number of buckets. For tests and simulations; looks at every replica."""
        for slot in self._slots.values():
            assert slot.rank == self._rank_of(slot)
            assert self._buckets[slot.rank][slot.position] is slot
        assert sum(map(len, self._buckets.values())) == len(self._slots)
        assert set(self._buckets) <= set(self._heap)
        assert len(self._heap) <= 4 * len(self._buckets) + 64

    # Order

    def _best(self) -> _Rank:
        while self._heap[0] not in self._buckets:
            heapq.heappop(self._heap)
        return self._heap[0]

    def _rank_of(self, slot: _Slot) -> _Rank:
        turns = slot.turns
        if slot.view.is_draining:
            tier = _Tier.DRAINING
        else:
            tier = _Tier.FULL if turns >= slot.view.turns_max else _Tier.OPEN
        load = load_turns(slot.view, turns=turns, programs=slot.programs, weights=self._weights)
        return tier, round(load * _LOAD_STEPS_PER_TURN)

    def _rerank(self, slot: _Slot) -> None:
        rank = self._rank_of(slot)
        if rank != slot.rank:
            self._leave(slot)
            self._enter(slot, rank)

    def _enter(self, slot: _Slot, rank: _Rank | None = None) -> None:
        slot.rank = rank or self._rank_of(slot)
        bucket = self._buckets.get(slot.rank)
        if bucket is None:
            self._buckets[slot.rank] = bucket = []
            heapq.heappush(self._heap, slot.rank)
            self._bound_heap()
        slot.position = len(bucket)
        bucket.append(slot)

    def _leave(self, slot: _Slot) -> None:
        bucket = self._buckets[slot.rank]
        last = bucket.pop()
        if last is not slot:
            bucket[slot.position] = last
            last.position = slot.position
        if not bucket:
            del self._buckets[slot.rank]

    def _bound_heap(self) -> None:
        # A bucket that empties leaves its rank in the heap until it comes to the top; ranks far down would pile up.
        if len(self._heap) > 4 * len(self._buckets) + 64:
            self._heap = list(self._buckets)
            heapq.heapify(self._heap)

    def _remove(self, replica_id: ReplicaId) -> None:
        self._leave(self._slots.pop(replica_id))

    # Loss

    def _is_quarantined(self, replica_id: ReplicaId, now_s: float) -> bool:
        return now_s < self._lost_until_s.get(replica_id, now_s)

    def _remember_lost(self, replica_id: ReplicaId, *, until_s: float) -> None:
        until_s = max(until_s, self._lost_until_s.pop(replica_id, until_s))
        self._lost_until_s[replica_id] = until_s
        while len(self._lost_until_s) > _REMEMBERED_LOST_MAX:
            del self._lost_until_s[next(iter(self._lost_until_s))]
