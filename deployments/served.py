"""The parts of the platform as Serve runs them: each is a plain class of its package, plus what Serve adds.

Serve gives each replica its id (the one that the router binds programs to), runs constructors and methods on one event loop
that lives as long as the replica, calls `check_health` as the last step of a replica's start and every few seconds after it, and
`__del__` when it stops the replica. What needs the event loop therefore starts in the first health check. All parts answer `probe` (I work) and `metrics_page` (my id and my Prometheus text) to the ingress.

The store may come up later than the others: nobody connects to it in a constructor.
"""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from agent_program.clock import SystemClock
from agent_program.ids import ReplicaId
from deployments.api import Api
from deployments.chat_api import ChatApi
from deployments.embedded_store import EmbeddedStore
from deployments.explanation import Explainer
from deployments.fleet import RayFleet
from deployments.health import Health
from deployments.part_metrics import runner_page, store_page, tools_page
from deployments.program_service import ProgramService
from deployments.ray_clients import RayEngineClient, RayToolClient
from deployments.redis_journal import RedisJournal
from deployments.runner import ProgramRunner
from deployments.settings import PlatformSettings, StoreSettings
from deployments.tool_catalog import ToolCatalog
from engine_replicas.replica import EngineReplica
from tool_runtime.actor import ToolActor
from tool_runtime.redis_history import RedisHistory
from tool_runtime.registry import BUILTIN_TOOLS

logger = logging.getLogger(__name__)


def replica_id() -> ReplicaId:
    """Serve's id of the replica that runs this code."""
    return ReplicaId(serve.get_replica_context().replica_id.unique_id)


class ServedEngine(EngineReplica):
    """One vLLM engine."""

    def __init__(self, settings: PlatformSettings) -> None:
        super().__init__(settings.engine, settings.scheduling, settings.store.url, replica_id=replica_id())

    async def probe(self) -> str:
        await self.check_health()
        return self.replica_id

    async def metrics_page(self) -> tuple[str, str]:
        return self.replica_id, await self.metrics_text()

    async def explain_here(self, program_id: str) -> tuple[str, dict[str, Any]]:
        """`explain` with the id of the replica that explains: asked of all, since a program that ended is bound to none."""
        return self.replica_id, await self.explain(program_id)


class ServedTools(ToolActor):
    """Sandboxes and the tools in them. An actor without a sandbox that holds is healthy, so that Serve does not start it again
    and again, and not ready."""

    def __init__(self, settings: PlatformSettings) -> None:
        super().__init__(settings.tools, settings.store.url)

    async def probe(self) -> str:
        await self.check_health()
        await self.start()
        return replica_id()

    async def record_routing_stats(self) -> dict[str, int]:
        """What the router weighs when it places a new program."""
        status = await self.status()
        return {"queued_calls": status["calls_waiting"], "live_sessions": status["live_sandboxes"]}

    async def metrics_page(self) -> tuple[str, str]:
        return replica_id(), tools_page(await self.status())

    async def __del__(self) -> None:
        await self.close()


class ServedRunner:
    """Runs programs. Serve wants a class of its own to construct; the work is `ProgramRunner`'s."""

    def __init__(self, settings: PlatformSettings, engine: DeploymentHandle, tools: DeploymentHandle) -> None:
        clock = SystemClock()
        self._journal = RedisJournal(settings.store.url, clock)
        self._runner = ProgramRunner(
            journal=self._journal,
            engine=RayEngineClient(engine),
            tools=RayToolClient(tools),
            tool_specs=BUILTIN_TOOLS,
            clock=clock,
            settings=settings.programs,
        )
        self._is_started = False

    async def check_health(self) -> None:
        if not self._is_started:
            self._is_started = True
            self._runner.start()
        self._runner.check_health()

    async def probe(self) -> str:
        await self.check_health()
        return replica_id()

    async def metrics_page(self) -> tuple[str, str]:
        return replica_id(), runner_page(self._runner.status())

    async def __del__(self) -> None:
        await self._runner.close()
        await self._journal.close()


class ServedStore:
    """The embedded Valkey server."""

    def __init__(self, settings: StoreSettings) -> None:
        self._store = EmbeddedStore(
            port=settings.embedded_port,
            data_dir=settings.embedded_data_dir,
            memory_mib=settings.embedded_memory_mib,
        )
        self._is_started = False

    async def check_health(self) -> None:
        if not self._is_started:
            await self._store.start()
            self._is_started = True
        await self._store.check_health()

    async def probe(self) -> str:
        await self.check_health()
        return replica_id()

    async def metrics_page(self) -> tuple[str, str]:
        return replica_id(), store_page(await self._store.status())

    async def __del__(self) -> None:
        await self._store.stop()


class ServedIngress:
    """The REST API. `parts`: handles of everything that readiness depends on, by part name."""

    def __init__(
        self,
        settings: PlatformSettings,
        engine: DeploymentHandle,
        parts: dict[str, DeploymentHandle],
    ) -> None:
        clock = SystemClock()
        self._journal = RedisJournal(settings.store.url, clock)
        self._history = RedisHistory(settings.store.url)
        engine_client = RayEngineClient(engine)
        model = settings.engine.model_name
        fleet, timeout_s = RayFleet(parts), settings.http.probe_timeout_s
        programs = ProgramService(
            journal=self._journal, model=model, tool_specs=BUILTIN_TOOLS, clock=clock, settings=settings.programs
        )
        self._api = Api(
            programs=programs,
            chat=ChatApi(engine_client, model=model),
            engine=engine_client,
            tools=ToolCatalog(BUILTIN_TOOLS, self._history),
            explainer=Explainer(fleet, timeout_s=timeout_s),
            health=Health(journal=self._journal, fleet=fleet, probe_timeout_s=timeout_s),
            model=model,
            settings=settings.http,
        )

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._api.build()

    async def __del__(self) -> None:
        await self._journal.close()
        await self._history.close()
