"""Operators look at engine replicas and empty them."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from agent_program.ids import ReplicaId
from continuum_router.draining import Departure, DrainOrder
from deployments.access import digest
from deployments.fleet import PartAnswer
from support.api import ApiBench, error_of

REPORT = {"waiting": 0, "running": 1}
DRAIN = {"state": "serving", "reason": None}


def bench(**settings: Any) -> ApiBench:
    made = ApiBench(**settings)
    standings = (("r2", {"drain": DRAIN, "report": REPORT}), ("r1", {"drain": DRAIN, "report": REPORT}))
    made.fleet.answers["engine", "standing_here"] = PartAnswer(answers=standings, faults=())
    return made


async def send(made: ApiBench, method: str, path: str, **options: Any) -> httpx.Response:
    async with made.client() as client:
        return await client.request(method, path, **options)


async def test_replicas_are_listed_with_what_they_say_to_routers() -> None:
    response = await send(bench(), "GET", "/v1/replicas")
    assert response.status_code == 200
    assert response.json() == {
        "object": "list",
        "data": [{"id": name, "object": "replica", "drain": DRAIN, "report": REPORT} for name in ("r1", "r2")],
    }


async def test_a_replica_is_told_to_leave_by_a_deadline() -> None:
    made = bench()
    response = await send(made, "POST", "/v1/replicas/r1/drain", json={"deadline_s": 30})
    assert response.status_code == 202
    deadline = made.clock.wall_s() + 30
    assert response.json()["deadline_at"] == deadline
    expected = DrainOrder(replica_id=ReplicaId("r1"), deadline_wall_s=deadline, departure=Departure.LEAVE)
    assert await made.drain_orders.get(ReplicaId("r1")) == expected


async def test_without_a_body_it_has_ten_minutes() -> None:
    made = bench()
    response = await send(made, "POST", "/v1/replicas/r1/drain")
    assert response.json()["deadline_at"] == made.clock.wall_s() + 600


async def test_an_order_is_withdrawn_once() -> None:
    made = bench()
    await send(made, "POST", "/v1/replicas/r1/drain", json={"departure": "wait"})
    assert (await send(made, "DELETE", "/v1/replicas/r1/drain")).json()["withdrawn"] is True
    assert await made.drain_orders.get(ReplicaId("r1")) is None
    again = await send(made, "DELETE", "/v1/replicas/r1/drain")
    assert (again.status_code, error_of(again)["code"]) == (404, "replica_not_found")


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/replicas/r9/drain", {}, 404),
        ("/v1/replicas/r1/drain", {"deadline_s": -1}, 400),
        ("/v1/replicas/r1/drain", {"departure": "fly"}, 400),
        ("/v1/replicas/r1/drain", {"when": 1}, 400),
        ("/v1/replicas/r1/drain", [], 400),
    ],
)
async def test_a_bad_order_is_refused_and_nothing_is_ordered(path: str, body: Any, status: int) -> None:
    made = bench()
    response = await send(made, "POST", path, json=body)
    assert response.status_code == status
    assert await made.drain_orders.get(ReplicaId("r1")) is None


async def test_no_replica_that_answers_is_a_503() -> None:
    made = bench()
    made.fleet.answers["engine", "standing_here"] = PartAnswer(answers=(), faults=("gone",))
    assert (await send(made, "GET", "/v1/replicas")).status_code == 503


async def test_only_an_admin_may_do_this() -> None:
    key = {"name": "k", "sha256": digest("secret"), "tenant": "t", "scopes": ["read", "submit"]}
    made = bench(api_keys=[key])
    headers = {"authorization": "Bearer secret"}
    for method, path in (
        ("GET", "/v1/replicas"),
        ("POST", "/v1/replicas/r1/drain"),
        ("DELETE", "/v1/replicas/r1/drain"),
    ):
        assert (await send(made, method, path, headers=headers)).status_code == 403
