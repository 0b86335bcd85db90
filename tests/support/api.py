"""The REST API over in-memory parts, spoken to over ASGI."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx

from agent_program.clock import ManualClock
from agent_program.ids import ReplicaId
from continuum_router.config import AdmissionSettings, RetrySettings
from continuum_router.drain_orders import MemoryDrainOrders
from continuum_router.resilience import RetryBudget
from deployments.api import Api
from deployments.chat_api import ChatApi
from deployments.edge_gate import EdgeGate
from deployments.explanation import Explainer
from deployments.fleet import PartAnswer
from deployments.health import Health
from deployments.memory_chat import Item, ScriptedChat, TableFleet
from deployments.memory_clients import ScriptedEngine, ScriptedTools
from deployments.memory_journal import MemoryJournal
from deployments.program_loop import ProgramLoop
from deployments.program_service import ProgramService
from deployments.program_settings import ProgramSettings
from deployments.replica_api import ReplicaApi
from deployments.settings import HttpSettings
from deployments.tool_catalog import ToolCatalog
from engine_replicas.turn_stream import TurnClosed, TurnOpened
from support.workspaces import MemoryWorkspaces
from tool_runtime.history import MemoryHistory
from tool_runtime.registry import BUILTIN_TOOLS, ToolSpec

MODEL = "small"
ALL_WELL = {
    ("engine", "probe"): PartAnswer(answers=("r1", "r2"), faults=()),
    ("tools", "probe"): PartAnswer(answers=("t1",), faults=()),
    ("engine", "metrics_page"): PartAnswer(
        answers=(
            ("r1", '# TYPE vllm:running gauge\nvllm:running{engine="0"} 3.0\n'),
            ("r2", '# TYPE vllm:running gauge\nvllm:running{engine="0"} 4.0\n'),
        ),
        faults=("it is gone",),
    ),
    ("tools", "metrics_page"): PartAnswer(answers=(), faults=()),
}

OPENED = TurnOpened(status=200, is_stream=False, replica_id=ReplicaId("r1"))
STREAMING = TurnOpened(status=200, is_stream=True, replica_id=ReplicaId("r1"))
CLOSED = TurnClosed(prompt_tokens=10, cached_tokens=0, output_tokens=1, tool_keys=(), finish_reason="stop", lease=None)


class ApiBench:
    """An API and the parts behind it."""

    def __init__(
        self,
        turns: Sequence[Sequence[Item]] = (),
        *,
        journal: MemoryJournal | None = None,
        admission: AdmissionSettings | None = None,
        **settings: Any,
    ) -> None:
        self.clock = ManualClock()
        self.journal = journal or MemoryJournal(self.clock)
        self.engine = ScriptedChat(turns)
        self.history = MemoryHistory(clock=self.clock)
        self.fleet = TableFleet(ALL_WELL)
        self.fleet.answers["engine", "stats_here"] = PartAnswer(answers=(), faults=())
        self.workspaces = MemoryWorkspaces()
        self.drain_orders = MemoryDrainOrders(clock=self.clock)
        programs = ProgramSettings(heartbeat_s=0.05)
        http = HttpSettings(**{"body_bytes_max": 10_000, **settings})
        self.catalog = ToolCatalog(self._registered, self.history, fleet=self.fleet, clock=self.clock)
        self.app = Api(
            programs=ProgramService(
                journal=self.journal, model=MODEL, tools=self._registered, clock=self.clock, settings=programs
            ),
            chat=ChatApi(
                self.engine,
                model=MODEL,
                gate=EdgeGate(admission or AdmissionSettings(), clock=self.clock),
                budget=RetryBudget(RetrySettings()),
            ),
            engine=self.engine,
            workspaces=self.workspaces,
            tools=self.catalog,
            explainer=Explainer(self.fleet, timeout_s=5.0),
            health=Health(
                journal=self.journal,
                fleet=self.fleet,
                replicas_wanted={"engine": 2},
                clock=self.clock,
                probe_timeout_s=5.0,
            ),
            replicas=ReplicaApi(self.fleet, self.drain_orders, clock=self.clock, timeout_s=5.0),
            model=MODEL,
            settings=http,
        ).build()

    async def _registered(self) -> Mapping[str, ToolSpec]:
        return BUILTIN_TOOLS

    def explained(self, program_id: str, **replicas: dict[str, Any]) -> None:
        """What each engine replica's scheduler says of a program."""
        answer = PartAnswer(answers=tuple(replicas.items()), faults=())
        self.fleet.answers["engine", "explain_here", program_id] = answer

    async def run_one(self, engine: ScriptedEngine, tools: ScriptedTools | None = None) -> None:
        """What a runner does: take the next program and run it to its end."""
        claim = await self.journal.claim("runner", lease_s=60.0)
        assert claim is not None
        loop = ProgramLoop(
            claim,
            await self.journal.load(claim.program_id),
            runner="runner",
            journal=self.journal,
            engine=engine,
            tools=tools or ScriptedTools(),
            clock=self.clock,
            settings=ProgramSettings(),
        )
        await loop.run()

    @asynccontextmanager
    async def client(self) -> AsyncIterator[httpx.AsyncClient]:
        # An error that nobody foresaw is a response, as it is in production; tests look at the response.
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://api") as client:
            yield client


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error of a response, which must have OpenAI's shape."""
    body = response.json()
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert isinstance(error["code"], str)
    return error
