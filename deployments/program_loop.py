"""One program, run to its end: journal the step, act, journal what came of it, decide again.

The loop owns nothing but the order of things. What comes next is `next_action`; what it adds up to is `steps.apply`; who may
write is the claim. It runs the same in a fresh program and in one whose runner died, because it always starts from the fold
of the journal:

- a turn that was started and not finished runs again (a turn has no effect but KV);
- a tool call that was started and not finished is first stopped wherever it may still run, then runs again if its tool is
  idempotent, and is otherwise reported to the model as interrupted.

A program that needs its client (outputs of the client's own tools, consent to a call) is put down, not held: the journal
gives it to a runner again when the client has answered, or when it has not in time.

Cancellation and the time limit cut the action in progress short: its task is cancelled, which aborts the turn at the engine
and stops the tool's processes. Losing the lease (`LeaseLost`) stops everything without another word: the program is
someone else's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from agent_program.clock import Clock
from agent_program.errors import Overloaded, PlatformError, StoreUnavailable, Unavailable
from agent_program.ids import ProgramId, TenantId, ToolKey
from agent_program.states import ProgramState
from agent_program.tool_events import ToolEvent, ToolEventKind
from deployments.actions import client_key
from deployments.context_room import fitted, room_bytes
from deployments.journal import Claim, Journal, StoredProgram
from deployments.next_action import AskClient, End, RunTools, RunTurn, Wait, next_action, seconds_left
from deployments.ports import ContextOverflow, EngineClient, ReleasedProgram, ReplicaLost, ToolClient, TurnOutcome
from deployments.program import EndReason, ProgramFailure, ProgramRecord
from deployments.program_settings import ProgramSettings
from deployments.record_steps import apply_to_record, ended_step
from deployments.steps import PendingCall, Step, StepKind, apply, fold
from deployments.structured_logs import log_fields
from deployments.tool_batch import ToolBatch, ToolsUnavailable, ToolWait

logger = logging.getLogger(__name__)

#: A loop that is cancelled while its program ends has this long to finish doing so.
_LAST_WORD_S = 15.0


class ProgramLoop:
    """Runs one claimed program."""

    def __init__(
        self,
        claim: Claim,
        program: StoredProgram,
        *,
        runner: str,
        journal: Journal,
        engine: EngineClient,
        tools: ToolClient,
        clock: Clock,
        settings: ProgramSettings,
    ) -> None:
        self._claim = claim
        self._runner = runner
        self._spec = program.spec
        self._record = program.record
        self._progress = fold(program.spec, program.steps)
        self._journal = journal
        self._engine = engine
        self._tools = tools
        self._clock = clock
        self._settings = settings
        self._cancel_requested = asyncio.Event()
        self._write_lock = asyncio.Lock()
        self._is_put_down = False
        # Nobody was lost with a program that waited for its client.
        is_answered = program.steps[-1].kind is StepKind.ACTION_TAKEN
        self._was_put_down = is_answered or program.record.state is ProgramState.REQUIRES_ACTION

    @property
    def has_ended(self) -> bool:
        """The program's last step is in the journal, and its lease is over with it; what it held is still being given back."""
        return self._progress.ended

    def cancel(self) -> None:
        """End the program as cancelled, as soon as what runs has been stopped."""
        self._cancel_requested.set()

    async def run(self) -> None:
        """Run until the program has ended or waits for its client.

        Raises:
            LeaseLost: another runner has it.
            StoreUnavailable: the journal stayed away for longer than a lease lasts.
        """
        with log_fields(program_id=self._spec.id):
            await self._run()

    async def _run(self) -> None:
        resumed = self._progress.seq > 1 and not self._was_put_down
        await self._append((StepKind.PROGRAM_CLAIMED, {"runner": self._runner, "resumed": resumed}))
        if self._progress.pending and resumed:
            await self._tools.cancel(self._spec.id)
        while not (self._progress.ended or self._is_put_down):
            await self._step()

    async def fail(self, reason: EndReason, error: PlatformError) -> None:
        """End the program as failed, for a reason that lies outside of it. Raises what `run` raises."""
        await self._end(_failed(reason, error))

    async def _step(self) -> None:
        if self._cancel_requested.is_set():
            await self._end(End(state=ProgramState.CANCELLED, reason=EndReason.CANCELLED))
            return
        action = next_action(
            self._spec,
            self._progress,
            now_wall_s=self._clock.wall_s(),
            turn_attempts_max=self._settings.turn_attempts_max,
            claims_in_a_row_max=self._settings.claims_in_a_row_max,
        )
        match action:
            case End():
                await self._end(action)
            case RunTurn():
                with log_fields(turn=action.turn):
                    await self._cut_short_at_limits(self._turn(action))
            case RunTools():
                with log_fields(turn=action.turn):
                    await self._cut_short_at_limits(self._run_tools(action))
            case AskClient():
                await self._ask_client(action)
            case Wait():
                await self._put_down(action)

    async def _cut_short_at_limits(self, work: Awaitable[End | None]) -> None:
        """Await `work`, but no longer than until cancellation or the time limit; then end the program accordingly."""
        action = asyncio.ensure_future(work)
        cancelled = asyncio.ensure_future(self._cancel_requested.wait())
        try:
            await asyncio.wait(
                (action, cancelled),
                timeout=seconds_left(self._spec, self._clock.wall_s()),
                return_when=asyncio.FIRST_COMPLETED,
            )
            if action.done():
                end = action.result()
            elif self._cancel_requested.is_set():
                end = End(state=ProgramState.CANCELLED, reason=EndReason.CANCELLED)
            else:
                end = End(state=ProgramState.COMPLETED, reason=EndReason.MAX_SECONDS)
        finally:
            cancelled.cancel()
            if not action.done():
                await _stop(action)
        if end is not None:
            await self._end(end)

    # Turns

    async def _turn(self, action: RunTurn) -> End | None:
        await self._append((StepKind.TURN_STARTED, {"turn": action.turn, "attempt": action.attempt}))
        started_s = self._clock.now_s()
        try:
            outcome = await self._run_turn_when_possible(action)
        except ReplicaLost as error:
            logger.warning("program %s: turn %d lost its replica: %s", self._spec.id, action.turn, error)
            data = {"turn": action.turn, "attempt": action.attempt, "reason": error.message}
            await self._append((StepKind.TURN_REPLAYED, data))
            return None
        except ContextOverflow as error:
            return _failed(EndReason.CONTEXT_OVERFLOW, error)
        except (Unavailable, Overloaded) as error:
            return _failed(EndReason.ENGINE_UNAVAILABLE, error)
        except PlatformError as error:
            return _failed(EndReason.TURN_FAILED, error)
        await self._append((StepKind.TURN_FINISHED, self._turn_data(action, outcome, self._clock.now_s() - started_s)))
        return None

    async def _run_turn_when_possible(self, action: RunTurn) -> TurnOutcome:
        """Wait out a time without a replica: a refused turn may be sent again any number of times."""
        refused_since_s: float | None = None
        while True:
            try:
                return await self._engine.run_turn(action.body, action.hints)
            except ReplicaLost:
                raise
            except (Unavailable, Overloaded) as error:
                now_s = self._clock.now_s()
                if refused_since_s is None:
                    refused_since_s = now_s
                    await self._append((StepKind.TURN_DELAYED, {"turn": action.turn, "reason": error.message}))
                if now_s - refused_since_s >= self._settings.engine_wait_s:
                    raise
                await asyncio.sleep(self._settings.retry_s)

    def _turn_data(self, action: RunTurn, outcome: TurnOutcome, seconds: float) -> dict[str, Any]:
        repeated = min(self._progress.context_tokens, outcome.prompt_tokens)
        return {
            "turn": action.turn,
            "message": _bounded_calls(outcome.message, self._settings.tool_calls_per_turn_max),
            "finish_reason": outcome.finish_reason,
            "prompt_tokens": outcome.prompt_tokens,
            "context_tokens_max": outcome.context_tokens_max,
            "cached_tokens": outcome.cached_tokens,
            "recomputed_tokens": max(0, repeated - outcome.cached_tokens),
            "output_tokens": outcome.output_tokens,
            "seconds": seconds,
            "timings": None if outcome.timings is None else asdict(outcome.timings),
            "replica": outcome.replica,
            "lease": outcome.lease,
            "lease_ends": self._lease_ends(outcome.replica, (outcome.lease or {}).get("outcomes", {})),
        }

    def _lease_ends(self, replica: str | None, now: Mapping[str, int]) -> dict[str, int]:
        """A replica counts over its own life; what it had counted at the previous turn is in the journal already."""
        before = self._progress.lease_outcomes if replica == self._progress.replica else {}
        ends = {name: count - before.get(name, 0) for name, count in now.items()}
        return {name: count for name, count in ends.items() if count > 0}

    # Tools

    async def _run_tools(self, action: RunTools) -> End | None:
        batch = ToolBatch(
            program_id=ProgramId(self._spec.id),
            tenant_id=TenantId(self._spec.tenant_id),
            tool_specs=self._spec.tools_by_name,
            tool_timeout_s=self._spec.limits.tool_timeout_s,
            settings=self._settings,
            engine=self._engine,
            tools=self._tools,
            clock=self._clock,
        )
        announcements = [
            (StepKind.TOOL_STARTED, _announcement(action.turn, call, batch.key(call)))
            for call in action.calls
            if not call.is_started
        ]
        if announcements:
            await self._append(*announcements)

        bytes_max = room_bytes(
            context_tokens=self._progress.context_tokens,
            context_tokens_max=self._progress.context_tokens_max,
            turn_tokens_max=self._spec.limits.max_tokens_per_turn,
            calls=len(self._progress.call_order),
        )

        async def report(data: dict[str, Any], wait: ToolWait | None) -> None:
            data = {**data, "output": fitted(data["output"], bytes_max)}
            steps: list[tuple[StepKind, Mapping[str, Any]]] = [(StepKind.TOOL_FINISHED, {"turn": action.turn, **data})]
            if wait is not None:
                whole = {"turn": action.turn, "tool_key": wait.tool_key, "seconds": wait.seconds}
                steps.append((StepKind.TOOLS_FINISHED, whole))
            await self._append(*steps)

        try:
            await batch.run(action.calls, report)
        except ToolsUnavailable as error:
            return _failed(EndReason.TOOLS_UNAVAILABLE, error)
        except asyncio.CancelledError:
            # The sandbox must not outlive the decision to stop.
            await asyncio.shield(self._tools.cancel(self._spec.id))
            raise
        return None

    # The client

    async def _ask_client(self, action: AskClient) -> None:
        """Journal what the client is to do. The next action is to wait, which puts the program down."""
        lease_ends: dict[str, int] = {}
        if action.is_human and (released := await self._release_kv()) is not None:
            lease_ends = self._lease_ends(released.replica, released.lease_outcomes)
        calls = [call.model_dump(mode="json") for call in action.calls]
        data = {
            "turn": action.turn,
            "calls": calls,
            "expires_at": action.expires_at,
            "is_kv_released": action.is_human,
            "lease_ends": lease_ends,
        }
        await self._append((StepKind.ACTION_REQUIRED, data))
        if (key := client_key(action.calls)) is not None and not action.is_human:
            started = ToolEvent(program_id=ProgramId(self._spec.id), kind=ToolEventKind.STARTED, tool=key)
            await self._engine.tool_event(started)

    async def _put_down(self, wait: Wait) -> None:
        await self._journal.hand_back(self._claim, after_s=max(0.0, wait.expires_at - self._clock.wall_s()))
        self._is_put_down = True

    # The journal

    async def _end(self, end: End) -> None:
        # An ended program is nobody's: who ends it must give back what it held, also when told to stop in the middle.
        ending = asyncio.ensure_future(self._end_and_release(end))
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            await asyncio.wait({ending}, timeout=_LAST_WORD_S)
            raise

    async def _end_and_release(self, end: End) -> None:
        """The KV goes first, because the last step says how the last lease ended; but the end does not wait for it for long."""
        releasing = asyncio.ensure_future(self._release_kv())
        try:
            await asyncio.wait({releasing}, timeout=self._settings.release_wait_s)
            released = releasing.result() if releasing.done() else None
            lease_ends = self._lease_ends(released.replica, released.lease_outcomes) if released is not None else {}

            def last_step(seq: int, at: float) -> list[Step]:
                reason, error = end.reason, end.error
                step = ended_step(
                    self._record, seq=seq, at=at, state=end.state, reason=reason, error=error, lease_ends=lease_ends
                )
                return [step]

            await self._write(last_step)
            await self._release_sandbox()
        finally:
            await releasing

    async def _release_kv(self) -> ReleasedProgram | None:
        (released,) = await asyncio.gather(self._engine.release(self._spec.id), return_exceptions=True)
        if isinstance(released, BaseException):
            logger.error("the KV of program %s was not released", self._spec.id, exc_info=released)
            return None
        return released

    async def _release_sandbox(self) -> None:
        release = self._tools.release(
            self._spec.id,
            tenant_id=TenantId(self._spec.tenant_id),
            delete_workspace=self._settings.delete_workspaces,
        )
        (error,) = await asyncio.gather(release, return_exceptions=True)
        if isinstance(error, BaseException):
            logger.error("the sandbox of program %s was not released", self._spec.id, exc_info=error)

    async def _append(self, *entries: tuple[StepKind, Mapping[str, Any]]) -> None:
        def steps(seq: int, at: float) -> list[Step]:
            return [Step(seq=seq + n, kind=kind, at=at, data=data) for n, (kind, data) in enumerate(entries)]

        await self._write(steps)

    async def _write(self, build: Callable[[int, float], list[Step]]) -> None:
        """Journal the steps that `build` makes from the next seq and the time. Once begun it is carried through, also when
        the caller is cancelled: what the journal has, and only that, is what this loop believes."""
        await asyncio.shield(asyncio.ensure_future(self._write_locked(build)))

    async def _write_locked(self, build: Callable[[int, float], list[Step]]) -> None:
        async with self._write_lock:
            steps = build(self._progress.seq + 1, self._clock.wall_s())
            progress, record = self._progress, self._record
            for step in steps:
                progress = apply(self._spec, progress, step)
                record = apply_to_record(record, step)
            await self._append_when_possible(steps, record)
            self._progress, self._record = progress, record

    async def _append_when_possible(self, steps: Sequence[Step], record: ProgramRecord) -> None:
        """A store that is away for a while delays the program; one that stays away costs us the lease anyway."""
        give_up_s = self._clock.now_s() + self._settings.store_wait_s
        while True:
            try:
                await self._journal.append(self._claim, steps, record)
                return
            except StoreUnavailable:
                if self._clock.now_s() >= give_up_s:
                    raise
                await asyncio.sleep(self._settings.retry_s)


def _failed(reason: EndReason, error: PlatformError) -> End:
    failure = ProgramFailure(code=error.code, message=error.message)
    return End(state=ProgramState.FAILED, reason=reason, error=failure)


def _announcement(turn: int, call: PendingCall, key: ToolKey) -> dict[str, Any]:
    return {
        "turn": turn,
        "call_id": call.call_id,
        "tool": call.tool,
        "tool_key": key,
        "arguments": call.arguments,
    }


def _bounded_calls(message: Mapping[str, Any], calls_max: int) -> dict[str, Any]:
    """A model in a loop may ask for hundreds of calls; the first `calls_max` are kept, as if it had asked for no more."""
    calls = message.get("tool_calls") or []
    kept = {
        key: value for key, value in message.items() if key in ("role", "content", "reasoning_content", "reasoning")
    }
    if calls:
        kept["tool_calls"] = list(calls[:calls_max])
    return kept


async def _stop(task: asyncio.Future[Any]) -> None:
    """Cancel and wait; what it raises while stopping is its last word and is logged, not raised."""
    task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        current = asyncio.current_task()
        if current is not None and current.cancelling():
            raise
    except PlatformError as error:
        logger.warning("while stopping: %s", error)
