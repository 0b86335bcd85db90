"""The policy as Serve's controller holds it, without a cluster: what it is given, what it answers, and the orders that it gives."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest
from ray.serve._private.autoscaling_state import _resolve_policy_callable
from ray.serve._private.common import DeploymentID, ReplicaID, TimeStampedValue
from ray.serve.config import AutoscalingContext

from agent_program.clock import ManualClock
from agent_program.ids import ReplicaId
from continuum_router.config import AutoscalingSettings
from continuum_router.draining import Departure, DrainOrder
from continuum_router.ray_autoscaling import WorkingSetPolicy, autoscaling_config, loads_of
from continuum_router.redis_drain_orders import RedisDrainOrders
from support.redis_server import RedisServer, valkey_binary

DEPLOYMENT = DeploymentID(name="Engine", app_name="app")
A, B = (ReplicaID(name, deployment_id=DEPLOYMENT) for name in ("a", "b"))
SETTINGS = AutoscalingSettings(replicas_max=4, shrink_after_s=10.0, drain_s=100.0)
IDLE = {
    "working_blocks": 0.0, "total_blocks": 100.0, "waiting_turns": 0.0, "running_turns": 0.0, "live_leases": 0.0,
    "is_draining": 0.0, "is_drained": 0.0,
}  # fmt: skip


@pytest.fixture
def store_url() -> Iterator[str]:
    with RedisServer(valkey_binary()) as server:
        yield server.url


def context(
    loads: dict[ReplicaID, dict[str, float]], *, target: int, state: dict[str, Any] | None = None
) -> AutoscalingContext:
    # A series has a past; the last value is the present.
    raw: dict[str, Any] = {
        name: {
            replica: [TimeStampedValue(0.0, 99.0), TimeStampedValue(1.0, load[name])] for replica, load in loads.items()
        }
        for name in IDLE
    }
    return AutoscalingContext(
        deployment_id=DEPLOYMENT, deployment_name="Engine", app_name="app", current_num_replicas=len(loads),
        target_num_replicas=target, running_replicas=list(loads), total_num_requests=0.0, total_queued_requests=0.0,
        aggregated_metrics={}, raw_metrics=raw, capacity_adjusted_min_replicas=1, capacity_adjusted_max_replicas=4,
        policy_state=state or {}, last_scale_up_time=None, last_scale_down_time=None, current_time=None, config=None,
    )  # fmt: skip


def policy(store_url: str, clock: ManualClock) -> WorkingSetPolicy:
    return WorkingSetPolicy(store_url, "engine", SETTINGS.model_dump(mode="json"), clock=clock)


def order_of(store_url: str, name: str) -> DrainOrder | None:
    async def read() -> DrainOrder | None:
        orders = RedisDrainOrders(store_url, namespace="engine", timeout_s=10.0)
        try:
            return await orders.get(ReplicaId(name))
        finally:
            await orders.close()

    return asyncio.run(read())


def delivered(made: WorkingSetPolicy) -> None:
    made._courier.submit(lambda: None).result(timeout=60)


def test_the_newest_of_two_idle_replicas_is_drained_and_then_goes(store_url: str) -> None:
    clock = ManualClock(wall_s=time.time())
    made = policy(store_url, clock)
    replicas, state = made(context({A: IDLE, B: IDLE}, target=2))
    assert replicas == 2
    clock.advance(10.0)
    replicas, state = made(context({A: IDLE, B: IDLE}, target=2, state=state))
    assert replicas == 2
    delivered(made)
    order = order_of(store_url, "b")
    assert order is not None
    assert order.departure is Departure.WAIT
    draining = {**IDLE, "is_draining": 1.0, "live_leases": 2.0}
    replicas, state = made(context({A: IDLE, B: draining}, target=2, state=state))
    assert replicas == 2
    replicas, state = made(context({A: IDLE, B: {**draining, "live_leases": 0.0}}, target=2, state=state))
    assert replicas == 1
    assert order_of(store_url, "a") is None


def test_load_that_comes_back_withdraws_the_order(store_url: str) -> None:
    clock = ManualClock(wall_s=time.time())
    made = policy(store_url, clock)
    _, state = made(context({A: IDLE, B: IDLE}, target=2))
    clock.advance(10.0)
    _, state = made(context({A: IDLE, B: IDLE}, target=2, state=state))
    busy = {**IDLE, "waiting_turns": 8.0}
    replicas, _ = made(context({A: busy, B: IDLE}, target=2, state=state))
    assert replicas == 2
    delivered(made)
    assert order_of(store_url, "b") is None


def test_a_store_that_is_away_holds_nothing_up() -> None:
    clock = ManualClock()
    made = policy("redis://127.0.0.1:9", clock)
    _, state = made(context({A: IDLE, B: IDLE}, target=2))
    clock.advance(10.0)
    replicas, _ = made(context({A: IDLE, B: IDLE}, target=2, state=state))
    delivered(made)
    assert replicas == 2


def test_a_replica_that_has_not_said_everything_is_not_counted() -> None:
    raw = {name: {A: [TimeStampedValue(0.0, 1.0)]} for name in IDLE}
    raw["total_blocks"] = {}
    assert loads_of(raw, [A, B]) == []


def test_serve_makes_the_policy_from_the_deployments_configuration() -> None:
    config = autoscaling_config("redis://127.0.0.1:6379/0", namespace="engine", settings=SETTINGS)
    assert (config.min_replicas, config.max_replicas) == (1, 4)
    made = _resolve_policy_callable(config.policy)
    assert type(made).__name__ == "WorkingSetPolicy"
    assert made._settings == SETTINGS
