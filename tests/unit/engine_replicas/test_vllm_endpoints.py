"""The routes that vLLM's own API server gets: JSON in, utility calls out, and clear refusals."""

from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from engine_replicas.vllm_endpoints import ContinuumEndpoints


class Core:
    """An engine core that records the calls, and fails those it is told to."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.is_dead = False

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        if self.is_dead:
            raise RuntimeError("EngineCore has no such method")
        self.calls.append((method, *args))
        return None if method == "continuum_tool_event" else {"called": method}


@pytest.fixture
def core() -> Core:
    return Core()


@pytest.fixture
async def server(core: Core) -> Any:
    app = FastAPI()
    plugin = ContinuumEndpoints()
    plugin.attach_router(app)
    await plugin.init_state(SimpleNamespace(engine_core=core), app.state, None)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
        yield client


async def test_each_route_is_one_utility_call(server: httpx.AsyncClient, core: Core) -> None:
    assert (await server.get("/continuum/stats")).json() == {"called": "continuum_stats"}
    assert (await server.get("/continuum/programs/a")).json() == {"called": "continuum_explain"}
    await server.post("/continuum/programs/a/lease", json={"tool": "pytest"})
    event = {"kind": "finished", "tool": "pytest", "elapsed_s": 2.5, "outcome": "ok"}
    assert (await server.post("/continuum/programs/a/tool_events", json=event)).status_code == 202
    assert (await server.delete("/continuum/programs/a")).json() == {"called": "continuum_release"}
    assert core.calls == [
        ("continuum_stats",),
        ("continuum_explain", "a"),
        ("continuum_lease_arm", "a", "0", "pytest", False),
        ("continuum_tool_event", "a", "finished", "pytest", 2.5, "ok"),
        ("continuum_release", "a"),
    ]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("a/lease", {"tol": "pytest"}),
        ("a/lease", {"tool": ""}),
        ("a/tool_events", {"kind": "exploded", "tool": "pytest"}),
        ("a/tool_events", {"kind": "started", "tool": "pytest", "elapsed_s": -1}),
        ("a/tool_events", {"kind": "started"}),
        (f"{'a' * 257}/lease", {}),
    ],
)
async def test_a_body_that_makes_no_sense_is_refused_before_any_call(
    server: httpx.AsyncClient, core: Core, path: str, body: dict[str, Any]
) -> None:
    assert (await server.post(f"/continuum/programs/{path}", json=body)).status_code == 422
    assert core.calls == []


async def test_an_engine_with_another_scheduler_gets_a_503_that_says_what_is_missing(
    server: httpx.AsyncClient, core: Core
) -> None:
    core.is_dead = True
    response = await server.get("/continuum/stats")
    assert response.status_code == 503
    assert "make_scheduler" in response.json()["detail"]


async def test_a_server_without_an_engine_says_so() -> None:
    app = FastAPI()
    plugin = ContinuumEndpoints()
    plugin.attach_router(app)
    await plugin.init_state(None, app.state, None)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
        assert (await client.get("/continuum/stats")).status_code == 503
