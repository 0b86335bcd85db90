"""Where a program's turn goes: filter, score, pick.

    bound, and its replica lives            that replica                              BOUND
    bound, its KV gone, a shorter way there that one (`migration.py`)                 MIGRATED
    bound, and its replica drains           another, if another takes programs        DRAINING
    bound, and its replica keeps failing    another, if another takes programs        SUSPECT
    bound, and this very turn failed there  another                                   TURN_FAILED
    bound, and its replica is gone          as a new program                          REPLICA_LOST
    new                                     a relative's replica, or one that has the beginning of its prompt, or the least
                                            loaded one (`preference.py`)              PARENT, PREVIOUS, SHARED_PREFIX, NEW
    no identity                             the least loaded one; nothing is remembered   UNBOUND

*Filter.* Replicas fall into four tiers: open, full (it works on as many turns as Serve lets it), suspect (its circuit is open,
`resilience.py`), draining. The best tier that has a replica is used, so that a program is placed as long as any replica lives.

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
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING

from agent_program.ids import ReplicaId
from continuum_router.replica_view import ReplicaView
from continuum_router.resilience import Circuit, CircuitBreaker

if TYPE_CHECKING:  # settings are pydantic's; a decision needs the standard library only
    from continuum_router.config import LoadWeights, RetrySettings

_LOAD_STEPS_PER_TURN = 64
_REMEMBERED_LOST_MAX = 4096


class Reason(StrEnum):
    """Why a turn goes where it goes."""

    #: Its program is bound to this replica, which lives.
    BOUND = "bound"
    #: Its program had no binding; this is the least loaded replica.
    NEW = "new"
    #: Its program had no binding; the program that started it is here, and there is room.
    PARENT = "parent"
    #: Its program had no binding; the program that it goes on with was here, and there is room.
    PREVIOUS = "previous"
    #: Its program had no binding; the beginning of its prompt is here.
    SHARED_PREFIX = "shared_prefix"
    #: Its KV is kept nowhere, and here is the shorter way even with its context to compute again.
    MIGRATED = "migrated"
    #: The replica that its program was bound to is gone.
    REPLICA_LOST = "replica_lost"
    #: The replica that its program was bound to is draining, and another takes programs.
    DRAINING = "draining"
    #: The replica that its program was bound to keeps failing, and another takes programs.
    SUSPECT = "suspect"
    #: The same turn failed on the replica that its program was bound to, which may yet live.
    TURN_FAILED = "turn_failed"
    #: It belongs to no program, or may not bind one: nothing is remembered.
    UNBOUND = "unbound"


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """The replica for one turn, and why."""

    replica_id: ReplicaId
    reason: Reason
    #: What was weighed, by name, where more than one thing was; for people, not for decisions.
    detail: Mapping[str, float | str] | None = field(default=None, compare=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """How a live replica stands now, as best known."""

    replica_id: ReplicaId
    #: It takes programs and has turns to spare.
    is_open: bool
    load_turns: float
    #: The share of its KV that is taken, a retained block counted as the weights say; 0 where it reports no KV.
    kv_pressure: float
    #: Turns that this router sent since the replica's last report.
    sent_since: int


class _Tier(IntEnum):
    OPEN = 0
    FULL = 1
    SUSPECT = 2
    DRAINING = 3


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
    #: How many of them the view knows.
    in_flight_reported: int = 0
    #: None until a turn was lost there.
    breaker: CircuitBreaker | None = None
    #: Its circuit was open when it was last ranked.
    is_suspect: bool = False
    rank: _Rank = (_Tier.OPEN, 0)
    #: Where it stands in its bucket.
    position: int = -1

    @property
    def turns(self) -> int:
        return self.others + self.in_flight

    def report(self, view: ReplicaView, now_s: float) -> None:
        self.view, self.reported_s = view, now_s
        self.others = max(0, view.waiting + view.running - self.in_flight)
        self.in_flight_reported = self.in_flight


def load_turns(view: ReplicaView, *, turns: int, programs: int, weights: LoadWeights) -> float:
    """The load of a replica in turns, given its turns and bound programs as best known."""
    kv_turns = weights.kv_full_turns * view.kv.pressure(weights.kv_retained_fraction) if view.kv else 0.0
    return turns + view.queued_tokens / weights.queued_tokens_per_turn + kv_turns + weights.program_turns * programs


class Fleet:
    """The live replicas, ordered by load.

    Not thread-safe; one router owns it. Bounded by the number of live replicas, plus a fixed number of lost ones that are
    remembered to tell "gone" from "not heard of yet".
    """

    def __init__(
        self,
        *,
        weights: LoadWeights,
        seed: int,
        quarantine_s: float,
        report_period_s: float,
        retries: RetrySettings | None = None,
    ) -> None:
        """Without `retries` no replica is ever suspect."""
        self._weights = weights
        self._retries = retries
        #: As of the last event that carried the time; circuits half-open by it.
        self._now_s = 0.0
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
        self._now_s = now_s
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
            elif slot.breaker is not None:
                self._rerank(slot)  # time alone half-opens a circuit
        return added

    def correct(self, view: ReplicaView, *, now_s: float) -> None:
        """A replica said in a reply how it stands. Nothing happens for a replica that is gone: a reply does not bring it back."""
        self._now_s = now_s
        if slot := self._slots.get(view.replica_id):
            slot.report(view, now_s)
            self._rerank(slot)

    def turn_failed(self, replica_id: ReplicaId, *, now_s: float) -> None:
        """A turn was lost there, or not answered by its deadline."""
        self._now_s = now_s
        if self._retries is not None and (slot := self._slots.get(replica_id)):
            slot.breaker = slot.breaker or CircuitBreaker(self._retries)
            slot.breaker.failed(now_s)
            self._rerank(slot)

    def turn_answered(self, replica_id: ReplicaId, *, now_s: float) -> None:
        """A turn came back from there."""
        self._now_s = now_s
        if (slot := self._slots.get(replica_id)) and slot.breaker is not None:
            slot.breaker.answered(now_s)
            if slot.breaker.state(now_s) is Circuit.CLOSED:
                slot.breaker = None
            self._rerank(slot)

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
        """A program bound to this replica stays: it lives, and neither drains nor is suspect while a better one is there."""
        slot = self._slots.get(replica_id)
        return slot is not None and (slot.rank[0] <= _Tier.FULL or self._best()[0] >= slot.rank[0])

    def is_draining(self, replica_id: ReplicaId) -> bool:
        """It lives and takes no programs."""
        slot = self._slots.get(replica_id)
        return slot is not None and slot.view.is_draining

    def view(self, replica_id: ReplicaId) -> ReplicaView | None:
        """The replica's last report; None where it is gone."""
        slot = self._slots.get(replica_id)
        return slot.view if slot is not None else None

    def standing(self, replica_id: ReplicaId) -> Standing | None:
        """How the replica stands; None where it is gone."""
        slot = self._slots.get(replica_id)
        if slot is None:
            return None
        kv = slot.view.kv
        return Standing(
            replica_id=replica_id,
            is_open=slot.rank[0] is _Tier.OPEN,
            load_turns=slot.rank[1] / _LOAD_STEPS_PER_TURN,
            kv_pressure=kv.pressure(self._weights.kv_retained_fraction) if kv else 0.0,
            sent_since=max(0, slot.in_flight - slot.in_flight_reported),
        )

    def choose(self, key: str, *, avoid: Collection[ReplicaId] = ()) -> ReplicaId | None:
        """The replica for a new program; `key` breaks ties. None when no replica lives. One of `avoid` only where all live
        replicas are among them."""
        if not self._slots:
            return None
        equals = self._buckets[self._best()]
        if avoid and any(slot.view.replica_id in avoid for slot in equals):
            others = [slot for slot in self._slots.values() if slot.view.replica_id not in avoid]
            if others:
                best = min(slot.rank for slot in others)
                equals = [slot for slot in others if slot.rank == best]
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
        elif slot.is_suspect:
            tier = _Tier.SUSPECT
        else:
            tier = _Tier.FULL if turns >= slot.view.turns_max else _Tier.OPEN
        load = load_turns(slot.view, turns=turns, programs=slot.programs, weights=self._weights)
        return tier, round(load * _LOAD_STEPS_PER_TURN)

    def _rerank(self, slot: _Slot) -> None:
        slot.is_suspect = slot.breaker is not None and slot.breaker.state(self._now_s) is Circuit.OPEN
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
            self._bound_heap()

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
