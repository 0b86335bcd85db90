"""The router with its store: relatives, shared beginnings, failed turns, and the migration rule, over compare-and-set."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest

from agent_program.clock import ManualClock
from agent_program.ids import ProgramId, ReplicaId
from continuum_router.affinity import Affinity, PrefixMark
from continuum_router.bindings import MemoryBindings
from continuum_router.config import RouterSettings
from continuum_router.placement import Placement, Reason
from continuum_router.program_router import ProgramRouter
from continuum_router.replica_view import ReplicaView
from continuum_router.routing_memory import Reply
from support.switchable_bindings import SwitchableBindings

A, B, C = ReplicaId("a"), ReplicaId("b"), ReplicaId("c")
P, Q = ProgramId("p"), ProgramId("q")
MEASURED = {"turns_per_s": 2.0, "context_tokens_per_s": 1000.0}


def view(replica_id: ReplicaId, **fields: Any) -> ReplicaView:
    return ReplicaView(**{"replica_id": replica_id, "turns_max": 64, **MEASURED, **fields})


class World:
    """One store and several routers."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.settings = RouterSettings(unknown_replica_grace_s=0.0)
        self.store = MemoryBindings(clock=self.clock, ttl_s=1000.0)
        self.made: list[ProgramRouter] = []

    def router(self, *views: ReplicaView) -> tuple[ProgramRouter, SwitchableBindings]:
        switch = SwitchableBindings(self.store)
        router = ProgramRouter(bindings=switch, settings=self.settings, clock=self.clock)
        router.replace_replicas(views)
        self.made.append(router)
        return router, switch


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    yield made
    for router in made.made:
        await router.close()


async def placed(router: ProgramRouter, program_id: ProgramId = P, affinity: Affinity | None = None) -> Placement:
    placement = await router.place(program_id, affinity=None if affinity is None else lambda: affinity)
    assert placement is not None
    return placement


# Relatives


async def test_a_sub_program_follows_its_parent_also_where_another_router_placed_that(world: World) -> None:
    here, _ = world.router(view(A), view(B, running=1))
    home = (await placed(here)).replica_id
    there, _ = world.router(*(view(name, running=3 if name == home else 0) for name in (A, B)))
    child = await placed(there, Q, Affinity(parent=P))
    assert (child.replica_id, child.reason) == (home, Reason.PARENT)


async def test_a_parent_that_nobody_knows_and_a_store_that_is_away_hold_nothing_up(world: World) -> None:
    router, switch = world.router(view(A))
    assert (await placed(router, Q, Affinity(parent=P))).reason is Reason.NEW
    switch.away = True
    assert (await placed(router, ProgramId("r"), Affinity(parent=ProgramId("x")))).reason is Reason.NEW


async def test_a_program_that_goes_on_with_an_ended_one_goes_where_that_was(world: World) -> None:
    router, _ = world.router(view(A), view(B))
    home = (await placed(router)).replica_id
    await router.release(P)
    router.replace_replicas([view(name, running=2 if name == home else 0) for name in (A, B)])
    on = await placed(router, Q, Affinity(previous=P))
    assert (on.replica_id, on.reason) == (home, Reason.PREVIOUS)


async def test_programs_with_one_long_beginning_gather_only_so_far(world: World) -> None:
    router, _ = world.router(view(A), view(B))
    mark = PrefixMark(fingerprint=7, tokens=4096)  # worth 2 turns; a bound program weighs half of one
    homes = Counter(
        [(await placed(router, ProgramId(f"p{number}"), Affinity(prefix=mark))).replica_id for number in range(20)]
    )
    assert set(homes) == {A, B}
    assert abs(homes[A] - homes[B]) <= 4


async def test_a_beginning_that_a_replica_reports_draws_programs_of_other_routers(world: World) -> None:
    router, _ = world.router(view(A, running=1, recent_prefixes=frozenset({7})), view(B))
    placement = await placed(router, P, Affinity(prefix=PrefixMark(fingerprint=7, tokens=4096)))
    assert (placement.replica_id, placement.reason) == (A, Reason.SHARED_PREFIX)


async def test_affinity_is_not_asked_for_a_program_that_is_bound(world: World) -> None:
    router, _ = world.router(view(A))
    await placed(router)

    def ask() -> Affinity:
        raise AssertionError("asked")

    world.clock.advance(10.0)
    assert (await router.place(P, affinity=ask)) == Placement(replica_id=A, reason=Reason.BOUND)


# Replies


def reply(replica_id: ReplicaId, *, kept_s: float, program_id: ProgramId = P, **fields: Any) -> Reply:
    return Reply(program_id=program_id, view=view(replica_id, **fields), kept_s=kept_s, context_tokens=4000)


async def test_what_a_reply_says_counts_before_the_next_report(world: World) -> None:
    router, _ = world.router(view(A), view(B))
    router.reply(reply(A, kept_s=0.0, running=9))
    assert router.fleet.choose("new") == B
    router.reply(reply(A, kept_s=0.0, running=0))
    router.reply(reply(B, kept_s=0.0, running=9))
    assert router.fleet.choose("new") == A


