"""Serve's autoscaling hook over `autoscaling.py`.

Serve calls the policy in its controller, a few times a second, on the controller's event loop: it must not wait for anything. What
replicas say comes as the metrics of `record_autoscaling_stats`, of which the latest value counts; orders to drain go out through the store on a thread of
their own, and one that was not delivered is given again at the next look (`Scaling.drain` says so for as long as it stands).

Serve keeps what the policy remembers from one look to the next, as a dictionary. Bounds and delays are the policy's own, so Serve's
(`upscale_delay_s`, …) are set to do nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from agent_program.clock import Clock, SystemClock
from agent_program.errors import StoreUnavailable
from agent_program.ids import ReplicaId
from continuum_router.autoscaling import ReplicaLoad, Scaling, ScalingState, scale
from continuum_router.config import AutoscalingSettings
from continuum_router.draining import Departure, DrainOrder
from continuum_router.redis_drain_orders import RedisDrainOrders

logger = logging.getLogger(__name__)

_STATE = "continuum"
#: An order is given anew at every look; the store need not hear it so often.
_REPEAT_S = 10.0


def autoscaling_config(store_url: str, *, namespace: str, settings: AutoscalingSettings) -> AutoscalingConfig:
    """What `serve.deployment(autoscaling_config=...)` takes."""
    return AutoscalingConfig(
        min_replicas=settings.replicas_min,
        initial_replicas=settings.replicas_min,
        max_replicas=settings.replicas_max,
        upscale_delay_s=0.0,
        downscale_delay_s=0.0,
        look_back_period_s=5.0,
        metrics_interval_s=1.0,
        policy=AutoscalingPolicy(
            policy_function="continuum_router.ray_autoscaling:WorkingSetPolicy",
            policy_kwargs={
                "store_url": store_url,
                "namespace": namespace,
                "settings": settings.model_dump(mode="json"),
            },
        ),
    )


class WorkingSetPolicy:
    """The policy as Serve calls it; made once, in the controller."""

    def __init__(
        self, store_url: str, namespace: str, settings: Mapping[str, Any], *, clock: Clock | None = None
    ) -> None:
        """Nothing connects yet.

        Raises:
            pydantic.ValidationError: a setting that does not exist or has a bad value.
        """
        self._store_url, self._namespace = store_url, namespace
        self._settings = AutoscalingSettings.model_validate(settings)
        self._clock = clock or SystemClock()
        self._courier = ThreadPoolExecutor(max_workers=1, thread_name_prefix="drain-orders")
        #: The order that was last given, and when.
        self._ordered: tuple[ReplicaId, float] | None = None

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """How many replicas there should be, and what to remember."""
        now_s = self._clock.now_s()
        scaling = scale(
            loads_of(context.raw_metrics or {}, context.running_replicas),
            running=[ReplicaId(replica.unique_id) for replica in context.running_replicas],
            target=context.target_num_replicas,
            state=_state_of((context.policy_state or {}).get(_STATE)),
            now_s=now_s,
            settings=self._settings,
        )
        self._give_orders(scaling, now_s)
        if scaling.replicas != context.target_num_replicas:
            logger.info("replicas: %d, because of %s", scaling.replicas, scaling.reason.value)
        state = scaling.state
        remembered = {
            "surplus_since_s": state.surplus_since_s,
            "victim": state.victim,
            "victim_since_s": state.victim_since_s,
        }
        return scaling.replicas, {_STATE: remembered}

    def _give_orders(self, scaling: Scaling, now_s: float) -> None:
        if scaling.undrain is not None:
            self._ordered = None
            self._courier.submit(self._deliver, None, scaling.undrain)
        elif scaling.drain is not None and not self._was_ordered(scaling.drain, now_s):
            self._ordered = (scaling.drain, now_s)
            left_s = self._settings.drain_s - (now_s - scaling.state.victim_since_s)
            order = DrainOrder(
                replica_id=scaling.drain,
                deadline_wall_s=self._clock.wall_s() + max(0.0, left_s),
                departure=Departure.WAIT,
            )
            self._courier.submit(self._deliver, order, scaling.drain)

    def _was_ordered(self, replica_id: ReplicaId, now_s: float) -> bool:
        return self._ordered is not None and self._ordered[0] == replica_id and now_s - self._ordered[1] < _REPEAT_S

    def _deliver(self, order: DrainOrder | None, replica_id: ReplicaId) -> None:
        async def deliver() -> None:
            orders = RedisDrainOrders(self._store_url, namespace=self._namespace)
            try:
                if order is None:
                    await orders.withdraw(replica_id)
                else:
                    await orders.put(order)
            except StoreUnavailable as error:
                logger.warning("an order about draining %s was not delivered: %s", replica_id, error)
            finally:
                await orders.close()

        asyncio.run(deliver())


def loads_of(metrics: Mapping[str, Mapping[Any, Sequence[Any]]], running: Sequence[Any]) -> list[ReplicaLoad]:
    """What replicas say, of those that have said all of it. `metrics` is by name, then by Serve's replica id: a time series."""

    def value(name: str, replica: Any) -> float | None:
        series = metrics.get(name, {}).get(replica)
        return float(series[-1].value) if series else None

    loads = []
    for replica in running:
        names = ("working_blocks", "total_blocks", "waiting_turns", "running_turns", "live_leases")
        numbers = {name: value(name, replica) for name in names}
        if any(number is None for number in numbers.values()):
            continue
        loads.append(
            ReplicaLoad(
                replica_id=ReplicaId(replica.unique_id),
                is_draining=bool(value("is_draining", replica)),
                is_drained=bool(value("is_drained", replica)),
                **numbers,  # type: ignore[arg-type]
            )
        )
    return loads


def _state_of(remembered: object) -> ScalingState:
    if not isinstance(remembered, Mapping):
        return ScalingState()
    return ScalingState(
        surplus_since_s=remembered.get("surplus_since_s"),
        victim=remembered.get("victim"),
        victim_since_s=float(remembered.get("victim_since_s") or 0.0),
    )
