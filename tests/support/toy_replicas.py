"""A Serve app of toy replicas behind the real router: each answers who it is, so that a test sees where requests went.

`build` is the import path of the app. It takes the router's keyword arguments, so that a deployment is described wholly by a
Serve config, and replicas survive a change of their number. (No postponed annotations here: Serve reads the type of `build`'s parameter to
validate its arguments, and does not resolve strings.)
"""

import asyncio
import os
from typing import Any

from pydantic import BaseModel
from ray import serve
from ray.serve.config import RequestRouterConfig

from continuum_router.config import RouterSettings
from continuum_router.ray_router import router_config


class ToyArgs(BaseModel):
    """What `build` takes."""

    store_url: str
    namespace: str = "engine"
    settings: RouterSettings = RouterSettings()
    max_ongoing_requests: int = 64


class ToyReplica:
    """Says which replica and process it is; can be slow, so that requests overlap."""

    def __init__(self) -> None:
        self._report: dict[str, int] = {}
        self._seen = 0

    async def turn(self, slow_s: float = 0.0) -> dict[str, Any]:
        self._seen += 1
        await asyncio.sleep(slow_s)
        return self._who()

    async def tool_event(self) -> dict[str, Any]:
        return self._who()

    async def release_program(self) -> dict[str, Any]:
        return self._who()

    async def report_load(self, report: dict[str, int]) -> None:
        """From now on this is what it reports as its load."""
        self._report = report

    def record_routing_stats(self) -> dict[str, int]:
        return self._report

    def _who(self) -> dict[str, Any]:
        context = serve.get_replica_context()
        return {"replica": context.replica_id.unique_id, "pid": os.getpid(), "seen": self._seen}


class ToyFrontDoor:
    """Sends requests on, as the ingress does: several at once from within one request."""

    def __init__(self, replicas: Any) -> None:
        self._replicas = replicas

    async def parallel(self, program_id: str, calls: int, slow_s: float = 0.0) -> list[str]:
        """That many turns of one program at once, all from within this one request."""
        handle = self._replicas.options(session_id=program_id).turn
        answers = await asyncio.gather(*(handle.remote(slow_s) for _ in range(calls)))
        return [answer["replica"] for answer in answers]

    async def __call__(self, request: Any) -> list[str]:
        """The same over HTTP, where Serve gives all of them one internal request id."""
        query = request.query_params
        return await self.parallel(query["program"], int(query["calls"]), 0.1)


def build(args: ToyArgs) -> serve.Application:
    config: RequestRouterConfig = router_config(args.store_url, namespace=args.namespace, settings=args.settings)
    replicas = serve.deployment(
        ToyReplica,
        name="ToyReplica",
        request_router_config=config,
        max_ongoing_requests=args.max_ongoing_requests,
        ray_actor_options={"num_cpus": 0},
        health_check_period_s=1,
        graceful_shutdown_timeout_s=1,
    ).bind()
    door = serve.deployment(
        ToyFrontDoor, name="ToyFrontDoor", ray_actor_options={"num_cpus": 0}, max_ongoing_requests=64
    )
    return door.bind(replicas)
