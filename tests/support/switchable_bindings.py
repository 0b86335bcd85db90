"""Bindings that can be cut off and slowed, for tests of what the router does without its store."""

from __future__ import annotations

import asyncio

from agent_program.errors import StoreUnavailable
from agent_program.ids import ProgramId, ReplicaId
from continuum_router.bindings import Bindings


class SwitchableBindings:
    """A port over another, with a switch (`away`), a gate that holds answers back (`gate`) and a count of questions."""

    def __init__(self, inner: Bindings) -> None:
        self._inner = inner
        self.away = False
        self.gate: asyncio.Event | None = None
        self.questions = 0

    async def get(self, program_id: ProgramId) -> ReplicaId | None:
        await self._pass()
        return await self._inner.get(program_id)

    async def bind(self, program_id: ProgramId, wanted: ReplicaId, *, replacing: ReplicaId | None = None) -> ReplicaId:
        await self._pass()
        return await self._inner.bind(program_id, wanted, replacing=replacing)

    async def release(self, program_id: ProgramId, replica_id: ReplicaId) -> bool:
        await self._pass()
        return await self._inner.release(program_id, replica_id)

    async def close(self) -> None:
        await self._inner.close()

    async def _pass(self) -> None:
        self.questions += 1
        if self.gate is not None:
            await self.gate.wait()
        if self.away:
            raise StoreUnavailable
