"""A journal under test, whatever stores it, and the way in which time passes for it."""

from __future__ import annotations

import asyncio
from typing import Any

from agent_program.clock import Clock, ManualClock
from agent_program.states import ProgramState
from deployments.journal import Claim, Journal
from deployments.program import EndReason, ProgramRecord, ProgramSpec
from deployments.record_steps import apply_to_record, ended_step
from deployments.steps import Step, StepKind


class World:
    """A journal, and the way in which time passes for it."""

    def __init__(self, journal: Journal, clock: Clock) -> None:
        self.journal = journal
        self._clock = clock

    async def lapse(self, claim: Claim) -> None:
        """Let a claim's lease (of 0.05 s) run out."""
        if isinstance(self._clock, ManualClock):
            self._clock.advance(0.1)
        else:
            await asyncio.sleep(0.1)

    async def create(self, program: ProgramSpec, **options: Any) -> ProgramRecord:
        return await self.journal.create(program, **{"queued_max": 100, **options})

    async def claim(self, *, lease_s: float = 60.0) -> Claim:
        claim = await self.journal.claim("runner", lease_s=lease_s)
        assert claim is not None
        return claim

    async def append(self, claim: Claim, kind: StepKind, **data: Any) -> ProgramRecord:
        stored = await self.journal.load(claim.program_id)
        step = Step(seq=len(stored.steps) + 1, kind=kind, at=stored.record.updated_at + 1, data=data)
        record = apply_to_record(stored.record, step)
        await self.journal.append(claim, [step], record)
        return record

    async def run_to_end(self, program: ProgramSpec, state: ProgramState = ProgramState.COMPLETED) -> ProgramRecord:
        await self.create(program)
        claim = await self.claim()
        await self.append(claim, StepKind.PROGRAM_CLAIMED, runner="runner", resumed=False)
        return await self.end(claim, state)

    async def end(
        self, claim: Claim, state: ProgramState = ProgramState.COMPLETED, *, lease_ends: dict[str, int] | None = None
    ) -> ProgramRecord:
        stored = await self.journal.load(claim.program_id)
        seq = len(stored.steps) + 1
        reason = EndReason.ANSWER
        step = ended_step(stored.record, seq=seq, at=1.0, state=state, reason=reason, error=None, lease_ends=lease_ends)
        record = apply_to_record(stored.record, step)
        await self.journal.append(claim, [step], record)
        return record
