"""The parts of the platform as Serve runs them: each is a plain class of its package, plus what Serve adds.

Serve gives each replica its id (the one that the router binds programs to), runs constructors and methods on one event loop
that lives as long as the replica, calls `check_health` as the last step of a replica's start and every few seconds after it, and
`__del__` when it stops the replica. What needs the event loop therefore starts in the first health check. All parts answer `probe` (I work) and `metrics_page` (my id and my Prometheus text) to the ingress.

The store may come up later than the others: nobody connects to it in a constructor.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from agent_program.clock import SystemClock
from agent_program.ids import ReplicaId
from agent_program.turn import TurnHints
from continuum_router.exchange import ENGINE_NAMESPACE
from continuum_router.redis_drain_orders import RedisDrainOrders
from continuum_router.resilience import RetryBudget
from continuum_router.router_counters import all_counters
from deployments.api import Api
from deployments.chat_api import ChatApi
from deployments.edge_gate import EdgeGate
from deployments.embedded_store import EmbeddedStore
from deployments.explanation import Explainer
from deployments.fleet import INGRESS_PART, TOOLS_PART, RayFleet
from deployments.health import Health
from deployments.otlp_traces import OtlpTraces, make_exporter
from deployments.part_metrics import ingress_page, runner_page, store_page, tools_page
from deployments.program_service import ProgramService
from deployments.ray_clients import RayEngineClient, RayToolClient
from deployments.ray_workspaces import RayWorkspaceClient
from deployments.redis_journal import RedisJournal
from deployments.replica_api import ReplicaApi
from deployments.routed_replica import RoutedReplica
from deployments.runner import ProgramRunner
from deployments.settings import PlatformSettings, StoreSettings
from deployments.structured_logs import install as install_logs
from deployments.telemetry_settings import TelemetrySettings
from deployments.tool_catalog import ToolCatalog, ToolDirectory
from deployments.traces import NoTraces, TraceSink
from deployments.turn_minder import SentItem, TurnReport, TurnTaken
from engine_replicas.replica import EngineReplica
from engine_replicas.turn_stream import TurnClosed
from tool_runtime.actor import ToolActor
from tool_runtime.redis_history import redis_history

logger = logging.getLogger(__name__)


def replica_id() -> ReplicaId:
    """Serve's id of the replica that runs this code."""
    return ReplicaId(serve.get_replica_context().replica_id.unique_id)


def _traces(settings: TelemetrySettings) -> TraceSink:
    if settings.otlp_endpoint is None:
        return NoTraces()
    return OtlpTraces(make_exporter(settings), service_name=settings.service_name)


def _replicas_wanted(settings: PlatformSettings) -> dict[str, int]:
    """How many replicas must answer for a part to be whole; of engines that come and go, the fewest there ever are."""
    wanted: dict[str, int] = settings.replicas.model_dump(include={"engine", "tools", "runner"})
    scaling = settings.router.autoscaling
    return wanted if scaling is None else {**wanted, "engine": scaling.replicas_min}


def _own_handle() -> DeploymentHandle:
    """A handle of the deployment that runs this code: how one of its replicas asks the others."""
    context = serve.get_replica_context()
    return serve.get_deployment_handle(context.deployment, context.app_name)


