"""The journal in one process's memory: for tests, and the plainest statement of what `journal.py` promises."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from agent_program.clock import Clock
from agent_program.errors import IllegalTransition, InvalidRequest, Overloaded, ProgramNotFound
from agent_program.states import ProgramState
from deployments.journal import (
    CANCELS_TOPIC,
    FORGET_BATCH,
    QUEUED_TOPIC,
    Claim,
    IdempotencyKey,
    IdempotencyMismatch,
    JournalTotals,
    LeaseLost,
    LeaseStatus,
    Page,
    ProgramExists,
    StoredProgram,
    counter_increments,
    program_topic,
)
from deployments.program import ProgramRecord, ProgramSpec, new_record
from deployments.record_steps import cancelled_while_queued, queued_step
from deployments.signals import Signal, SignalHub
from deployments.steps import Step


@dataclass(slots=True)
class _Entry:
    """One program and who runs it."""

    spec: ProgramSpec
    record: ProgramRecord
    steps: list[Step]
    created_order: int
    token: int = 0
    is_cancel_requested: bool = False
    #: `now_s` at which the lease runs out; None where nobody runs the program.
    lease_until_s: float | None = None
    #: Unix seconds of its end.
    finished_at: float = 0.0
    finished_order: int = 0

    @property
    def waits_for_client(self) -> bool:
        return self.record.state is ProgramState.REQUIRES_ACTION


class MemoryJournal:
    """`Journal` over dictionaries."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._entries: dict[str, _Entry] = {}
        self._queue: OrderedDict[str, None] = OrderedDict()
        self._idempotency: dict[tuple[str, str], tuple[str, str]] = {}
        self._counters: dict[str, float] = {}
        self._order = itertools.count(1)
        self._hub = SignalHub()

    async def create(
        self, spec: ProgramSpec, *, queued_max: int, idempotency: IdempotencyKey | None = None
    ) -> ProgramRecord:
        if idempotency is not None and (earlier := self._made_with(idempotency)) is not None:
            return earlier
        if spec.id in self._entries:
            raise ProgramExists(f"a program with the id {spec.id!r} exists", param="program_id")
        if len(self._queue) >= queued_max:
            raise Overloaded(f"{queued_max} programs are queued; try again later", retry_after_s=5)
        record = new_record(spec)
        self._entries[spec.id] = _Entry(
            spec=spec, record=record, steps=[queued_step(spec)], created_order=next(self._order)
        )
        self._queue[spec.id] = None
        if idempotency is not None:
            self._idempotency[idempotency.tenant_id, idempotency.key] = (spec.id, idempotency.fingerprint)
        self._hub.fire(QUEUED_TOPIC)
        return record

    def _made_with(self, idempotency: IdempotencyKey) -> ProgramRecord | None:
        known = self._idempotency.get((idempotency.tenant_id, idempotency.key))
        if known is None or known[0] not in self._entries:
            return None
        if known[1] != idempotency.fingerprint:
            raise IdempotencyMismatch(param="Idempotency-Key")
        return self._entries[known[0]].record

    async def get(self, program_id: str) -> ProgramRecord:
        entry = self._entry(program_id)
        return entry.record.model_copy(update={"cancel_requested": entry.is_cancel_requested})

    async def load(self, program_id: str) -> StoredProgram:
        return StoredProgram(
            spec=self._entry(program_id).spec,
            record=await self.get(program_id),
            steps=tuple(self._entry(program_id).steps),
        )

    async def steps(self, program_id: str, *, after_seq: int = 0, limit: int = 1000) -> tuple[Step, ...]:
        return tuple(self._entry(program_id).steps[after_seq : after_seq + limit])

    async def list(
        self, *, state: ProgramState | None, limit: int, after: str | None, tenant_id: str | None = None
    ) -> Page:
        if after is not None and after not in self._entries:
            raise InvalidRequest(f"no program {after!r} to continue the list after", param="after")
        below = self._entries[after].created_order if after is not None else float("inf")
        found = [
            entry
            for entry in sorted(self._entries.values(), key=lambda entry: -entry.created_order)
            if entry.created_order < below
            and state in (None, entry.record.state)
            and tenant_id in (None, entry.record.tenant_id)
        ]
        records = tuple([await self.get(entry.spec.id) for entry in found[:limit]])
        return Page(records=records, has_more=len(found) > limit)

    async def claim(self, runner: str, *, lease_s: float, take_lapsed: bool = True) -> Claim | None:
        program_id = (self._lapsed() if take_lapsed else None) or next(iter(self._queue), None)
        if program_id is None:
            return None
        self._queue.pop(program_id, None)
        entry = self._entries[program_id]
        entry.token += 1
        entry.lease_until_s = self._clock.now_s() + lease_s
        return Claim(program_id=program_id, token=entry.token)

    def _lapsed(self) -> str | None:
        now_s = self._clock.now_s()
        lapsed = [
            (entry.lease_until_s, program_id)
            for program_id, entry in self._entries.items()
            if entry.lease_until_s is not None and entry.lease_until_s <= now_s
        ]
        return min(lapsed)[1] if lapsed else None

    async def extend(self, claims: Sequence[Claim], *, lease_s: float) -> dict[str, LeaseStatus]:
        statuses = {}
        for claim in claims:
            entry = self._entries.get(claim.program_id)
            if entry is None or entry.token != claim.token or entry.lease_until_s is None:
                statuses[claim.program_id] = LeaseStatus.LOST
                continue
            if not entry.waits_for_client:
                entry.lease_until_s = self._clock.now_s() + lease_s
            is_asked = entry.is_cancel_requested
            statuses[claim.program_id] = LeaseStatus.CANCEL_REQUESTED if is_asked else LeaseStatus.HELD
        return statuses

    async def append(self, claim: Claim, steps: Sequence[Step], record: ProgramRecord) -> None:
        entry = self._entries.get(claim.program_id)
        if entry is None or entry.token != claim.token:
            raise LeaseLost
        if steps[-1].seq == len(entry.steps):
            return  # the same append again, after its answer got lost
        if entry.lease_until_s is None or steps[0].seq != len(entry.steps) + 1:
            raise LeaseLost
        entry.steps.extend(steps)
        entry.record = record
        self._count(steps, record)
        if record.state.is_final:
            self._finish(entry)
        self._hub.fire(program_topic(claim.program_id))

    async def hand_back(self, claim: Claim, *, after_s: float = 0.0) -> None:
        entry = self._entries.get(claim.program_id)
        if entry is None or entry.token != claim.token or entry.lease_until_s is None:
            return
        is_to_wait = entry.waits_for_client and not entry.is_cancel_requested
        entry.lease_until_s = self._clock.now_s() + (after_s if is_to_wait else 0.0)
        self._hub.fire(QUEUED_TOPIC)

    async def act(self, program_id: str, steps: Sequence[Step], record: ProgramRecord) -> bool:
        entry = self._entry(program_id)
        if not entry.waits_for_client or steps[0].seq != len(entry.steps) + 1:
            return False
        entry.steps.extend(steps)
        entry.record = record
        self._count(steps, record)
        if record.state is not ProgramState.REQUIRES_ACTION:
            self._give_away(entry)
        self._hub.fire(program_topic(program_id))
        return True

    async def request_cancel(self, program_id: str) -> ProgramRecord:
        entry = self._entry(program_id)
        if entry.record.state.is_final:
            if entry.record.state is ProgramState.CANCELLED:
                return await self.get(program_id)
            raise IllegalTransition(f"the program has ended: {entry.record.state.value}")
        entry.is_cancel_requested = True
        if entry.waits_for_client:
            self._give_away(entry)
        if program_id in self._queue:
            del self._queue[program_id]
            step, record = cancelled_while_queued(entry.record, seq=len(entry.steps) + 1, at=self._clock.wall_s())
            entry.steps.append(step)
            entry.record = record
            self._finish(entry)
            self._count([step], record)
        self._hub.fire(CANCELS_TOPIC)
        self._hub.fire(program_topic(program_id))
        return await self.get(program_id)

    async def delete(self, program_id: str) -> None:
        if not self._entry(program_id).record.state.is_final:
            raise IllegalTransition("the program has not ended; cancel it first")
        del self._entries[program_id]
        self._hub.fire(program_topic(program_id))

    async def forget_finished(self, *, keep_s: float, keep_count: int) -> int:
        finished = sorted(
            (entry for entry in self._entries.values() if entry.record.state.is_final),
            key=lambda entry: entry.finished_order,
        )
        too_old_at = self._clock.wall_s() - keep_s
        surplus = max(0, len(finished) - keep_count)
        forgotten = [
            entry for position, entry in enumerate(finished) if position < surplus or entry.finished_at <= too_old_at
        ][:FORGET_BATCH]
        for entry in forgotten:
            await self.delete(entry.spec.id)
        return len(forgotten)

    async def totals(self) -> JournalTotals:
        by_state = {state.value: 0 for state in ProgramState}
        for entry in self._entries.values():
            by_state[entry.record.state.value] += 1
        return JournalTotals(by_state=by_state, counters=dict(self._counters))

    @asynccontextmanager
    async def listen(self, topic: str) -> AsyncIterator[Signal]:
        with self._hub.listen(topic) as signal:
            yield signal

    async def check(self) -> None:
        return None

    async def close(self) -> None:
        return None

    def _entry(self, program_id: str) -> _Entry:
        try:
            return self._entries[program_id]
        except KeyError:
            raise ProgramNotFound(f"no program {program_id!r}", param="program_id") from None

    def _give_away(self, entry: _Entry) -> None:
        """To whichever runner claims next."""
        entry.lease_until_s = self._clock.now_s()
        self._hub.fire(QUEUED_TOPIC)

    def _finish(self, entry: _Entry) -> None:
        entry.lease_until_s = None
        entry.finished_at = self._clock.wall_s()
        entry.finished_order = next(self._order)

    def _count(self, steps: Sequence[Step], record: ProgramRecord) -> None:
        for name, amount in counter_increments(steps, record).items():
            self._counters[name] = self._counters.get(name, 0) + amount
