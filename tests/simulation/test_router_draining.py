"""Replicas that come, are emptied, and die, in virtual time: programs move between turns, and only those that must.

The cluster of `support/simulated_cluster.py`: real routers, runners, chat API and draining over doubles of engines and tools.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import pytest

from agent_program.ids import ReplicaId
from continuum_router.draining import Departure, DrainOrder
from support.simulated_clients import ChatClient, ProgramClient
from support.simulated_cluster import SimulatedCluster
from support.simulated_parts import EngineDouble
from support.virtual_time import LoopClock, run_virtually

#: A replica looks for orders once a second and reports twice a second; a message takes 10 ms.
HEARD_BY_S = 2.0


@dataclass
class Run:
    """A cluster after its clients are done."""

    cluster: SimulatedCluster
    chats: list[ChatClient]
    programs: list[ProgramClient]
    #: Steps of all programs, by kind.
    replayed: int


def run(
    seed: int,
    meanwhile: Callable[[SimulatedCluster], Awaitable[None]],
    *,
    chats: int,
    programs: int = 0,
    turns: int = 5,
    settle_s: float = 0.0,
) -> Run:
    async def within() -> Run:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda *_: None)
        cluster = SimulatedCluster(clock=LoopClock(loop), seed=seed)
        chat_clients = [ChatClient(f"chat-{number}", is_greedy=number % 2 == 0, turns=turns) for number in range(chats)]
        program_clients = [ProgramClient(f"program-{number}") for number in range(programs)]
        try:
            work = [cluster.spawn(client.run(cluster)) for client in (*chat_clients, *program_clients)]
            async with asyncio.timeout(1200.0):
                await meanwhile(cluster)
                await asyncio.gather(*work)
            await asyncio.sleep(settle_s)
            replayed = 0
            for client in program_clients:
                assert client.record is not None
                steps = await cluster.journal.steps(client.record.id)
                replayed += sum(step.kind == "turn.replayed" for step in steps)
            return Run(cluster, chat_clients, program_clients, replayed)
        finally:
            await cluster.close()

    return run_virtually(within())


def homes(done: Run) -> dict[str, list[ReplicaId]]:
    """Where each client's turns went."""
    names = [client.name for client in done.chats]
    names += [client.record.id for client in done.programs if client.record is not None]
    return {name: done.cluster.homes(name) for name in names}


# Draining


@pytest.mark.parametrize("seed", range(20))
def test_a_drained_replica_is_left_between_turns_and_goes_when_it_is_empty(seed: int) -> None:
    ordered: dict[str, object] = {}

    async def drain_one(cluster: SimulatedCluster) -> None:
        chosen = random.Random(seed)
        await asyncio.sleep(chosen.uniform(1.0, 8.0))
        victim = chosen.choice(sorted(cluster.parts["engine"]))
        deadline = cluster.clock.wall_s() + 300.0
        await cluster.orders.put(DrainOrder(replica_id=victim, deadline_wall_s=deadline, departure=Departure.LEAVE))
        ordered.update(victim=victim, at_s=cluster.clock.now_s())
        while victim in cluster.parts["engine"]:  # noqa: ASYNC110 - time is virtual
            await asyncio.sleep(0.5)
        ordered["left_s"] = cluster.clock.now_s()

    done = run(seed, drain_one, chats=6, programs=4)
    victim, at_s, left_s = ordered["victim"], ordered["at_s"], ordered["left_s"]
    assert isinstance(at_s, float)
    assert isinstance(left_s, float)
    assert left_s - at_s < 60.0, "it left when it was empty, long before its deadline"
    (engine,) = [one for one in done.cluster.engines if one.replica_id == victim]
    assert engine.turns_open == 0
    assert all(came_s <= at_s + HEARD_BY_S for came_s, _ in engine.turns), "no turn goes to a replica that drains"
    assert done.replayed == 0, "draining interrupts no turn"
    assert [chat.broken_streams for chat in done.chats] == [0] * 6
    assert all(chat.complaints == [] and len(chat.answers) == 5 for chat in done.chats)
    for name, where in homes(done).items():
        if victim not in where:
            assert len(set(where)) == 1, f"{name} moved for nothing: {where}"
        else:
            assert len(set(where)) <= 2, f"{name} moved more than once: {where}"


def test_a_replica_that_does_not_get_empty_leaves_at_its_deadline_and_its_turns_run_elsewhere() -> None:
    async def drain_at_once(cluster: SimulatedCluster) -> None:
        await asyncio.sleep(1.0)
        victim = max(cluster.parts["engine"].values(), key=lambda part: len(_engine(part).turns)).replica_id
        order = DrainOrder(replica_id=victim, deadline_wall_s=cluster.clock.wall_s() + 0.1, departure=Departure.LEAVE)
        await cluster.orders.put(order)
        while victim in cluster.parts["engine"]:  # noqa: ASYNC110 - time is virtual
            await asyncio.sleep(0.5)

    done = run(1, drain_at_once, chats=6, programs=4)
    assert all(chat.complaints == [] and len(chat.answers) == 5 for chat in done.chats)


def test_a_replica_that_is_to_stay_after_all_takes_programs_again() -> None:
    async def drain_and_relent(cluster: SimulatedCluster) -> None:
        for name in cluster.parts["engine"]:
            order = DrainOrder(replica_id=name, deadline_wall_s=cluster.clock.wall_s() + 300, departure=Departure.LEAVE)
            await cluster.orders.put(order)
        await asyncio.sleep(2.0)
        for name in cluster.parts["engine"]:
            await cluster.orders.withdraw(name)

    done = run(2, drain_and_relent, chats=6)
    assert len(done.cluster.engines) == 3
    assert all(len(chat.answers) == 5 for chat in done.chats)


def _engine(part: object) -> EngineDouble:
    assert isinstance(part, EngineDouble)
    return part


# Stickiness


def test_of_sixty_programs_over_growth_and_loss_only_those_of_the_lost_replicas_move() -> None:
    lost: set[ReplicaId] = set()

    async def grow_shrink_and_kill(cluster: SimulatedCluster) -> None:
        await asyncio.sleep(5.0)
        cluster.add("engine")
        await asyncio.sleep(5.0)
        newest = cluster.engines[-1].replica_id
        cluster.lose("engine", newest, is_replaced=False)
        lost.add(newest)
        await asyncio.sleep(5.0)
        oldest = cluster.engines[0].replica_id
        cluster.lose("engine", oldest)
        lost.add(oldest)

    done = run(3, grow_shrink_and_kill, chats=60)
    moved = {name for name, where in homes(done).items() if len(set(where)) > 1}
    must = {name for name, where in homes(done).items() if lost & set(where)}
    assert moved <= must, f"moved for nothing: {sorted(moved - must)}"
    assert must, "somebody was on a lost replica"
    assert all(chat.complaints == [] and len(chat.answers) == 5 for chat in done.chats)


# The same seed, the same story


def test_two_runs_of_one_seed_are_the_same() -> None:
    async def kill_one(cluster: SimulatedCluster) -> None:
        await asyncio.sleep(3.0)
        cluster.lose("engine", cluster.engines[1].replica_id)

    one, other = (run(4, kill_one, chats=6) for _ in range(2))
    assert [engine.turns for engine in one.cluster.engines] == [engine.turns for engine in other.cluster.engines]
    assert [chat.answers for chat in one.chats] == [chat.answers for chat in other.chats]
