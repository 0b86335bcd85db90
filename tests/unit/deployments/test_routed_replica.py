"""What a replica says to routers, what it remembers of placements, and how it leaves."""

from __future__ import annotations

import asyncio

import pytest

from agent_program.clock import ManualClock
from agent_program.errors import StoreUnavailable
from agent_program.ids import ProgramId, ReplicaId
from agent_program.turn import TurnHints
from continuum_router.affinity import prefix_mark
from continuum_router.drain_orders import MemoryDrainOrders
from continuum_router.draining import Departure, DrainOrder, DrainState
from deployments.explanation import Explainer
from deployments.fleet import PartAnswer
from deployments.memory_chat import TableFleet
from deployments.routed_replica import ReplicaDrained, RoutedReplica
from support.virtual_time import LoopClock, run_virtually

R = ReplicaId("r1")
HINTS = TurnHints(program_id=ProgramId("p"))
BODY = {"messages": [{"role": "system", "content": "Be brief."}]}


class AwayOrders(MemoryDrainOrders):
    async def get(self, replica_id: ReplicaId) -> DrainOrder | None:
        raise StoreUnavailable


def replica(clock: ManualClock, orders: MemoryDrainOrders | None = None) -> RoutedReplica:
    return RoutedReplica(R, orders=orders or MemoryDrainOrders(clock=clock), clock=clock)


def test_it_reports_its_rate_its_beginnings_and_what_a_context_costs() -> None:
    clock = ManualClock()
    made = replica(clock)
    for _ in range(3):
        made.turn_began(BODY, HINTS, None)
        clock.advance(0.5)
        made.turn_ended(is_done=True)
    report = made.report({"waiting": 2}, reload_s_per_1k=0.25)
    mark = prefix_mark(BODY)
    assert mark is not None
    assert report["turns_per_s"] == pytest.approx(2.0, rel=0.02)
    assert {**report, "turns_per_s": 0} == {
        "waiting": 2, "is_draining": False, "turns_per_s": 0, "context_tokens_per_s": 4000.0,
        "recent_prefixes": [mark.fingerprint],
    }  # fmt: skip


def test_why_a_program_came_is_remembered_while_it_stays() -> None:
    made = replica(ManualClock())
    made.turn_began(BODY, HINTS, {"reason": "parent", "load_turns": 2.0})
    made.turn_began(BODY, HINTS, {"reason": "bound"})
    made.turn_began(BODY, HINTS, {"reason": "bound"})
    assert made.placement_of("p") == {"reason": "bound", "came": {"reason": "parent", "load_turns": 2.0}}
    assert made.placement_of("q") is None


async def test_the_placement_of_the_replica_where_the_program_is_explains_it() -> None:
    here = {"is_known": True, "is_over": False, "age_s": 1.0, "placement": {"reason": "replica_lost"}}
    before = {"is_known": True, "is_over": True, "age_s": 0.5, "placement": {"reason": "new"}}
    answers = PartAnswer(answers=(("old", before), ("home", here)), faults=())
    explained = await Explainer(TableFleet({("engine", "explain_here", "p"): answers}), timeout_s=1.0).explain("p")
    assert explained.placement == {"replica": "home", "reason": "replica_lost"}


async def test_a_placement_is_explained_where_no_scheduler_keeps_leases() -> None:
    answers = PartAnswer(answers=(("r1", {"is_known": False, "placement": {"reason": "new"}}),), faults=())
    explained = await Explainer(TableFleet({("engine", "explain_here", "p"): answers}), timeout_s=1.0).explain("p")
    assert explained.latest is None
    assert explained.placement == {"replica": "r1", "reason": "new"}


async def test_it_drains_when_an_order_is_there_and_serves_again_when_it_is_withdrawn() -> None:
    clock = ManualClock()
    orders = MemoryDrainOrders(clock=clock)
    made = replica(clock, orders)
    order = DrainOrder(replica_id=R, deadline_wall_s=clock.wall_s() + 100, departure=Departure.LEAVE)
    await orders.put(order)
    made.turn_began(BODY, HINTS, None)
    await made.look_for_orders()
    assert made.report({})["is_draining"] is True
    assert made.drain().state is DrainState.DRAINING
    await orders.withdraw(R)
    await made.look_for_orders()
    assert made.report({})["is_draining"] is False


async def test_a_store_that_is_away_changes_nothing_about_draining() -> None:
    clock = ManualClock()
    made = replica(clock, AwayOrders(clock=clock))
    await made.look_for_orders()
    assert made.drain().takes_programs


def test_it_leaves_by_failing_its_health_check_once_its_turns_are_over() -> None:
    async def run() -> float:
        loop = asyncio.get_running_loop()
        clock = LoopClock(loop)
        orders = MemoryDrainOrders(clock=clock)
        made = RoutedReplica(R, orders=orders, clock=clock)
        await orders.put(DrainOrder(replica_id=R, deadline_wall_s=clock.wall_s() + 100, departure=Departure.LEAVE))
        made.turn_began(BODY, HINTS, None)
        for _ in range(20):
            made.check_health()
            await asyncio.sleep(1.0)
        made.turn_ended(is_done=True)
        try:
            while True:
                made.check_health()
                await asyncio.sleep(1.0)
        except ReplicaDrained:
            return loop.time()
        finally:
            made.stop()
            await asyncio.sleep(0.1)

    assert run_virtually(run()) == pytest.approx(25.0)


def test_what_the_autoscaler_hears_is_numbers() -> None:
    stats = {"total_blocks": 100, "free_blocks": 60, "waiting": 3, "running": 2, "live_leases": 4}
    assert replica(ManualClock()).scaling_stats(stats) == {
        "working_blocks": 40.0, "total_blocks": 100.0, "waiting_turns": 3.0, "running_turns": 2.0, "live_leases": 4.0,
        "is_draining": 0.0, "is_drained": 0.0,
    }  # fmt: skip
