"""Which of vLLM's waiting requests its scheduling loop gets to see in a step, and in which order.

vLLM's loop takes requests from the head of `waiting` until one does not fit. It is not changed; before each step the queue is
put in the order that the ordering says, and turns that shall not start in this step are taken out of it:

- first turns that the admission holds back,
- turns that were tried and did not fit, so that what is behind them gets its chance (`backfill.py`).

After the step they are put back where they were. With nothing running everybody is shown: a queue that hides its turns never
keeps an engine idle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from engine_replicas.admission import Admission, WorkingSetView
from engine_replicas.backfill import Backfill
from engine_replicas.config import SchedulingSettings
from engine_replicas.ordering import Arrivals, FirstTurnLane, OrderedTurn, Ordering
from engine_replicas.retention.controller import RetentionController

#: How long a view of the working set may be used while nothing starts or ends: prices fall slowly.
_VIEW_S = 0.25


class TurnQueue:
    """The waiting and running turns of one scheduler."""

    def __init__(
        self,
        scheduler: Scheduler,
        controller: RetentionController,
        *,
        ordering: Ordering,
        admission: Admission,
        settings: SchedulingSettings,
        kv_tokens_total: int,
    ) -> None:
        self._scheduler = scheduler
        self._controller = controller
        self._ordering = ordering
        self._admission = admission
        self._kv_tokens_total = kv_tokens_total
        self._arrivals = Arrivals(wait_max_s=settings.turn_wait_max_s)
        self._lane = FirstTurnLane(tokens_max=settings.lane_fraction * kv_tokens_total)
        self._backfill = Backfill(skips_max=settings.backfill_skips_max, wait_max_s=settings.backfill_wait_max_s)
        self._hides = admission.limits or ordering.has_lanes
        #: The whole queue of this step, in order; None where nothing is hidden.
        self._whole: list[Request] | None = None
        self._view: WorkingSetView | None = None
        self._view_until_s = 0.0

    # --- events ------------------------------------------------------------------------------------------------------

    def arrived(self, request: Request, now_s: float) -> None:
        """A request entered the queue."""
        self._arrivals.arrived(request.request_id, now_s)

    def left(self, request: Request) -> None:
        """It is no longer in the engine, and its blocks are about to be free."""
        self._arrivals.left(request.request_id)
        self._backfill.left(request.request_id)
        self._lane.left(request.request_id)
        self.memory_freed()

    def memory_freed(self) -> None:
        """What did not fit may fit now."""
        self._backfill.memory_freed()
        self._view = None

    def refused(self, request: Request, now_s: float) -> None:
        """A waiting request was tried and did not fit."""
        if self._ordering.has_lanes:
            self._backfill.refused(request.request_id, now_s)

    # --- a step ------------------------------------------------------------------------------------------------------

    def before_step(self, now_s: float) -> None:
        """Put the queues in order, and take out what shall not start now."""
        if not self._controller.has_turns:
            return
        if self._ordering.reorders:
            self._put_in_order(now_s)
        if self._hides and self._scheduler.waiting and self._scheduler.running:
            self._hide(now_s)

    def after_step(self, output: SchedulerOutput) -> None:
        """Put back what was taken out, and note who runs now."""
        if self._whole is not None:
            self._put_back(self._whole)
            self._whole = None
        for scheduled in output.scheduled_new_reqs:
            self._started(scheduled.req_id)
        for request_id in output.scheduled_cached_reqs.resumed_req_ids:
            self._started(request_id)
        if output.preempted_req_ids:
            self._controller.is_order_stale = True
            for request_id in output.preempted_req_ids:
                self._lane.left(request_id)
            self.memory_freed()

    def _started(self, request_id: str) -> None:
        self._arrivals.scheduled(request_id)
        self._backfill.left(request_id)
        self._view = None
        standing = self._controller.standing(request_id)
        if standing is None:
            return
        if standing.is_first_turn and self._ordering.has_lanes and self._lane.is_open:
            self._lane.scheduled(request_id, self._scheduler.requests[request_id].num_tokens)
            self._controller.is_order_stale |= not self._lane.is_open
        else:
            self._controller.admit(request_id)

    # --- order ---------------------------------------------------------------------------------------------------------

    def _put_in_order(self, now_s: float) -> None:
        """Sort the waiting turns, and the running ones, whose last is preempted first; only when something changed."""
        if not (self._arrivals.find_overdue(now_s) or self._controller.is_order_stale):
            return
        self._controller.is_order_stale = False
        scheduler, ordering = self._scheduler, self._ordering
        waiting = sorted(scheduler.waiting, key=lambda request: ordering.waiting_key(self._ordered(request)))
        self._refill(waiting)
        scheduler.running.sort(key=lambda request: ordering.running_key(self._ordered(request)))

    def _ordered(self, request: Request) -> OrderedTurn:
        turn_id = request.request_id
        is_overdue = self._arrivals.is_overdue(turn_id)
        is_preempted = request.status == RequestStatus.PREEMPTED
        standing = self._controller.standing(turn_id)
        if standing is None:
            return OrderedTurn(
                turn_id=turn_id,
                is_overdue=is_overdue,
                is_preempted=is_preempted,
                is_retained=False,
                program_arrival_s=self._arrivals.arrived_s(turn_id),
            )
        return OrderedTurn(
            turn_id=turn_id,
            is_overdue=is_overdue,
            is_preempted=is_preempted,
            is_retained=standing.is_retained,
            program_arrival_s=standing.program_arrival_s,
            is_in_lane=standing.is_first_turn and self._lane.is_open,
            attained_s=standing.attained_s,
            remaining_s=standing.remaining_s,
        )

    # --- what is shown ---------------------------------------------------------------------------------------------------

    def _hide(self, now_s: float) -> None:
        waiting = list(self._scheduler.waiting)
        shown = (
            [request for request in waiting if self._may_start(request, now_s)] if self._admission.limits else waiting
        )
        if self._ordering.has_lanes:
            shown = shown[self._backfill.first_to_try([request.request_id for request in shown], now_s) :]
        if len(shown) < len(waiting):
            self._whole = waiting
            self._refill(shown)

    def _may_start(self, request: Request, now_s: float) -> bool:
        standing = self._controller.standing(request.request_id)
        if standing is None or standing.is_admitted or request.status == RequestStatus.PREEMPTED:
            return True
        if standing.is_first_turn and self._ordering.has_lanes and self._lane.is_open:
            return True
        waited_s = now_s - self._arrivals.arrived_s(request.request_id)
        return self._admission.admits(request.num_tokens, waited_s, self._working_set(now_s))

    def _working_set(self, now_s: float) -> WorkingSetView:
        if self._view is None or now_s > self._view_until_s:
            scheduler = self._scheduler
            active = sum(request.num_tokens for request in scheduler.running)
            active += sum(
                request.num_tokens
                for request in scheduler.waiting
                if (standing := self._controller.standing(request.request_id)) is not None
                and standing.is_admitted
                and not standing.is_retained
            )
            self._view = WorkingSetView(
                tokens_total=self._kv_tokens_total,
                active_tokens=float(active),
                idle_tokens=self._controller.idle_tokens(now_s),
            )
            self._view_until_s = now_s + _VIEW_S
        return self._view

    def _put_back(self, whole: Sequence[Request]) -> None:
        """The queue as it was, without those that started; what the step itself put in front (preempted) stays in front."""
        left = {request.request_id for request in self._scheduler.waiting}
        before = {request.request_id for request in whole}
        ran = {request.request_id for request in self._scheduler.running}
        in_front = [request for request in self._scheduler.waiting if request.request_id not in before]
        kept = [request for request in whole if request.request_id in left or self._is_hidden(request, ran)]
        self._refill([*in_front, *kept])

    def _is_hidden(self, request: Request, running: set[str]) -> bool:
        return request.request_id not in running and request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)

    def _refill(self, requests: Sequence[Request]) -> None:
        queue: Any = self._scheduler.waiting
        queue.clear()
        queue.extend(requests)
