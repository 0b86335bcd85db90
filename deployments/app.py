"""The Serve application. Every class becomes a deployment here and nowhere else; building it has no side effects.

    Ingress ─► ProgramRunner ─► EngineReplica (program-sticky) ─► one vLLM engine each
       │             └────────► ToolActor     (program-sticky) ─► sandboxes
       ├────────────────────────► EngineReplica, ToolActor, EmbeddedStore (chat, readiness, metrics)
       └── EmbeddedStore only where no `store.redis_url` is set

    serve run deployments.app:build_app              every setting at its default
    serve deploy serve_config.yaml                   settings as `args`
    serve build deployments.app:app                  for those who want every deployment's options in one file

This module must not postpone the evaluation of annotations: Serve reads `build_app`'s to find the settings model, and
validates with it what it passes.
"""

from typing import Any

from ray import serve
from ray.serve import Application, Deployment
from ray.serve.config import BackpressureConfig

from continuum_router.exchange import ENGINE_NAMESPACE, TOOLS_NAMESPACE
from continuum_router.ray_autoscaling import autoscaling_config
from continuum_router.ray_router import router_config
from deployments.fleet import ENGINE_PART, TOOLS_PART
from deployments.served import ServedEngine, ServedIngress, ServedRunner, ServedStore, ServedTools
from deployments.settings import PlatformSettings
from engine_replicas.engine_config import Device, TensorParallelExecutor

APP_NAME = "continuum"
_GIB = 1024**3
#: How often a stopping replica looks whether what it runs has finished. Serve's own two seconds are most of an idle shutdown.
_DRAIN_LOOK_S = 0.5
#: Names by which router settings and dashboards know the deployments.
ENGINE, TOOLS, RUNNER, STORE, INGRESS = "EngineReplica", "ToolActor", "ProgramRunner", "EmbeddedStore", "Ingress"


def build_app(settings: PlatformSettings) -> Application:
    """The application that `settings` describe."""
    engine = _engine(settings).bind(settings)
    tools = _tools(settings).bind(settings)
    runner = _service(settings, RUNNER, ServedRunner, settings.replicas.runner).bind(settings, engine, tools)
    parts = {ENGINE_PART: engine, TOOLS_PART: tools, "runner": runner}
    if settings.store.is_embedded:
        parts["embedded_store"] = _service(settings, STORE, ServedStore, 1).bind(settings.store)
    return _ingress(settings).bind(settings, engine, parts)


def _engine(settings: PlatformSettings) -> Deployment:
    replicas, router = settings.replicas, settings.router
    return serve.deployment(
        name=ENGINE,
        max_ongoing_requests=replicas.turns_per_engine_max,
        request_router_config=router_config(settings.store.url, namespace=ENGINE_NAMESPACE, settings=router),
        graceful_shutdown_timeout_s=replicas.drain_s,
        **_engine_replicas(settings),
        **_health_options(settings),
        **_engine_resources(settings),
    )(ServedEngine)


def _engine_replicas(settings: PlatformSettings) -> dict[str, Any]:
    scaling = settings.router.autoscaling
    if scaling is None:
        return {"num_replicas": settings.replicas.engine}
    config = autoscaling_config(settings.store.url, namespace=ENGINE_NAMESPACE, settings=scaling)
    return {"num_replicas": "auto", "autoscaling_config": config}


def _engine_resources(settings: PlatformSettings) -> dict[str, Any]:
    """What Ray sets aside for one engine.

    Tensor parallel by processes: the replica holds all its GPUs. By Ray actors: a placement group on one node, a bundle for
    each GPU; the replica itself sits in the first and its workers take the GPUs.
    """
    engine, replicas = settings.engine, settings.replicas
    memory = None if replicas.engine_memory_gib is None else int(replicas.engine_memory_gib * _GIB)
    actor = {"num_cpus": replicas.engine_cpus, "memory": memory, "accelerator_type": replicas.engine_gpu_type}
    if engine.device is Device.CPU:
        return {"ray_actor_options": _given(actor)}
    if engine.tensor_parallel_executor is TensorParallelExecutor.RAY:
        bundle = {"CPU": replicas.engine_cpus, "GPU": 1.0}
        if replicas.engine_gpu_type is not None:
            # In a group the bundles choose the node; an actor option would ask for what no bundle holds.
            bundle[f"accelerator_type:{replicas.engine_gpu_type}"] = 0.001
        return {
            "ray_actor_options": {"num_cpus": replicas.engine_cpus, "num_gpus": 0},
            "placement_group_bundles": [bundle] * engine.tensor_parallel_size,
            "placement_group_strategy": "STRICT_PACK",
        }
    return {"ray_actor_options": _given({**actor, "num_gpus": engine.tensor_parallel_size})}


def _tools(settings: PlatformSettings) -> Deployment:
    replicas = settings.replicas
    return serve.deployment(
        name=TOOLS,
        num_replicas=replicas.tools,
        max_ongoing_requests=replicas.calls_per_tool_actor_max,
        request_router_config=router_config(settings.store.url, namespace=TOOLS_NAMESPACE, settings=settings.router),
        graceful_shutdown_timeout_s=replicas.drain_s,
        ray_actor_options={"num_cpus": replicas.service_cpus},
        **_health_options(settings),
    )(ServedTools)


def _service(settings: PlatformSettings, name: str, served: type, num_replicas: int) -> Deployment:
    return serve.deployment(
        name=name,
        num_replicas=num_replicas,
        ray_actor_options={"num_cpus": settings.replicas.service_cpus},
        # Probes and metrics only: what these parts do, they do on their own.
        max_ongoing_requests=100,
        **_health_options(settings),
    )(served)


def _ingress(settings: PlatformSettings) -> Deployment:
    replicas = settings.replicas
    return serve.deployment(
        name=INGRESS,
        num_replicas=replicas.ingress,
        max_ongoing_requests=replicas.requests_per_ingress_max,
        # So many more may wait in each proxy; then it answers 429 itself.
        max_queued_requests=replicas.requests_per_ingress_max,
        backpressure_config=BackpressureConfig(status_code=429, retry_after_s=1),
        ray_actor_options={"num_cpus": replicas.service_cpus},
        **_health_options(settings),
    )(serve.ingress()(ServedIngress))


def _health_options(settings: PlatformSettings) -> dict[str, Any]:
    replicas = settings.replicas
    return {
        "graceful_shutdown_wait_loop_s": _DRAIN_LOOK_S,
        "health_check_period_s": replicas.health_period_s,
        "health_check_timeout_s": replicas.health_timeout_s,
        "max_constructor_retry_count": replicas.startup_attempts_max,
    }


def _given(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def __getattr__(name: str) -> Any:
    """`app`: the application with default settings, for `serve build`, which takes no builder. Built when asked for."""
    if name == "app":
        return build_app(PlatformSettings())
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
