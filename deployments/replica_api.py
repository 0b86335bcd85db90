"""Engine replicas as an operator sees and empties them: who there is, and "leave".

    GET    /v1/replicas                 each engine replica: what it reports to routers, how far it has drained
    POST   /v1/replicas/{id}/drain      no new programs there; its programs go elsewhere with their next turn; then it leaves
    DELETE /v1/replicas/{id}/drain      it stays after all

An order names one incarnation. The replica reads it within a second or so; `GET` says when it has.
"""

from __future__ import annotations

from typing import Any, Literal

from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field

from agent_program.clock import Clock
from agent_program.errors import EngineUnavailable, InvalidRequest
from agent_program.ids import ReplicaId, parse_id
from continuum_router.drain_orders import DrainOrders
from continuum_router.draining import Departure, DrainOrder
from deployments.fleet import ENGINE_PART, Fleet
from deployments.wire_values import validated

_DRAIN_S_DEFAULT = 600.0


class ReplicaNotFound(InvalidRequest):
    """No such replica."""

    status, code = 404, "replica_not_found"


class DrainRequest(BaseModel):
    """The body of a drain; empty for the defaults."""

    model_config = ConfigDict(extra="forbid")

    #: Seconds after which it leaves with whatever it still does.
    deadline_s: float = Field(default=_DRAIN_S_DEFAULT, ge=0, le=24 * 3600)
    #: `leave`: it is replaced by another one. `wait`: it stays, empty, until someone stops it.
    departure: Literal["leave", "wait"] = "leave"


class ReplicaApi:
    """Answers the routes."""

    def __init__(self, fleet: Fleet, orders: DrainOrders, *, clock: Clock, timeout_s: float) -> None:
        self._fleet = fleet
        self._orders = orders
        self._clock = clock
        self._timeout_s = timeout_s

    async def everyone(self) -> Response:
        """Every engine replica that answers.

        Raises:
            EngineUnavailable: none does.
        """
        data = [{"id": replica_id, "object": "replica", **said} for replica_id, said in await self._standings()]
        return JSONResponse({"object": "list", "data": sorted(data, key=lambda replica: str(replica["id"]))})

    async def drain(self, replica_id: str, body: object) -> Response:
        """Order a replica to leave.

        Raises:
            ReplicaNotFound: no replica of that id answers. StoreUnavailable: the order could not be given.
        """
        asked = validated(DrainRequest, body if body is not None else {})
        named = ReplicaId(parse_id(replica_id, what="replica"))
        if named not in {known for known, _ in await self._standings()}:
            raise ReplicaNotFound(f"no replica {replica_id[:100]!r}")
        order = DrainOrder(
            replica_id=named,
            deadline_wall_s=self._clock.wall_s() + asked.deadline_s,
            departure=Departure(asked.departure),
        )
        await self._orders.put(order)
        wire = {"departure": order.departure.value, "deadline_at": order.deadline_wall_s}
        return JSONResponse({"id": named, "object": "replica.drain", **wire}, status_code=202)

    async def stay(self, replica_id: str) -> Response:
        """Withdraw an order.

        Raises:
            ReplicaNotFound: nothing was ordered for a replica of that id. StoreUnavailable: the store does not answer.
        """
        if not await self._orders.withdraw(ReplicaId(parse_id(replica_id, what="replica"))):
            raise ReplicaNotFound(f"replica {replica_id[:100]!r} was not told to drain")
        return JSONResponse({"id": replica_id, "object": "replica.drain", "withdrawn": True})

    async def _standings(self) -> list[tuple[str, dict[str, Any]]]:
        answer = await self._fleet.ask(ENGINE_PART, "standing_here", timeout_s=self._timeout_s)
        if not answer.is_up:
            raise EngineUnavailable("; ".join(answer.faults) or None, retry_after_s=1)
        return list(answer.answers)
