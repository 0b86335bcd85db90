"""Programs stay, move only for a reason, and routers agree; with the store there, away, and back."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

import pytest

from agent_program.clock import ManualClock
from agent_program.ids import ProgramId, ReplicaId
from continuum_router.bindings import MemoryBindings
from continuum_router.config import RouterSettings
from continuum_router.placement import Placement, Reason
from continuum_router.program_router import Intent, ProgramRouter
from continuum_router.replica_view import ReplicaView
from support.switchable_bindings import SwitchableBindings
from support.waiting import wait_for_async

A, B, C = ReplicaId("a"), ReplicaId("b"), ReplicaId("c")
P = ProgramId("p")


def views(*replica_ids: ReplicaId, **fields: object) -> list[ReplicaView]:
    return [ReplicaView(**{"replica_id": name, "turns_max": 64, **fields}) for name in replica_ids]  # type: ignore[arg-type]


class World:
    """One store and as many routers as a test wants, on one clock that moves by hand."""

    def __init__(self, **settings: object) -> None:
        self.clock = ManualClock()
        self.settings = RouterSettings.model_validate(
            {"binding_fresh_s": 1.0, "store_retry_s": 1.0, "unknown_replica_grace_s": 0.05, **settings}
        )
        self.store = MemoryBindings(clock=self.clock, ttl_s=self.settings.binding_ttl_s)
        self.made: list[ProgramRouter] = []

    def router(self, *replicas: ReplicaId) -> tuple[ProgramRouter, SwitchableBindings]:
        switch = SwitchableBindings(self.store)
        router = ProgramRouter(bindings=switch, settings=self.settings, clock=self.clock)
        router.replace_replicas(views(*replicas))
        self.made.append(router)
        return router, switch


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    yield made
    for router in made.made:
        await router.close()


async def placed(router: ProgramRouter, program_id: ProgramId = P, intent: Intent = Intent.BIND) -> Placement:
    placement = await router.place(program_id, intent)
    assert placement is not None
    return placement


# With the store


async def test_a_new_program_is_bound_and_its_later_turns_go_to_the_same_replica(world: World) -> None:
    router, _ = world.router(A, B)
    first = await placed(router)
    assert first.reason is Reason.NEW
    for _ in range(5):
        world.clock.advance(10.0)
        assert await placed(router) == Placement(replica_id=first.replica_id, reason=Reason.BOUND)


async def test_a_fresh_copy_is_used_without_asking_the_store_and_an_older_one_is_confirmed(world: World) -> None:
    router, store = world.router(A, B)
    await placed(router)
    asked = store.questions
    world.clock.advance(1.0)
    await placed(router)
    assert store.questions == asked
    world.clock.advance(1.1)
    await placed(router)
    assert store.questions == asked + 1


async def test_programs_that_arrive_together_split_evenly_while_all_of_them_wait_for_the_store(world: World) -> None:
    router, store = world.router(A, B)
    router.replace_replicas([*views(A), *views(B, queued_tokens=32)])  # not quite equal: A is the best for everybody
    store.gate = asyncio.Event()
    tasks = [asyncio.create_task(placed(router, ProgramId(f"p{number}"))) for number in range(20)]
    await asyncio.sleep(0)
    store.gate.set()
    assert Counter(task.replica_id for task in await asyncio.gather(*tasks)) == {A: 10, B: 10}


async def test_a_burst_of_one_new_program_gets_one_replica(world: World) -> None:
    router, store = world.router(A, B, C)
    store.gate = asyncio.Event()
    tasks = [asyncio.create_task(placed(router)) for _ in range(20)]
    await asyncio.sleep(0)
    store.gate.set()
    assert len({placement.replica_id for placement in await asyncio.gather(*tasks)}) == 1


async def test_two_routers_that_bind_a_program_at_once_agree_on_the_first_to_reach_the_store(world: World) -> None:
    (one, _), (other, _) = world.router(A), world.router(A, B)
    other.replace_replicas([*views(A, running=9), *views(B)])  # so that it would rather use B
    first, second = await asyncio.gather(placed(one), placed(other))
    assert (first.replica_id, second.replica_id) == (A, A)
    assert (first.reason, second.reason) == (Reason.NEW, Reason.BOUND)


async def test_adding_replicas_moves_nobody(world: World) -> None:
    router, _ = world.router(A, B)
    ids = [ProgramId(f"p{number}") for number in range(20)]
    before = {name: (await placed(router, name)).replica_id for name in ids}
    router.replace_replicas(views(A, B, C))
    world.clock.advance(5.0)
    assert {name: (await placed(router, name)).replica_id for name in ids} == before
    assert (await placed(router, ProgramId("new"))).replica_id == C


async def test_losing_a_replica_moves_its_programs_alone_and_its_return_moves_none(world: World) -> None:
    router, _ = world.router(A, B, C)
    ids = [ProgramId(f"p{number}") for number in range(30)]
    before = {name: (await placed(router, name)).replica_id for name in ids}
    router.lose_replica(A)
    after = {name: await placed(router, name) for name in ids}
    for name in ids:
        if before[name] == A:
            assert after[name].replica_id in (B, C)
            assert after[name].reason is Reason.REPLICA_LOST
        else:
            assert after[name] == Placement(replica_id=before[name], reason=Reason.BOUND)
    assert abs(Counter(p.replica_id for p in after.values())[B] - 15) <= 1
    world.clock.advance(60.0)
    router.replace_replicas(views(B, C, ReplicaId("a2")))
    assert {name: (await placed(router, name)).replica_id for name in ids} == {
        n: p.replica_id for n, p in after.items()
    }


async def test_the_programs_of_a_draining_replica_move_at_their_next_turn(world: World) -> None:
    router, _ = world.router(A)
    await placed(router)
    router.replace_replicas([*views(A, is_draining=True), *views(B)])
    assert await placed(router) == Placement(replica_id=B, reason=Reason.DRAINING)
    assert (await placed(router)).reason is Reason.BOUND


async def test_a_router_that_learns_late_of_a_new_replica_waits_for_the_news_and_does_not_take_the_program_away(
    world: World,
) -> None:
    world.settings = world.settings.model_copy(update={"unknown_replica_grace_s": 30.0})
    (ahead, _), (behind, _) = world.router(C), world.router(A, B)
    await placed(ahead)
    waiting = asyncio.create_task(placed(behind))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    behind.replace_replicas(views(A, B, C))
    assert await waiting == Placement(replica_id=C, reason=Reason.BOUND)


async def test_a_binding_to_a_replica_that_nobody_has_heard_of_is_replaced_after_a_moment(world: World) -> None:
    await world.store.bind(P, ReplicaId("of-an-earlier-deployment"))
    router, _ = world.router(A)
    assert await placed(router) == Placement(replica_id=A, reason=Reason.REPLICA_LOST)
    assert await world.store.get(P) == A


async def test_two_routers_disagree_no_longer_than_a_copy_is_fresh(world: World) -> None:
    (one, _), (other, _) = world.router(A, B), world.router(A, B)
    home = (await placed(one)).replica_id
    assert (await placed(other)).replica_id == home
    one.lose_replica(home)  # one router believes it dead; the other knows no such thing
    moved = (await placed(one)).replica_id
    assert moved != home
    world.clock.advance(world.settings.binding_fresh_s + 0.1)
    assert (await placed(other)).replica_id == moved


async def test_no_replica_at_all_gives_no_placement_and_binds_nothing(world: World) -> None:
    router, _ = world.router()
    assert await router.place(P) is None
    assert router.place_unbound("x") is None
    assert await world.store.get(P) is None


async def test_a_request_without_a_program_goes_to_the_least_loaded_and_is_not_remembered(world: World) -> None:
    router, store = world.router(A, B)
    router.replace_replicas([*views(A, running=2), *views(B)])
    assert router.place_unbound("request-1") == Placement(replica_id=B, reason=Reason.UNBOUND)
    assert store.questions == 0


# Following and releasing


async def test_an_event_follows_its_program_even_from_a_router_that_never_saw_it(world: World) -> None:
    (one, _), (other, _) = world.router(A, B), world.router(A, B)
    home = (await placed(one)).replica_id
    assert await placed(other, P, Intent.FOLLOW) == Placement(replica_id=home, reason=Reason.BOUND)


async def test_an_event_of_an_unbound_program_binds_nothing(world: World) -> None:
    router, _ = world.router(A, B)
    assert (await placed(router, P, Intent.FOLLOW)).reason is Reason.UNBOUND
    assert await world.store.get(P) is None


async def test_an_event_goes_to_a_draining_replica_because_the_program_is_still_there(world: World) -> None:
    router, _ = world.router(A)
    await placed(router)
    router.replace_replicas([*views(A, is_draining=True), *views(B)])
    assert (await placed(router, P, Intent.FOLLOW)).replica_id == A


async def test_a_released_program_is_new_again_and_no_longer_counts(world: World) -> None:
    router, _ = world.router(A, B)
    home = (await placed(router)).replica_id
    await router.release(P)
    assert await world.store.get(P) is None
    await placed(router, ProgramId("q"))
    assert (await placed(router)).reason is Reason.NEW
    assert {(await placed(router)).replica_id, (await placed(router, ProgramId("q"))).replica_id} == {A, B}
    assert home in (A, B)


async def test_a_late_release_does_not_end_a_binding_made_since_by_another_router(world: World) -> None:
    (one, _), (other, _) = world.router(A), world.router(B)
    await placed(one)
    await world.store.release(P, A)
    await placed(other)
    await one.release(P)
    assert await world.store.get(P) == B


# Without the store


async def test_with_the_store_away_bound_programs_stay_and_new_ones_are_bound_here(world: World) -> None:
    router, store = world.router(A, B)
    home = (await placed(router)).replica_id
    store.away = True
    world.clock.advance(60.0)
    assert await placed(router) == Placement(replica_id=home, reason=Reason.BOUND)
    new = await placed(router, ProgramId("new"))
    assert new.reason is Reason.NEW
    assert new.replica_id != home  # the bound one counts
    assert (await placed(router, ProgramId("new"))).replica_id == new.replica_id
    assert router.is_store_away
    assert router.unconfirmed_count == 2


async def test_a_store_that_is_away_is_asked_once_per_retry_period(world: World) -> None:
    router, store = world.router(A, B)
    store.away = True
    for number in range(50):
        await placed(router, ProgramId(f"p{number}"))
    assert store.questions == 1
    world.clock.advance(1.0)
    store.gate = asyncio.Event()  # a store that is away is slow to say so
    turns = [asyncio.create_task(placed(router, ProgramId(f"q{number}"))) for number in range(50)]
    await asyncio.wait(turns, return_when=asyncio.FIRST_COMPLETED)
    assert sum(turn.done() for turn in turns) >= 49  # all but the one that asks, if it was not the reconciler
    store.gate.set()
    await asyncio.gather(*turns)
    assert store.questions == 2


async def test_bindings_made_without_the_store_reach_it_when_it_is_back(world: World) -> None:
    router, store = world.router(A, B)
    store.away = True
    ids = [ProgramId(f"p{number}") for number in range(6)]
    homes = {name: (await placed(router, name)).replica_id for name in ids}
    assert not await router.reconcile()
    store.away = False
    world.clock.advance(1.0)
    assert await router.reconcile()
    assert {name: await world.store.get(name) for name in ids} == homes
    assert router.unconfirmed_count == 0
    assert not router.is_store_away


async def test_reconciling_goes_on_by_itself_until_the_store_has_taken_everything() -> None:
    world = World(store_retry_s=0.01)
    router, store = world.router(A, B)
    store.away = True
    home = (await placed(router)).replica_id
    store.away = False
    world.clock.advance(1.0)

    async def is_done() -> bool:
        return router.unconfirmed_count == 0

    await wait_for_async(is_done, what="the store has every binding")
    assert await world.store.get(P) == home
    await router.close()


async def test_a_program_that_two_routers_bound_apart_while_the_store_was_away_settles_on_one(world: World) -> None:
    (one, store_one), (other, store_other) = world.router(A), world.router(A, B)
    other.replace_replicas([*views(A, running=9), *views(B)])
    store_one.away = store_other.away = True
    assert (await placed(one)).replica_id == A
    assert (await placed(other)).replica_id == B
    store_one.away = store_other.away = False
    world.clock.advance(1.0)
    assert await one.reconcile()
    assert await other.reconcile()
    assert (await placed(one)).replica_id == (await placed(other)).replica_id == A


async def test_a_replica_lost_while_the_store_is_away_still_moves_its_programs(world: World) -> None:
    router, store = world.router(A, B)
    home = (await placed(router)).replica_id
    store.away = True
    router.lose_replica(home)
    moved = await placed(router)
    assert (moved.reason, moved.replica_id) == (Reason.REPLICA_LOST, B if home == A else A)
    store.away = False
    world.clock.advance(1.0)
    assert await router.reconcile()
    assert await world.store.get(P) == moved.replica_id


async def test_a_store_that_lost_its_data_learns_the_bindings_anew(world: World) -> None:
    router, _ = world.router(A, B)
    home = (await placed(router)).replica_id
    await world.store.close()
    world.clock.advance(2.0)
    assert await placed(router) == Placement(replica_id=home, reason=Reason.BOUND)
    assert await world.store.get(P) == home


async def test_a_store_that_comes_back_empty_is_told_every_binding_before_anyone_asks(world: World) -> None:
    (one, store), (other, _) = world.router(A, B), world.router(A, B, C)
    other.replace_replicas([*views(A, B, running=9), *views(C)])  # by itself it would use C
    ids = [ProgramId(f"p{number}") for number in range(6)]
    homes = {name: (await placed(one, name)).replica_id for name in ids}
    store.away = True
    world.clock.advance(5.0)
    await placed(one, ids[0])
    await world.store.close()  # it restarts without its data
    store.away = False
    world.clock.advance(5.0)
    await placed(one, ids[0])
    assert await one.reconcile()
    assert {name: (await placed(other, name)).replica_id for name in ids} == homes


async def test_releasing_while_the_store_is_away_is_not_an_error(world: World) -> None:
    router, store = world.router(A, B)
    await placed(router)
    store.away = True
    await router.release(P)
    await router.release(P)
    assert router.unconfirmed_count == 0


async def test_memory_is_bounded_under_an_endless_stream_of_programs_with_and_without_the_store() -> None:
    world = World(programs_cached_max=10)
    router, store = world.router(A, B)
    for number in range(500):
        store.away = number % 100 >= 50
        world.clock.advance(0.3)
        await placed(router, ProgramId(f"p{number}"))
    assert router.programs_known <= 10
    assert router.unconfirmed_count <= 10
    await router.close()