class ServedEngine(EngineReplica):
    """One vLLM engine, and what it says to routers."""

    def __init__(self, settings: PlatformSettings) -> None:
        install_logs(settings.telemetry.log_format)
        super().__init__(
            settings.engine,
            settings.scheduling,
            settings.store.url,
            replica_id=replica_id(),
            history=redis_history(settings.tools.history, settings.store.url),
        )
        orders = RedisDrainOrders(settings.store.url, namespace=ENGINE_NAMESPACE)
        self._routed = RoutedReplica(self.replica_id, orders=orders, clock=SystemClock())

    async def chat(  # type: ignore[override]
        self,
        body: dict[str, Any],
        hints: TurnHints | None,
        *,
        placement: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[SentItem, None]:
        """A turn, between who takes it and how the replica stands afterwards. `placement` comes from the router."""
        is_done = False
        self._routed.turn_began(body, hints, placement)
        try:
            yield TurnTaken(replica_id=self.replica_id)
            # Closed with us: whoever leaves takes the turn along.
            async with aclosing(super().chat(body, hints)) as items:
                async for item in items:
                    is_done = is_done or isinstance(item, TurnClosed)
                    yield item
        finally:
            self._routed.turn_ended(is_done=is_done)
        yield TurnReport(report=self.record_routing_stats())

    def record_routing_stats(self) -> dict[str, Any]:
        reload_s = self._stats.get("prefill_reload_s_per_1k") if self._stats.get("prefill_samples") else None
        return self._routed.report(super().record_routing_stats(), reload_s_per_1k=reload_s)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What the autoscaling policy weighs; Serve asks every replica for it where there is such a policy."""
        return self._routed.scaling_stats({**self._stats, **super().record_routing_stats()})

    async def check_health(self) -> None:
        await super().check_health()
        self._routed.check_health()

    async def probe(self) -> str:
        await super().check_health()
        return self.replica_id

    def shutdown(self) -> None:
        if hasattr(self, "_routed"):
            self._routed.stop()
        super().shutdown()

    async def metrics_page(self) -> tuple[str, str]:
        return self.replica_id, await self.metrics_text()

    async def stats_here(self) -> tuple[str, dict[str, Any]]:
        """`stats` with the id of the replica whose they are."""
        return self.replica_id, await self.stats()

    async def standing_here(self) -> tuple[str, dict[str, Any]]:
        """What this replica says to routers, and how far it has drained."""
        status = self._routed.drain()
        drain = {"state": status.state.value, "reason": status.reason.value if status.reason else None}
        return self.replica_id, {"drain": drain, "report": self.record_routing_stats()}

    async def explain_here(self, program_id: str) -> tuple[str, dict[str, Any]]:
        """`explain` with the id of the replica that explains: asked of all, since a program that ended is bound to none."""
        placement = self._routed.placement_of(program_id)
        return self.replica_id, {**await self.explain(program_id), "placement": placement}


class ServedTools(ToolActor):
    """Sandboxes and the tools in them. An actor without a sandbox that holds is healthy, so that Serve does not start it again
    and again, and not ready."""

    def __init__(self, settings: PlatformSettings) -> None:
        install_logs(settings.telemetry.log_format)
        super().__init__(settings.tools, settings.store.url)

    async def probe(self) -> tuple[str, str]:
        """Its id, and which sandbox it has and what holds the limits there."""
        await self.check_health()
        await self.start()
        status = await self.status()
        return replica_id(), f"{status['sandbox']}: {status['limits_by']}"

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
        install_logs(settings.telemetry.log_format)
        clock = SystemClock()
        self._journal = RedisJournal(settings.store.url, clock)
        self._runner = ProgramRunner(
            journal=self._journal,
            engine=RayEngineClient(engine, router=settings.router, clock=clock),
            tools=RayToolClient(tools),
            clock=clock,
            settings=settings.programs,
            traces=_traces(settings.telemetry),
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
        return replica_id(), runner_page(self._runner.status(), all_counters())

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
        install_logs(settings.telemetry.log_format)
        clock = SystemClock()
        self._journal = RedisJournal(settings.store.url, clock)
        self._drain_orders = RedisDrainOrders(settings.store.url, namespace=ENGINE_NAMESPACE)
        directory = ToolDirectory(RayToolClient(parts["tools"]).registered, clock=clock)
        engine_client = RayEngineClient(engine, router=settings.router, clock=clock)
        model = settings.engine.model_name
        fleet, timeout_s = RayFleet(parts), settings.http.probe_timeout_s
        self._catalog = ToolCatalog(
            directory.specs,
            redis_history(settings.tools.history, settings.store.url),
            fleet=fleet,
            clock=clock,
            k_cold_start=settings.scheduling.k_cold_start,
            engine_timeout_s=timeout_s,
        )
        programs = ProgramService(
            journal=self._journal, model=model, tools=directory.specs, clock=clock, settings=settings.programs
        )
        self._api = Api(
            programs=programs,
            chat=ChatApi(
                engine_client,
                model=model,
                gate=EdgeGate(settings.router.admission, clock=clock),
                budget=RetryBudget(settings.router.retries),
            ),
            engine=engine_client,
            tools=self._catalog,
            workspaces=RayWorkspaceClient(parts[TOOLS_PART]),
            explainer=Explainer(fleet, timeout_s=timeout_s),
            health=Health(
                journal=self._journal,
                fleet=fleet,
                scraped=RayFleet({**parts, INGRESS_PART: _own_handle()}),
                replicas_wanted=_replicas_wanted(settings),
                clock=clock,
                probe_timeout_s=timeout_s,
            ),
            replicas=ReplicaApi(fleet, self._drain_orders, clock=clock, timeout_s=timeout_s),
            model=model,
            settings=settings.http,
        )

    async def metrics_page(self) -> tuple[str, str]:
        return replica_id(), ingress_page(self._api.status(), all_counters())

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._api.build()

    async def __del__(self) -> None:
        await self._journal.close()
        await self._catalog.close()
        await self._drain_orders.close()
