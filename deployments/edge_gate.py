"""The edge's queue as the API waits in it: `continuum_router/admission.py` decides, this lets people wait and go.

Whoever leaves before their turn started leaves the queue; whoever's turn ends, however it ends, gives the place on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from agent_program.clock import Clock
from agent_program.errors import Overloaded
from agent_program.ids import ProgramId, TenantId
from continuum_router.admission import EdgeAdmission, Ruling, RulingReason, Ticket
from continuum_router.config import AdmissionSettings

_WHY = {
    RulingReason.TENANT_QUEUE_FULL: "as many first turns of this tenant wait as may",
    RulingReason.QUEUES_FULL: "as many first turns wait as may",
}


class EdgeGate:
    """Lets turns in. One event loop owns it."""

    def __init__(self, settings: AdmissionSettings, *, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._admission = EdgeAdmission(settings)
        self._waiting: dict[Ticket, asyncio.Future[None]] = {}

    def status(self) -> dict[str, int]:
        """How many run and wait, for metrics."""
        return {"running": self._admission.running, "waiting": self._admission.waiting}

    @asynccontextmanager
    async def turn(self, tenant_id: TenantId, program_id: ProgramId | None) -> AsyncIterator[None]:
        """Hold this context while a turn runs; entering it may wait.

        Raises:
            Overloaded: the queue is full, or the wait took too long; `retry_after_s` says when to come again.
        """
        decision = self._admission.arrive(tenant_id, program_id, now_s=self._clock.now_s())
        if decision.ruling is Ruling.REFUSE:
            raise Overloaded(_WHY[decision.reason], retry_after_s=decision.retry_after_s)
        if decision.ruling is Ruling.WAIT:
            await self._wait(decision.ticket, tenant_id)
        is_done = False
        try:
            yield
            is_done = True
        finally:
            self._ended(decision.ticket, is_done=is_done)

    def program_over(self, program_id: ProgramId) -> None:
        """The program has ended."""
        self._admission.program_over(program_id)

    async def _wait(self, ticket: Ticket, tenant_id: TenantId) -> None:
        started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[ticket] = started
        try:
            async with asyncio.timeout(self._settings.wait_s):
                await started
        except BaseException as error:
            self._waiting.pop(ticket, None)
            if not self._admission.left(ticket):
                self._ended(ticket, is_done=False)  # it was let in at the very moment in which it left
            if isinstance(error, TimeoutError):
                retry_after_s = self._admission.retry_after_s(tenant_id, now_s=self._clock.now_s())
                message = f"the turn waited {self._settings.wait_s:g} s to start"
                raise Overloaded(message, retry_after_s=retry_after_s) from None
            raise

    def _ended(self, ticket: Ticket, *, is_done: bool) -> None:
        for started in self._admission.ended(ticket, now_s=self._clock.now_s(), is_done=is_done):
            future = self._waiting.pop(started, None)
            if future is not None and not future.done():
                future.set_result(None)
