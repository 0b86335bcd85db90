"""The program runner: takes programs from the journal, runs each with a `ProgramLoop`, keeps their leases alive.

Any number of runners share one journal. A runner that dies says nothing: its leases run out, and whoever claims next goes on
from the journal. A runner that is stopped cleanly hands its programs back, so that nobody waits for the leases. A program that
waits for its client is put down by its loop and takes no room; whoever claims next goes on with it when it may go on.

Four tasks beside the programs: one claims when there is room, one extends leases (and learns of cancellations and of lost
leases), one forgets finished programs, one releases what ended programs left behind (`leftovers.py`). Each survives a store that
is away and tries again.

When a store comes back after longer than a lease, every lease has run out although its runner lives. So for the length of one
lease nobody takes over, and living runners extend theirs.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from agent_program.clock import Clock
from agent_program.errors import PlatformError, ProgramNotFound, StoreUnavailable
from deployments.journal import CANCELS_TOPIC, QUEUED_TOPIC, Claim, Journal, LeaseLost, LeaseStatus
from deployments.leftovers import release_leftovers
from deployments.ports import EngineClient, ToolClient
from deployments.program import EndReason
from deployments.program_loop import ProgramLoop
from deployments.program_settings import ProgramSettings
from deployments.program_trace import program_span
from deployments.traces import NoTraces, TraceSink

logger = logging.getLogger(__name__)

_FORGET_PERIOD_S = 60.0
_LEFTOVERS_PERIOD_S = 60.0


class InternalError(PlatformError):
    """The runner hit an error of its own; its log has the traceback."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Running:
    """A program that this runner runs."""

    claim: Claim
    loop: ProgramLoop
    task: asyncio.Task[None]


