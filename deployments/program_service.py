"""What people can do with programs: the use cases behind the REST API, without HTTP."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from agent_program.clock import Clock
from agent_program.errors import IllegalTransition, InvalidRequest, Overloaded, ProgramNotFound
from agent_program.ids import ProgramId, TenantId, parse_program_id
from agent_program.states import ProgramState
from deployments.access import ANYBODY, Caller
from deployments.actions import ClientWait, take
from deployments.chrome_trace import chrome_trace
from deployments.journal import IdempotencyKey, Journal, Page, program_topic
from deployments.program import ProgramRecord
from deployments.program_settings import ProgramSettings
from deployments.program_trace import program_span
from deployments.steps import Step, fold
from deployments.wire import PreviousProgram, parse_submission, previous_program_id
from deployments.wire_client_tools import parse_answers
from tool_runtime.registry import ToolSpec

_IDEMPOTENCY_KEY_CHARS_MAX = 255
_EVENT_BATCH = 256
#: Two answers at once meet; the later one looks again.
_ACT_ATTEMPTS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Answered:
    """A program after its client has answered."""

    record: ProgramRecord
    #: The wait for the client's own tools, where the last answer has just ended it.
    wait: ClientWait | None


class ProgramService:
    """Submit, read, follow, answer, cancel, delete. A program of another tenant is no program at all."""

    def __init__(
        self,
        *,
        journal: Journal,
        model: str,
        tools: Callable[[], Awaitable[Mapping[str, ToolSpec]]],
        clock: Clock,
        settings: ProgramSettings,
    ) -> None:
        """`tools` gives the tools that are registered now, by name."""
        self._journal = journal
        self._model = model
        self._tools = tools
        self._clock = clock
        self._settings = settings

    async def submit(
        self, body: object, *, caller: Caller = ANYBODY, idempotency_key: str | None = None
    ) -> ProgramRecord:
        """Accept a program.

        Raises:
            InvalidRequest (and its kinds): nothing was accepted.
            Overloaded, StoreUnavailable: try again later.
        """
        spec = parse_submission(
            body,
            tenant_id=caller.tenant_id,
            previous=await self._previous(previous_program_id(body), caller),
            model=self._model,
            tools=await self._tools(),
            settings=self._settings,
            now_wall_s=self._clock.wall_s(),
        )
        return await self._journal.create(
            spec,
            queued_max=self._settings.queued_max,
            idempotency=_idempotency(caller.tenant_id, idempotency_key, body),
        )

    async def _previous(self, program_id: ProgramId | None, caller: Caller) -> PreviousProgram | None:
        """Raises ProgramNotFound, or IllegalTransition where the program still goes on."""
        if program_id is None:
            return None
        await self.get(program_id, caller)
        stored = await self._journal.load(program_id)
        if not stored.record.state.is_final:
            raise IllegalTransition(f"program {program_id} has not ended", param="previous_program_id")
        progress = fold(stored.spec, stored.steps)
        if progress.pending:
            message = f"program {program_id} ended before its tool calls did: no conversation goes on from there"
            raise IllegalTransition(message, param="previous_program_id")
        return PreviousProgram(messages=progress.messages, tool_specs=stored.spec.tool_specs)

    async def get(self, program_id: str, caller: Caller = ANYBODY) -> ProgramRecord:
        """Raises ProgramNotFound, also for a program that the caller may not see."""
        record = await self._journal.get(parse_program_id(program_id))
        if not caller.may_see(record.tenant_id):
            raise ProgramNotFound(f"no program {program_id!r}", param="program_id")
        return record

    async def steps(self, program_id: str, caller: Caller = ANYBODY) -> tuple[Step, ...]:
        """The program's whole journal, which its limits bound."""
        await self.get(program_id, caller)
        found: list[Step] = []
        while True:
            batch = await self._journal.steps(parse_program_id(program_id), after_seq=len(found), limit=_EVENT_BATCH)
            found.extend(batch)
            if len(batch) < _EVENT_BATCH:
                return tuple(found)

    async def list(self, *, caller: Caller = ANYBODY, state: str | None, limit: int, after: str | None) -> Page:
        try:
            wanted = None if state is None else ProgramState(state)
        except ValueError:
            states = ", ".join(ProgramState)
            raise InvalidRequest(f"state must be one of {states}", param="state") from None
        return await self._journal.list(
            state=wanted,
            limit=limit,
            after=None if after is None else parse_program_id(after, what="after"),
            tenant_id=None if caller.is_admin else caller.tenant_id,
        )

    async def answer(self, program_id: str, body: object, caller: Caller = ANYBODY) -> Answered:
        """Take what a client answers to the calls that its program waits for. The same answers again change nothing.

        Raises:
            InvalidRequest (and its kinds): nothing was taken.
            StoreUnavailable: try again later.
        """
        answers = parse_answers(body, self._settings)
        await self.get(program_id, caller)
        for _ in range(_ACT_ATTEMPTS):
            stored = await self._journal.load(parse_program_id(program_id))
            taken = take(stored.record, stored.steps, answers, now_wall_s=self._clock.wall_s())
            if not taken.steps or await self._journal.act(program_id, taken.steps, taken.record):
                return Answered(record=await self._journal.get(program_id), wait=taken.wait)
        raise Overloaded("the program is being answered by many at once", retry_after_s=1)

    async def cancel(self, program_id: str, caller: Caller = ANYBODY) -> ProgramRecord:
        await self.get(program_id, caller)
        return await self._journal.request_cancel(parse_program_id(program_id))

    async def delete(self, program_id: str, caller: Caller = ANYBODY) -> None:
        await self.get(program_id, caller)
        await self._journal.delete(parse_program_id(program_id))

    async def trace(self, program_id: str, caller: Caller = ANYBODY) -> dict[str, Any]:
        """The program's timeline as Chrome trace JSON."""
        steps = await self.steps(program_id, caller)
        record = await self.get(program_id, caller)
        return chrome_trace(program_span(record, steps, now_s=self._clock.wall_s()))

    async def follow(self, program_id: str, *, after_seq: int) -> AsyncIterator[Step | None]:
        """Steps with a larger seq as they are journaled, to the program's last; None after `heartbeat_s` of silence.

        The end of the program ends it, and so does its deletion.
        """
        async with self._journal.listen(program_topic(program_id)) as signal:
            while True:
                try:
                    # In this order: steps of a program that was final before they were read are all there.
                    is_final = (await self._journal.get(program_id)).state.is_final
                    steps = await self._journal.steps(program_id, after_seq=after_seq, limit=_EVENT_BATCH)
                except ProgramNotFound:
                    return
                for step in steps:
                    yield step
                    after_seq = step.seq
                if is_final and not steps:
                    return
                if not steps and not await signal.wait(self._settings.heartbeat_s):
                    yield None


def _idempotency(tenant_id: TenantId, key: str | None, body: object) -> IdempotencyKey | None:
    if key is None:
        return None
    if not 0 < len(key) <= _IDEMPOTENCY_KEY_CHARS_MAX:
        message = f"Idempotency-Key must have 1 to {_IDEMPOTENCY_KEY_CHARS_MAX} characters"
        raise InvalidRequest(message, param="Idempotency-Key")
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return IdempotencyKey(tenant_id=tenant_id, key=key, fingerprint=digest)