async def test_a_reply_does_not_bring_a_replica_back_that_is_gone(world: World) -> None:
    router, _ = world.router(view(A), view(B))
    router.lose_replica(A)
    router.reply(reply(A, kept_s=0.0))
    assert A not in router.fleet


# The migration rule


async def bound_to_a_crowd(world: World, *, kept_s: float) -> ProgramRouter:
    router, _ = world.router(view(A))
    await placed(router)
    router.replace_replicas([view(A), view(B)])
    router.reply(reply(A, kept_s=kept_s))
    world.clock.advance(5.0)
    router.replace_replicas([view(A, waiting=40), view(B)])  # 40 / 2 = 20 s here; 0 + 4,000 / 1,000 = 4 s there
    return router


async def test_a_program_whose_kv_is_gone_leaves_a_crowd_and_all_routers_follow(world: World) -> None:
    router = await bound_to_a_crowd(world, kept_s=0.0)
    moved = await placed(router)
    assert (moved.replica_id, moved.reason) == (B, Reason.MIGRATED)
    assert moved.detail == {"migration": "move", "wait_here_s": 20.0, "wait_there_s": 0.0, "again_there_s": 4.0}
    other, _ = world.router(view(A), view(B))
    assert (await placed(other)).replica_id == B


async def test_a_program_whose_kv_is_kept_waits_in_the_crowd(world: World) -> None:
    router = await bound_to_a_crowd(world, kept_s=60.0)
    assert await placed(router) == Placement(replica_id=A, reason=Reason.BOUND)


async def test_why_a_program_stays_is_said_too(world: World) -> None:
    router = await bound_to_a_crowd(world, kept_s=0.0)
    router.replace_replicas([view(A, waiting=4), view(B)])
    stays = await placed(router)
    assert (stays.replica_id, stays.reason) == (A, Reason.BOUND)
    assert stays.detail == {
        "migration": "here_is_shorter",
        "wait_here_s": 2.0,
        "wait_there_s": 0.0,
        "again_there_s": 4.0,
    }


async def test_two_routers_that_move_a_program_at_once_agree(world: World) -> None:
    router = await bound_to_a_crowd(world, kept_s=0.0)
    router.replace_replicas([view(A, waiting=40), view(B), view(C)])
    other, _ = world.router(view(A), view(B), view(C))
    await placed(other)
    other.reply(reply(A, kept_s=0.0))
    other.replace_replicas([view(A, waiting=40), view(B, running=1), view(C)])
    world.clock.advance(5.0)
    moves = await asyncio.gather(placed(router), placed(other))
    assert len({move.replica_id for move in moves} - {A}) == 1


async def test_a_program_is_not_passed_to_and_fro(world: World) -> None:
    router = await bound_to_a_crowd(world, kept_s=0.0)
    assert (await placed(router)).replica_id == B
    router.reply(reply(B, kept_s=0.0))
    world.clock.advance(5.0)
    router.replace_replicas([view(A), view(B, waiting=40)])
    assert (await placed(router)).detail == {"migration": "moved_recently"}
    world.clock.advance(30.0)
    router.replace_replicas([view(A), view(B, waiting=40)])
    assert (await placed(router)).replica_id == A


# Failed turns


async def test_a_turn_that_failed_is_not_sent_to_the_same_replica_again_though_that_lives(world: World) -> None:
    router, _ = world.router(view(A), view(B))
    home = (await placed(router)).replica_id
    router.turn_lost(P, home)
    again = await placed(router)
    assert again.replica_id != home
    assert again.reason is Reason.TURN_FAILED
    router.reply(reply(again.replica_id, kept_s=0.0))
    assert (await placed(router)).replica_id == again.replica_id


async def test_where_nobody_said_who_had_the_turn_it_was_the_replica_of_its_program(world: World) -> None:
    router, _ = world.router(view(A), view(B))
    home = (await placed(router)).replica_id
    router.turn_lost(P, None)
    assert (await placed(router)).replica_id != home
    router.turn_lost(None, None)  # a turn of no program, and nobody knows whose


async def test_a_turn_that_failed_on_the_only_replica_goes_there_again(world: World) -> None:
    router, _ = world.router(view(A))
    await placed(router)
    router.turn_lost(P, A)
    assert (await placed(router)).replica_id == A


async def test_a_replica_that_keeps_failing_is_left_by_its_other_programs_too(world: World) -> None:
    router, _ = world.router(view(A))
    await placed(router)
    router.replace_replicas([view(A), view(B)])
    for number in range(3):
        router.turn_lost(ProgramId(f"other{number}"), A)
    moved = await placed(router)
    assert (moved.replica_id, moved.reason) == (B, Reason.SUSPECT)


async def test_a_failed_turn_moves_its_program_without_the_store_too(world: World) -> None:
    router, switch = world.router(view(A), view(B))
    home = (await placed(router)).replica_id
    switch.away = True
    world.clock.advance(10.0)
    router.turn_lost(P, home)
    assert (await placed(router)).replica_id != home