class ProgramRunner:
    """Runs programs until it is closed. One event loop owns it."""

    def __init__(
        self,
        *,
        journal: Journal,
        engine: EngineClient,
        tools: ToolClient,
        clock: Clock,
        settings: ProgramSettings,
        traces: TraceSink | None = None,
    ) -> None:
        #: One incarnation; a restarted runner is another one.
        self.name = f"runner_{secrets.token_hex(4)}"
        self._journal = journal
        self._engine = engine
        self._tools = tools
        self._clock = clock
        self._settings = settings
        self._traces = traces or NoTraces()
        self._running: dict[str, _Running] = {}
        self._has_room = asyncio.Event()
        #: When the store last answered.
        self._heard_s = clock.now_s()
        #: Until then, leases that ran out are left alone.
        self._no_takeover_before_s = 0.0
        self._duties: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to take programs. Needs a running event loop."""
        for duty in (self._claim_forever, self._extend_forever, self._forget_forever, self._release_leftovers_forever):
            self._duties.append(asyncio.create_task(self._survive(duty), name=f"{self.name}-{duty.__name__}"))

    async def close(self) -> None:
        """Stop what runs, hand the programs back to the journal, and stop."""
        await _cancel_all(self._duties)
        running = list(self._running.values())
        await _cancel_all([program.task for program in running])
        for program in running:
            try:
                await self._journal.hand_back(program.claim)
            except StoreUnavailable as error:
                logger.warning("%s: %s waits for its lease to run out: %s", self.name, program.claim.program_id, error)
        await self._traces.close()

    def check_health(self) -> None:
        """Raises RuntimeError where a duty has ended, which none ever should."""
        for duty in self._duties:
            if duty.done():
                raise RuntimeError(f"{duty.get_name()} has ended")

    def status(self) -> dict[str, Any]:
        """What the runner does now."""
        return {
            "runner": self.name,
            "running": len(self._running),
            "running_max": self._settings.running_per_runner_max,
            "traces_dropped": self._traces.dropped,
        }

    # Duties

    async def _survive(self, duty: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await duty()
            except StoreUnavailable as error:
                logger.warning("%s: %s", self.name, error)
                self._no_takeover_before_s = self._clock.now_s() + self._settings.lease_s
            except Exception:
                logger.exception("%s: a duty failed and starts again", self.name)
            await asyncio.sleep(self._settings.retry_s)

    async def _claim_forever(self) -> None:
        async with self._journal.listen(QUEUED_TOPIC) as queued:
            while True:
                self._has_room.clear()
                if len(self._running) >= self._settings.running_per_runner_max:
                    await self._has_room.wait()
                claim = await self._journal.claim(
                    self.name,
                    lease_s=self._settings.lease_s,
                    take_lapsed=self._may_take_over(),
                )
                self._heard_s = self._clock.now_s()
                if claim is None:
                    await queued.wait(self._settings.poll_s)
                else:
                    await self._take(claim)

    def _may_take_over(self) -> bool:
        """Not for the length of a lease after the store was away, or was not heard of for so long that it may have been."""
        now_s, lease_s = self._clock.now_s(), self._settings.lease_s
        if now_s - self._heard_s > lease_s / 2:
            self._no_takeover_before_s = now_s + lease_s
        return now_s >= self._no_takeover_before_s

    async def _extend_forever(self) -> None:
        async with self._journal.listen(CANCELS_TOPIC) as cancels:
            while True:
                claims = [program.claim for program in self._running.values()]
                statuses = await self._journal.extend(claims, lease_s=self._settings.lease_s)
                self._heard_s = self._clock.now_s()
                for claim in claims:
                    self._react(claim, statuses[claim.program_id])
                await cancels.wait(self._settings.lease_s / self._settings.lease_extensions)

    async def _forget_forever(self) -> None:
        while True:
            settings = self._settings
            while await self._journal.forget_finished(
                keep_s=settings.keep_finished_s, keep_count=settings.keep_finished_count
            ):
                pass
            await asyncio.sleep(_FORGET_PERIOD_S)

    async def _release_leftovers_forever(self) -> None:
        while True:
            await asyncio.sleep(_LEFTOVERS_PERIOD_S)
            await release_leftovers(self._journal, self._tools, delete_workspaces=self._settings.delete_workspaces)

    # Programs

    async def _take(self, claim: Claim) -> None:
        if (old := self._running.get(claim.program_id)) is not None:
            # Our own lease ran out while the store was away. The new claim is ours too, but the old loop cannot write.
            await _cancel_all([old.task])
        try:
            program = await self._journal.load(claim.program_id)
        except ProgramNotFound:
            logger.warning("%s: program %s is gone", self.name, claim.program_id)
            return
        loop = ProgramLoop(
            claim,
            program,
            runner=self.name,
            journal=self._journal,
            engine=self._engine,
            tools=self._tools,
            clock=self._clock,
            settings=self._settings,
        )
        if program.record.cancel_requested:
            loop.cancel()
        task = asyncio.create_task(self._run(claim, loop), name=f"program-{claim.program_id}")
        self._running[claim.program_id] = _Running(claim=claim, loop=loop, task=task)
        task.add_done_callback(lambda _: self._left(claim))

    def _left(self, claim: Claim) -> None:
        running = self._running.get(claim.program_id)
        if running is not None and running.claim == claim:
            del self._running[claim.program_id]
        self._has_room.set()

    async def _run(self, claim: Claim, loop: ProgramLoop) -> None:
        try:
            await self._run_to_an_end(claim, loop)
            if loop.has_ended and self._traces.is_on:
                await self._send_trace(claim.program_id)
        except LeaseLost:
            logger.warning("%s: lost program %s to another runner", self.name, claim.program_id)
        except StoreUnavailable as error:
            logger.warning("%s: gave up program %s: %s", self.name, claim.program_id, error)

    async def _send_trace(self, program_id: str) -> None:
        try:
            program = await self._journal.load(program_id)
        except ProgramNotFound:
            return  # deleted the moment it ended
        self._traces.program_ended(program_span(program.record, program.steps, now_s=self._clock.wall_s()))

    async def _run_to_an_end(self, claim: Claim, loop: ProgramLoop) -> None:
        try:
            await loop.run()
        except (LeaseLost, StoreUnavailable):
            raise
        except Exception:
            logger.exception("%s: program %s failed", self.name, claim.program_id)
            await loop.fail(EndReason.INTERNAL_ERROR, InternalError())

    def _react(self, claim: Claim, status: LeaseStatus) -> None:
        running = self._running.get(claim.program_id)
        if running is None or running.claim != claim or running.loop.has_ended:
            return  # the lease of a program that has ended is not lost but over
        if status is LeaseStatus.CANCEL_REQUESTED:
            running.loop.cancel()
        elif status is LeaseStatus.LOST and not running.task.done():
            logger.warning("%s: the lease of program %s is lost", self.name, claim.program_id)
            running.task.cancel()


async def _cancel_all(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
