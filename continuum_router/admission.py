"""Who may start a turn now, who waits, and who is told when to come again: the edge's bounded, fair queue.

    a later turn of a program that was admitted   starts, always: its KV is held, and refusing it would waste that
    a first turn, room, nobody waits              starts
    a first turn, no room                         waits in its tenant's queue, which is bounded
    its tenant's queue is full                    refused, with the seconds after which a place is likely

*Room* is a number of turns that this edge has under way. *Fairness* is start-time fair queueing (Goyal et al. 1996) over tenants:
each tenant has a virtual time that a start moves by 1/weight, and the waiting tenant with the least goes next; one that was away
resumes at the others' time, so that absence saves up nothing. Whatever one tenant floods, another waits for at most one start
of each other tenant (in proportion to the weights) per start of its own.

*When to come again*: the tenant's queue moves at its share of the rate at which turns end here, measured; a place in it is free after
one start. Told as whole seconds, within bounds, because clients obey it to the letter.

Programs that were admitted are remembered in a bounded table, least recently used first to be forgotten.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from enum import StrEnum
from math import ceil
from typing import TYPE_CHECKING

from agent_program.ids import ProgramId, TenantId
from continuum_router.service_rate import ServiceRate

if TYPE_CHECKING:
    from continuum_router.config import AdmissionSettings

Ticket = int


class Ruling(StrEnum):
    """What the edge does with a turn."""

    START = "start"
    WAIT = "wait"
    REFUSE = "refuse"


class RulingReason(StrEnum):
    """Why."""

    #: A later turn of a program that was admitted.
    ADMITTED_BEFORE = "admitted_before"
    ROOM = "room"
    NO_ROOM = "no_room"
    TENANT_QUEUE_FULL = "tenant_queue_full"
    QUEUES_FULL = "queues_full"


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """A ruling on one turn."""

    ruling: Ruling
    reason: RulingReason
    #: For `started`, `left` and `ended`.
    ticket: Ticket
    #: Whole seconds after which it may be tried again, where it is refused.
    retry_after_s: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Waiting:
    ticket: Ticket
    program_id: ProgramId | None


class EdgeAdmission:
    """The queue of one ingress. Not thread-safe."""

    def __init__(self, settings: AdmissionSettings) -> None:
        self._settings = settings
        self._rate = ServiceRate()
        self._tickets = 0
        #: Tickets that run → whether they took room.
        self._running: dict[Ticket, bool] = {}
        self._in_room = 0
        #: Tenants with somebody waiting.
        self._queues: dict[TenantId, deque[_Waiting]] = {}
        self._virtual: dict[TenantId, float] = {}
        self._virtual_now = 0.0
        self._waiting = 0
        self._admitted: OrderedDict[ProgramId, None] = OrderedDict()

    @property
    def running(self) -> int:
        """Turns under way."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """First turns that wait."""
        return self._waiting

    def waiting_of(self, tenant_id: TenantId) -> int:
        """First turns of one tenant that wait."""
        return len(self._queues.get(tenant_id, ()))

    def arrive(self, tenant_id: TenantId, program_id: ProgramId | None, *, now_s: float) -> Decision:
        """A turn arrives. A request of no program counts as a first turn."""
        self._tickets += 1
        ticket = self._tickets
        if program_id is not None and program_id in self._admitted:
            self._start(ticket, program_id, now_s, takes_room=self._in_room < self._settings.turns_max)
            return Decision(ruling=Ruling.START, reason=RulingReason.ADMITTED_BEFORE, ticket=ticket)
        if self._in_room < self._settings.turns_max and not self._waiting:
            self._charge(tenant_id)
            self._start(ticket, program_id, now_s, takes_room=True)
            return Decision(ruling=Ruling.START, reason=RulingReason.ROOM, ticket=ticket)
        full = self._full(tenant_id)
        if full is not None:
            retry_after_s = self.retry_after_s(tenant_id, now_s=now_s)
            return Decision(ruling=Ruling.REFUSE, reason=full, ticket=ticket, retry_after_s=retry_after_s)
        self._enqueue(tenant_id, _Waiting(ticket=ticket, program_id=program_id))
        return Decision(ruling=Ruling.WAIT, reason=RulingReason.NO_ROOM, ticket=ticket)

    def ended(self, ticket: Ticket, *, now_s: float, is_done: bool = True) -> list[Ticket]:
        """A turn that ran is over; returns the tickets that start now. An unknown ticket changes nothing."""
        if ticket not in self._running:
            return []
        self._in_room -= self._running.pop(ticket)
        self._rate.ended(now_s, is_done=is_done)
        return self._start_waiting(now_s)

    def left(self, ticket: Ticket) -> bool:
        """Somebody stopped waiting; False, with nothing changed, where the ticket does not wait (it may have started)."""
        for tenant_id, queue in self._queues.items():
            for waiting in queue:
                if waiting.ticket == ticket:
                    queue.remove(waiting)
                    self._left_queue(tenant_id)
                    return True
        return False

    def program_over(self, program_id: ProgramId) -> None:
        """The program has ended: its next turn, if there is one, is a first turn again."""
        self._admitted.pop(program_id, None)

    def retry_after_s(self, tenant_id: TenantId, *, now_s: float) -> int:
        """Whole seconds after which the tenant's queue has a place again."""
        per_s = self._rate.per_s(now_s)
        if per_s is None:
            return self._settings.retry_after_unknown_s
        tenants = set(self._queues) | {tenant_id}
        share = self._weight(tenant_id) / sum(map(self._weight, tenants))
        return max(self._settings.retry_after_min_s, min(ceil(1 / (per_s * share)), self._settings.retry_after_max_s))

    # Details

    def _full(self, tenant_id: TenantId) -> RulingReason | None:
        if self.waiting_of(tenant_id) >= self._settings.waiting_per_tenant_max:
            return RulingReason.TENANT_QUEUE_FULL
        return RulingReason.QUEUES_FULL if self._waiting >= self._settings.waiting_max else None

    def _start(self, ticket: Ticket, program_id: ProgramId | None, now_s: float, *, takes_room: bool) -> None:
        self._running[ticket] = takes_room
        self._in_room += takes_room
        self._rate.began(now_s)
        if program_id is not None:
            self._admitted[program_id] = None
            self._admitted.move_to_end(program_id)
            if len(self._admitted) > self._settings.programs_remembered_max:
                self._admitted.popitem(last=False)

    def _start_waiting(self, now_s: float) -> list[Ticket]:
        started = []
        while self._waiting and self._in_room < self._settings.turns_max:
            tenant_id = min(self._queues, key=lambda tenant: (self._virtual[tenant], tenant))
            waiting = self._queues[tenant_id].popleft()
            self._charge(tenant_id)
            self._left_queue(tenant_id)
            self._start(waiting.ticket, waiting.program_id, now_s, takes_room=True)
            started.append(waiting.ticket)
        return started

    def _enqueue(self, tenant_id: TenantId, waiting: _Waiting) -> None:
        queue = self._queues.get(tenant_id)
        if queue is None:
            self._queues[tenant_id] = queue = deque()
            self._virtual[tenant_id] = max(self._virtual.get(tenant_id, 0.0), self._virtual_now)
        queue.append(waiting)
        self._waiting += 1

    def _left_queue(self, tenant_id: TenantId) -> None:
        self._waiting -= 1
        if not self._queues[tenant_id]:
            del self._queues[tenant_id]

    def _charge(self, tenant_id: TenantId) -> None:
        """The tenant has started something: the others go first until they have had as much."""
        starts_at = max(self._virtual.get(tenant_id, 0.0), self._virtual_now)
        self._virtual_now = starts_at
        self._virtual.pop(tenant_id, None)  # it enters again as the latest
        self._virtual[tenant_id] = starts_at + 1 / self._weight(tenant_id)
        if len(self._virtual) > 2 * (len(self._queues) + self._settings.tenants_remembered_max):
            self._forget_tenants()

    def _forget_tenants(self) -> None:
        # Who does not wait and is not ahead of the others has no past that matters. Of the rest the latest are remembered.
        ahead = [
            tenant for tenant, at in self._virtual.items() if tenant not in self._queues and at > self._virtual_now
        ]
        kept = {*self._queues, *ahead[-self._settings.tenants_remembered_max :]}
        self._virtual = {tenant: at for tenant, at in self._virtual.items() if tenant in kept}

    def _weight(self, tenant_id: TenantId) -> float:
        return self._settings.tenant_weights.get(tenant_id, 1.0)
