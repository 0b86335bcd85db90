"""What people can do with programs: the use cases behind the REST API, without HTTP."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator, Mapping

from agent_program.clock import Clock
from agent_program.errors import InvalidRequest, ProgramNotFound
from agent_program.ids import DEFAULT_TENANT, parse_program_id
from agent_program.states import ProgramState
from deployments.journal import IdempotencyKey, Journal, Page, program_topic
from deployments.program import ProgramRecord
from deployments.program_settings import ProgramSettings
from deployments.steps import Step
from deployments.wire import parse_submission
from tool_runtime.registry import ToolSpec

_IDEMPOTENCY_KEY_CHARS_MAX = 255
_EVENT_BATCH = 256


class ProgramService:
    """Submit, read, follow, cancel, delete."""

    def __init__(
        self,
        *,
        journal: Journal,
        model: str,
        tool_specs: Mapping[str, ToolSpec],
        clock: Clock,
        settings: ProgramSettings,
    ) -> None:
        self._journal = journal
        self._model = model
        self._tool_specs = tool_specs
        self._clock = clock
        self._settings = settings

    async def submit(self, body: object, *, idempotency_key: str | None = None) -> ProgramRecord:
        """Accept a program.

        Raises:
            InvalidRequest (and its kinds): nothing was accepted.
            Overloaded, StoreUnavailable: try again later.
        """
        spec = parse_submission(
            body,
            model=self._model,
            tools=self._tool_specs,
            settings=self._settings,
            now_wall_s=self._clock.wall_s(),
        )
        return await self._journal.create(
            spec, queued_max=self._settings.queued_max, idempotency=_idempotency(idempotency_key, body)
        )

    async def get(self, program_id: str) -> ProgramRecord:
        return await self._journal.get(parse_program_id(program_id))

    async def steps(self, program_id: str) -> tuple[Step, ...]:
        """The program's whole journal, which its limits bound."""
        found: list[Step] = []
        while True:
            batch = await self._journal.steps(parse_program_id(program_id), after_seq=len(found), limit=_EVENT_BATCH)
            found.extend(batch)
            if len(batch) < _EVENT_BATCH:
                return tuple(found)

    async def list(self, *, state: str | None, limit: int, after: str | None) -> Page:
        try:
            wanted = None if state is None else ProgramState(state)
        except ValueError:
            states = ", ".join(ProgramState)
            raise InvalidRequest(f"state must be one of {states}", param="state") from None
        return await self._journal.list(
            state=wanted, limit=limit, after=None if after is None else parse_program_id(after, what="after")
        )

    async def cancel(self, program_id: str) -> ProgramRecord:
        return await self._journal.request_cancel(parse_program_id(program_id))

    async def delete(self, program_id: str) -> None:
        await self._journal.delete(parse_program_id(program_id))

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


def _idempotency(key: str | None, body: object) -> IdempotencyKey | None:
    if key is None:
        return None
    if not 0 < len(key) <= _IDEMPOTENCY_KEY_CHARS_MAX:
        message = f"Idempotency-Key must have 1 to {_IDEMPOTENCY_KEY_CHARS_MAX} characters"
        raise InvalidRequest(message, param="Idempotency-Key")
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return IdempotencyKey(tenant_id=DEFAULT_TENANT, key=key, fingerprint=digest)
