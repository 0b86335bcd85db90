"""Which of vLLM's waiting requests its scheduling loop gets to see in a step, and in which order.

vLLM's loop takes requests from the head of `waiting` until one does not fit. It is not changed; before each step the queue is
put in the order that the ordering says, and turns that shall not start in this step are taken out of it:

- first turns that the admission holds back,
- turns that were tried and did not fit, so that what is behind them gets its chance (`backfill.py`).

After the step they are put back where they were. With nothing running everybody is shown: a queue that hides its turns never
keeps an engine idle.

A step of the engine takes milliseconds and there may be a thousand waiting turns, so none of this may look closely at each of
them in every step. A turn's keys, and what it means for the admission, are made anew only when something that they are made of
has changed; the whole queue is then sorted by ready keys. Two exceptions look at all of them: once some program has declared its
turns, what remains of each moves with all the others; and with a KV connector a turn's state changes unseen.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from operator import attrgetter, itemgetter, le
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from engine_replicas.admission import Admission, WorkingSetView
from engine_replicas.backfill import Backfill
from engine_replicas.config import SchedulingSettings
from engine_replicas.ordering import Arrivals, FirstTurnLane, OrderedTurn, Ordering
from engine_replicas.retention.controller import RetentionController
from engine_replicas.retention.standing import Standing

#: How long a view of the working set may be used while nothing starts or ends: prices fall slowly.
_VIEW_S = 0.25
_REQUEST_ID = attrgetter("request_id")


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
        self._lane = FirstTurnLane(
            tokens_max=settings.lane_fraction * kv_tokens_total, time_share=settings.lane_time_share
        )
        #: Whether the lane was open when the queue was last put in order.
        self._is_lane_open = False
        self._backfill = Backfill(skips_max=settings.backfill_skips_max, wait_max_s=settings.backfill_wait_max_s)
        self._hides = admission.limits or ordering.has_lanes
        self._tries_max = settings.backfill_skips_max + 1
        #: Of every turn in the engine: its key in the queue while the lane for first turns is closed, and while it is open; and its
        #: key among the running turns.
        self._keys: tuple[dict[str, tuple[float, ...]], dict[str, tuple[float, ...]]] = ({}, {})
        self._running_keys: dict[str, tuple[float, ...]] = {}
        self._changed: set[str] = set()
        #: Tokens of waiting turns. Of programs that have not been admitted: their first turns, and later ones. Of those that have:
        #: turns that no lease serves.
        self._first_tokens: dict[str, int] = {}
        self._second_tokens: dict[str, int] = {}
        self._wanted_tokens: dict[str, int] = {}
        #: The whole queue of this step, in order; None where nothing is hidden.
        self._whole: list[Request] | None = None
        self._shown: list[Request] = []
        self._view: WorkingSetView | None = None
        self._view_until_s = 0.0

    # --- events ------------------------------------------------------------------------------------------------------

    def arrived(self, request: Request, now_s: float) -> None:
        """A request entered the queue."""
        self._arrivals.arrived(request.request_id, now_s)
        self._changed.add(request.request_id)

    def left(self, request: Request) -> None:
        """It is no longer in the engine, and its blocks are about to be free."""
        self._arrivals.left(request.request_id)
        self._backfill.left(request.request_id)
        self._lane.left(request.request_id)
        self._forget(request.request_id)
        self.memory_freed()

    def memory_freed(self) -> None:
        """What did not fit may fit now."""
        self._backfill.memory_freed()
        self._view = None

    def preempted_all(self) -> None:
        """Running turns were put back into the queue outside of a step."""
        self._changed.update(self._running_keys)

    def refused(self, request: Request, now_s: float) -> None:
        """A waiting request was tried and did not fit."""
        if self._ordering.has_lanes:
            self._backfill.refused(request.request_id, now_s)

    def stats(self) -> dict[str, Any]:
        """What holds turns back just now, plain values only."""
        return {
            "lane_tokens": self._lane.tokens,
            "unadmitted_tokens": sum(self._first_tokens.values()) + sum(self._second_tokens.values()),
            "unadmitted_turns": len(self._first_tokens) + len(self._second_tokens),
            "overdue_turns": self._arrivals.overdue,
        }

    # --- a step ------------------------------------------------------------------------------------------------------

    def before_step(self, now_s: float) -> None:
        """Put the queues in order, and take out what shall not start now."""
        if not self._controller.has_turns:
            self._controller.changed_turns.clear()
            return
        if self._ordering.has_lanes and self._is_lane_open is not self._lane.is_open(now_s):
            self._is_lane_open = not self._is_lane_open
            self._controller.is_order_stale = True
        if self._ordering.reorders:
            self._put_in_order(now_s)
        self._look_again()
        if self._hides and self._scheduler.waiting and self._scheduler.running:
            self._hide(now_s)

    def after_step(self, output: SchedulerOutput, now_s: float) -> None:
        """Put back what was taken out, and note who runs now."""
        if self._whole is not None:
            self._put_back(self._whole, self._shown)
            self._whole, self._shown = None, []
        for scheduled in output.scheduled_new_reqs:
            self._started(scheduled.req_id, now_s)
        for request_id in output.scheduled_cached_reqs.resumed_req_ids:
            self._started(request_id, now_s)
        if output.preempted_req_ids:
            self._controller.is_order_stale = True
            for request_id in output.preempted_req_ids:
                self._lane.left(request_id)
            self._changed.update(output.preempted_req_ids)
            self.memory_freed()

    def _started(self, request_id: str, now_s: float) -> None:
        self._arrivals.scheduled(request_id)
        self._backfill.left(request_id)
        self._changed.add(request_id)
        self._view = None
        standing = self._controller.standing(request_id)
        if standing is None:
            return
        if standing.is_first_turn and self._ordering.has_lanes and self._lane.is_open(now_s):
            tokens = self._scheduler.requests[request_id].num_tokens
            prefill_s = self._controller.prefill_s(tokens)
            self._lane.scheduled(request_id, tokens=tokens, prefill_s=prefill_s, now_s=now_s)
        else:
            self._controller.admit(request_id)

    # --- order ---------------------------------------------------------------------------------------------------------

    def _put_in_order(self, now_s: float) -> None:
        """Sort the waiting turns, and the running ones, whose last is preempted first; only when something changed."""
        scheduler = self._scheduler
        is_overdue = self._arrivals.find_overdue(now_s)
        if not (is_overdue or self._controller.is_order_stale):
            return
        self._controller.is_order_stale = False
        if is_overdue or self._controller.is_work_declared or scheduler.connector is not None:
            self._look_at([*scheduler.waiting, *scheduler.running])
        self._look_again()
        keys = self._keys[self._is_lane_open]
        self._refill(_sorted(scheduler.waiting, keys))
        scheduler.running[:] = _sorted(scheduler.running, self._running_keys)

    def _look_again(self) -> None:
        """Make the places anew of the turns that something happened to."""
        changed = self._controller.changed_turns
        changed |= self._changed
        if changed:
            requests = self._scheduler.requests
            self._look_at([requests[turn_id] for turn_id in changed if turn_id in requests])
            changed.clear()
            self._changed.clear()

    def _look_at(self, requests: Iterable[Request]) -> None:
        """Make the keys of these turns, and count what they mean for the admission."""
        for request in requests:
            turn_id = request.request_id
            turn, standing = self._ordered(request)
            key = self._ordering.waiting_key(turn)
            is_first = standing is not None and standing.is_first_turn
            in_lane = self._ordering.waiting_key(replace(turn, is_in_lane=True)) if is_first else key
            self._keys[False][turn_id], self._keys[True][turn_id] = key, in_lane
            self._running_keys[turn_id] = self._ordering.running_key(turn)
            for tokens in (self._first_tokens, self._second_tokens, self._wanted_tokens):
                tokens.pop(turn_id, None)
            if standing is None or request.status == RequestStatus.RUNNING:
                continue
            if not standing.is_admitted:
                if not turn.is_preempted:
                    (self._first_tokens if is_first else self._second_tokens)[turn_id] = request.num_tokens
            elif not turn.is_retained:
                self._wanted_tokens[turn_id] = request.num_tokens

    def _forget(self, turn_id: str) -> None:
        tokens = (self._first_tokens, self._second_tokens, self._wanted_tokens)
        for known in (*self._keys, self._running_keys, *tokens):
            known.pop(turn_id, None)
        self._changed.discard(turn_id)

    def _ordered(self, request: Request) -> tuple[OrderedTurn, Standing | None]:
        """The turn as an ordering sees it outside of the lane, and what that was made of; None without a program."""
        turn_id = request.request_id
        is_overdue = self._arrivals.is_overdue(turn_id)
        is_preempted = request.status == RequestStatus.PREEMPTED
        standing = self._controller.standing(turn_id)
        if standing is None:
            plain = OrderedTurn(
                turn_id=turn_id,
                is_overdue=is_overdue,
                is_preempted=is_preempted,
                is_retained=False,
                program_arrival_s=self._arrivals.arrived_s(turn_id),
            )
            return plain, None
        turn = OrderedTurn(
            turn_id=turn_id,
            is_overdue=is_overdue,
            is_preempted=is_preempted,
            is_retained=standing.is_retained,
            program_arrival_s=standing.program_arrival_s,
            attained_s=standing.attained_s,
            remaining_s=standing.remaining_s,
        )
        return turn, standing

    # --- what is shown ---------------------------------------------------------------------------------------------------

    def _hide(self, now_s: float) -> None:
        waiting = list(self._scheduler.waiting)
        held_back = self._held_back(now_s) if self._admission.limits else ()
        shown = [request for request in waiting if request.request_id not in held_back] if held_back else waiting
        if self._ordering.has_lanes:
            # No turn behind these can be the first to try.
            heads = [request.request_id for request in shown[: self._tries_max]]
            first = self._backfill.first_to_try(heads, now_s)
            shown = shown[first:] if first < len(heads) else []
        if len(shown) < len(waiting):
            # vLLM fails a turn whose grammar did not compile when it comes upon it; that needs no memory.
            if failed := [request for request in self._scheduler.deferred_waiting if _has_failed(request)]:
                shown = [*failed, *(request for request in shown if request not in failed)]
            self._whole, self._shown = waiting, shown
            self._refill(shown)

    def _held_back(self, now_s: float) -> Collection[str]:
        """The turns of programs that have not been admitted which may not start now.

        Admission is asked about the smallest that has waited longest, and about the largest that has not waited: where it says
        the same of both it says so of all, for it never prefers the larger or the later.
        """
        asking = self._second_tokens if self._is_lane_open else {**self._first_tokens, **self._second_tokens}
        if not asking:
            return ()
        admits, others = self._admission.admits, self._working_set(now_s)
        if not admits(min(asking.values()), self._arrivals.longest_wait_s(now_s), others):
            return asking
        if admits(max(asking.values()), 0.0, others):
            return ()
        arrived_s = self._arrivals.arrived_s
        return {turn_id for turn_id, tokens in asking.items() if not admits(tokens, now_s - arrived_s(turn_id), others)}

    def _working_set(self, now_s: float) -> WorkingSetView:
        if self._view is None or now_s > self._view_until_s:
            active = sum([request.num_tokens for request in self._scheduler.running]) + sum(
                self._wanted_tokens.values()
            )
            self._view = WorkingSetView(
                tokens_total=self._kv_tokens_total,
                active_tokens=float(active),
                idle_tokens=self._controller.idle_tokens(now_s),
            )
            self._view_until_s = now_s + _VIEW_S
        return self._view

    def _put_back(self, whole: Sequence[Request], shown: Sequence[Request]) -> None:
        """The queue as it was, without those that left it; what the step itself put in front (preempted) stays in front."""
        queue = self._scheduler.waiting
        gone = set(shown).difference(queue)
        in_front = set(queue).difference(shown)
        kept = [request for request in whole if request not in gone] if gone else whole
        self._refill([*(request for request in queue if request in in_front), *kept] if in_front else kept)

    def _refill(self, requests: Sequence[Request]) -> None:
        queue: Any = self._scheduler.waiting
        queue.clear()
        queue.extend(requests)


def _has_failed(request: Request) -> bool:
    asked = request.structured_output_request
    is_waiting_for_it = request.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    return is_waiting_for_it and asked is not None and isinstance(asked.grammar, Exception)


def _sorted(requests: Collection[Request], keys: Mapping[str, tuple[float, ...]]) -> Sequence[Request]:
    """The requests in ascending order of their keys, equals as they were. Mostly they are in order already."""
    of_each = list(map(keys.__getitem__, map(_REQUEST_ID, requests)))
    if all(map(le, of_each, islice(of_each, 1, None))):
        return list(requests)
    return [request for _, request in sorted(zip(of_each, requests, strict=True), key=itemgetter(0))]
