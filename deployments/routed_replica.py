"""What an engine replica does for the router's sake, beside its turns: it says how it stands, remembers why each program came to
it, and leaves when it is told to.

The router's decisions are made in other processes, with what this says (`report`); and a program's placement can be explained here
because the router sends its reasons along with the turn. An order to drain is read from the store: the replica itself is the one
that says it drains, so that no router has to be told twice, and a store that is away changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from agent_program.clock import Clock
from agent_program.errors import StoreUnavailable
from agent_program.ids import ProgramId, ReplicaId
from agent_program.turn import TurnHints
from continuum_router.affinity import RecentPrefixes, prefix_mark
from continuum_router.drain_orders import DrainOrders
from continuum_router.draining import DrainOrder, DrainState, DrainStatus, drain_status
from continuum_router.service_rate import ServiceRate

logger = logging.getLogger(__name__)

_PLACEMENTS_MAX = 10_000
_LOOK_S = 1.0
#: So long without a turn, and every router has heard that this replica drains.
_SETTLE_S = 5.0


class ReplicaDrained(RuntimeError):
    """The replica has been left by its programs and goes, as ordered."""


class RoutedReplica:
    """The router's side of one replica. One event loop owns it."""

    def __init__(self, replica_id: ReplicaId, *, orders: DrainOrders, clock: Clock) -> None:
        self.replica_id = replica_id
        self._orders = orders
        self._clock = clock
        self._order: DrainOrder | None = None
        self._rate = ServiceRate()
        self._last_turn_s = clock.now_s()
        self._prefixes = RecentPrefixes()
        self._placements: OrderedDict[ProgramId, Mapping[str, Any]] = OrderedDict()
        self._watching: asyncio.Task[None] | None = None

    def turn_began(self, body: Mapping[str, Any], hints: TurnHints | None, placement: Mapping[str, Any] | None) -> None:
        """A turn came, and this is why it came here."""
        now_s = self._last_turn_s = self._clock.now_s()
        self._rate.began(now_s)
        self._prefixes.note(prefix_mark(body))
        if hints is not None and placement is not None:
            self._note(hints.program_id, placement)

    def turn_ended(self, *, is_done: bool) -> None:
        """A turn left; `is_done` where it came to its end."""
        now_s = self._last_turn_s = self._clock.now_s()
        self._rate.ended(now_s, is_done=is_done)

    def placement_of(self, program_id: str) -> Mapping[str, Any] | None:
        """Why the program's last turn came here; None where it is not remembered."""
        return self._placements.get(ProgramId(program_id))

    def drain(self) -> DrainStatus:
        """How far this replica is on its way out."""
        return drain_status(
            self._order,
            turns_open=self._rate.open,
            quiet_s=self._clock.now_s() - self._last_turn_s,
            now_wall_s=self._clock.wall_s(),
            settle_s=_SETTLE_S,
        )

    def report(self, base: Mapping[str, Any], *, reload_s_per_1k: float | None = None) -> dict[str, Any]:
        """What the router weighs: the engine's `base`, and what is known here.

        Args:
            reload_s_per_1k: seconds in which the engine has 1,000 tokens of context again, as it has measured.
        """
        return {
            **base,
            "is_draining": not self.drain().takes_programs,
            "turns_per_s": self._rate.per_s(self._clock.now_s()),
            "context_tokens_per_s": 1000 / reload_s_per_1k if reload_s_per_1k else None,
            "recent_prefixes": self._prefixes.fingerprints(),
        }

    def scaling_stats(self, stats: Mapping[str, Any]) -> dict[str, float]:
        """What the autoscaling policy weighs; numbers only, as Serve wants them."""
        total, free = float(stats.get("total_blocks", 0)), float(stats.get("free_blocks", 0))
        status = self.drain()
        return {
            "working_blocks": max(0.0, total - free),
            "total_blocks": total,
            "waiting_turns": float(stats.get("waiting", 0)),
            "running_turns": float(stats.get("running", 0)),
            "live_leases": float(stats.get("live_leases", 0)),
            "is_draining": float(not status.takes_programs),
            "is_drained": float(status.state is DrainState.DRAINED),
        }

    def check_health(self) -> None:
        """Raises ReplicaDrained where the replica is to go; starts to look for orders the first time."""
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch())
        status = self.drain()
        if status.must_leave:
            reason = status.reason.value if status.reason else ""
            raise ReplicaDrained(f"replica {self.replica_id} has drained ({reason}) and leaves")

    def stop(self) -> None:
        """Stop looking for orders. The second call changes nothing."""
        if self._watching is not None and not self._watching.get_loop().is_closed():
            self._watching.get_loop().call_soon_threadsafe(self._watching.cancel)

    async def look_for_orders(self) -> None:
        """Read this replica's order, or that there is none. A store that is away leaves things as they are."""
        try:
            order = await self._orders.get(self.replica_id)
        except StoreUnavailable as error:
            logger.info("no news about draining: %s", error)
            return
        if order != self._order:
            logger.info("replica %s: %s", self.replica_id, "serves again" if order is None else f"drains: {order}")
        self._order = order

    async def _watch(self) -> None:
        try:
            while True:
                await self.look_for_orders()
                await asyncio.sleep(_LOOK_S)
        finally:
            await self._orders.close()

    def _note(self, program_id: ProgramId, placement: Mapping[str, Any]) -> None:
        before = self._placements.pop(program_id, None)
        # "It was bound here" says why it stays; why it came is what people ask.
        came = before.get("came", before) if before is not None and placement.get("reason") == "bound" else placement
        self._placements[program_id] = {**placement, "came": dict(came)}
        if len(self._placements) > _PLACEMENTS_MAX:
            self._placements.popitem(last=False)
