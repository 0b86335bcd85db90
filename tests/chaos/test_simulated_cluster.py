"""Two hundred and more schedules of faults over a simulated cluster: whatever dies, nothing that was accepted is lost.

Router, bindings, runner, journal, chat API, admission, retries and draining are the real ones, in virtual time. A schedule is a seed:
which faults, when, at whom. After each, the faults heal and the cluster is left alone; then must hold:

- every accepted program has ended in a final state, and each submission made one program;
- no tool call that is not idempotent ran twice, and each has exactly one result in the journal;
- event streams have no gap and no repeat, over any number of reconnects; neither have chat streams, greedy or sampled;
- routers agree where programs are, on replicas that live; no program that ended keeps KV; nothing waits or runs anywhere.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from enum import StrEnum

import pytest

from agent_program.ids import ProgramId
from agent_program.states import ProgramState
from continuum_router.draining import Departure, DrainOrder
from deployments.program import EndReason
from support.simulated_clients import ChatClient, ProgramClient
from support.simulated_cluster import SimulatedCluster
from support.simulated_parts import LEASE_TTL_S, EngineDouble
from support.virtual_time import LoopClock, run_virtually
from tool_runtime.registry import BUILTIN_TOOLS

pytestmark = pytest.mark.chaos

FAULTS_UNTIL_S = 25.0
#: In virtual time. A program whose runner, engines and store all failed for a while ends well within it.
ENDS_WITHIN_S = 1200.0
#: A program may fail only for want of engines or runners that was longer than it is told to wait.
MAY_FAIL_FOR = {EndReason.ENGINE_UNAVAILABLE, EndReason.RUNNERS_LOST}


class Fault(StrEnum):
    ENGINE_REPLICA_KILLED = "engine_replica_killed"
    ENGINE_CORE_DIED = "engine_core_died"
    RUNNER_KILLED = "runner_killed"
    RUNNER_STALLED = "runner_stalled"
    INGRESS_KILLED = "ingress_killed"
    TOOL_ACTOR_KILLED = "tool_actor_killed"
    STORE_AWAY = "store_away"
    BINDINGS_LOST = "bindings_lost"
    PARTITION = "partition"
    SLOW_MESSAGES = "slow_messages"
    REPLICA_SUSPECTED = "replica_suspected"
    REPLICA_DRAINED = "replica_drained"


async def _engine_replica_killed(cluster: SimulatedCluster, chosen: random.Random) -> None:
    cluster.lose("engine", chosen.choice(sorted(cluster.parts["engine"])))


async def _engine_core_died(cluster: SimulatedCluster, chosen: random.Random) -> None:
    part = cluster.parts["engine"][chosen.choice(sorted(cluster.parts["engine"]))]
    assert isinstance(part, EngineDouble)
    part.is_core_dead.set()


async def _runner_killed(cluster: SimulatedCluster, chosen: random.Random) -> None:
    alive = [index for index, runner in enumerate(cluster.runners) if not runner.is_dead]
    if alive:
        cluster.kill_runner(chosen.choice(alive))


async def _runner_stalled(cluster: SimulatedCluster, chosen: random.Random) -> None:
    runner = chosen.choice(cluster.runners)
    runner.goes.clear()
    await asyncio.sleep(chosen.uniform(5.0, 40.0))  # a lease lasts 10 s
    runner.goes.set()


async def _ingress_killed(cluster: SimulatedCluster, chosen: random.Random) -> None:
    alive = [index for index, ingress in enumerate(cluster.ingresses) if not ingress.is_dead]
    if alive:
        cluster.kill_ingress(chosen.choice(alive))


async def _tool_actor_killed(cluster: SimulatedCluster, chosen: random.Random) -> None:
    if cluster.parts["tools"]:
        cluster.lose("tools", chosen.choice(sorted(cluster.parts["tools"])))


async def _store_away(cluster: SimulatedCluster, chosen: random.Random) -> None:
    cluster.store.is_away = True
    await asyncio.sleep(chosen.uniform(1.0, 30.0))
    cluster.store.is_away = False


async def _bindings_lost(cluster: SimulatedCluster, chosen: random.Random) -> None:
    for bindings in cluster.bindings.values():
        await bindings.close()


async def _partition(cluster: SimulatedCluster, chosen: random.Random) -> None:
    process = chosen.choice([*cluster.runners, *cluster.ingresses])
    cut = {(process.name, replica) for replica in chosen.sample(sorted(cluster.parts["engine"]), k=1)}
    cluster.network.cut |= cut
    await asyncio.sleep(chosen.uniform(2.0, 60.0))
    cluster.network.cut -= cut


async def _slow_messages(cluster: SimulatedCluster, chosen: random.Random) -> None:
    cluster.network.delay_max_s = chosen.choice([0.1, 0.5, 1.0])
    await asyncio.sleep(chosen.uniform(2.0, 10.0))
    cluster.network.delay_max_s = 0.01


async def _replica_suspected(cluster: SimulatedCluster, chosen: random.Random) -> None:
    handle = chosen.choice(cluster.handles)
    handle.router.lose_replica(chosen.choice(sorted(cluster.parts[handle.namespace])))


async def _replica_drained(cluster: SimulatedCluster, chosen: random.Random) -> None:
    replica_id = chosen.choice(sorted(cluster.parts["engine"]))
    deadline = cluster.clock.wall_s() + chosen.uniform(2.0, 60.0)
    await cluster.orders.put(DrainOrder(replica_id=replica_id, deadline_wall_s=deadline, departure=Departure.LEAVE))


STRIKES: dict[Fault, Callable[[SimulatedCluster, random.Random], Awaitable[None]]] = {
    Fault.ENGINE_REPLICA_KILLED: _engine_replica_killed,
    Fault.ENGINE_CORE_DIED: _engine_core_died,
    Fault.RUNNER_KILLED: _runner_killed,
    Fault.RUNNER_STALLED: _runner_stalled,
    Fault.INGRESS_KILLED: _ingress_killed,
    Fault.TOOL_ACTOR_KILLED: _tool_actor_killed,
    Fault.STORE_AWAY: _store_away,
    Fault.BINDINGS_LOST: _bindings_lost,
    Fault.PARTITION: _partition,
    Fault.SLOW_MESSAGES: _slow_messages,
    Fault.REPLICA_SUSPECTED: _replica_suspected,
    Fault.REPLICA_DRAINED: _replica_drained,
}


class Story:
    """One schedule and what came of it."""

    def __init__(self, seed: int, faults: list[tuple[float, Fault]]) -> None:
        self.seed, self.faults = seed, faults
        self.programs = [ProgramClient(f"program-{seed}-{number}") for number in range(5)]
        self.chats = [ChatClient(f"chat-{seed}-{number}", is_greedy=number % 2 == 0) for number in range(4)]
        #: Ends of programs by reason, and what the faults made necessary: replayed turns, resumed programs, ...
        self.outcomes: Counter[str] = Counter()
        self.mended: Counter[str] = Counter()

    def __str__(self) -> str:
        return f"seed {self.seed}: " + ", ".join(f"{fault.value} at {at_s:.1f} s" for at_s, fault in self.faults)

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        # Processes that die leave tasks behind with nobody to hear how they ended.
        loop.set_exception_handler(lambda *_: None)
        cluster = SimulatedCluster(clock=LoopClock(loop), seed=self.seed)
        try:
            clients = [cluster.spawn(client.run(cluster)) for client in (*self.programs, *self.chats)]
            strikes = [cluster.spawn(self._strike(cluster, at_s, fault)) for at_s, fault in self.faults]
            async with asyncio.timeout(ENDS_WITHIN_S):
                await asyncio.gather(*strikes)
                await asyncio.gather(*clients)
            await asyncio.sleep(2 * LEASE_TTL_S + 60.0)
            await self._check(cluster)
        finally:
            await cluster.close()

    async def _strike(self, cluster: SimulatedCluster, at_s: float, fault: Fault) -> None:
        await asyncio.sleep(at_s)
        if cluster.parts["engine"]:
            await STRIKES[fault](cluster, random.Random(f"{self.seed} {at_s}"))

    # What must hold

    async def _check(self, cluster: SimulatedCluster) -> None:
        await self._check_programs(cluster)
        for chat in self.chats:
            self.mended["streams moved"] += len(set(cluster.homes(chat.name))) > 1
            assert chat.complaints == []
            assert len(chat.answers) == chat.turns
        await self._check_bindings(cluster)
        self._check_nothing_is_left(cluster)

    async def _check_programs(self, cluster: SimulatedCluster) -> None:
        page = await cluster.journal.list(state=None, limit=100, after=None)
        ids = {client.record.id for client in self.programs if client.record is not None}
        assert {record.id for record in page.records} == ids, "each submission is one program"
        assert len(ids) == len(self.programs)
        for client in self.programs:
            assert client.record is not None
            stored = await cluster.journal.load(client.record.id)
            record = stored.record
            assert record.state.is_final
            assert record.state is ProgramState.COMPLETED or record.end_reason in MAY_FAIL_FOR, record
            self.outcomes[str(record.end_reason)] += 1
            self.mended["turns replayed"] += sum(step.kind == "turn.replayed" for step in stored.steps)
            self.mended["programs resumed"] += sum(
                step.kind == "program.claimed" and step.data["resumed"] for step in stored.steps
            )
            self.mended["calls interrupted"] += sum(
                step.kind == "tool.finished" and step.data["outcome"] == "interrupted" for step in stored.steps
            )
            assert client.seqs == [step.seq for step in stored.steps], "the event stream has a gap or a repeat"
            self._check_tools(cluster, record.id, [step for step in stored.steps if step.kind == "tool.finished"])
            tools = {step.data["call_id"]: step.data["tool"] for step in stored.steps if step.kind == "tool.started"}
            for (program_id, call_id), runs in cluster.effects.items():
                if program_id == record.id and not BUILTIN_TOOLS[tools[call_id]].idempotent:
                    assert runs == 1, f"{call_id} ran {runs} times"

    @staticmethod
    def _check_tools(cluster: SimulatedCluster, program_id: str, finished: list) -> None:
        results = Counter(step.data["call_id"] for step in finished)
        assert all(count == 1 for count in results.values()), "a call has two results"
        for step in finished:
            if step.data["outcome"] == "ok":
                assert cluster.effects[program_id, step.data["call_id"]] >= 1

    async def _check_bindings(self, cluster: SimulatedCluster) -> None:
        living = set(cluster.parts["engine"])
        routers = [handle.router for handle in cluster.handles if handle.namespace == "engine"]
        for router in routers:
            router.fleet.check_integrity()
            assert router.unconfirmed_count == 0
        for chat in self.chats:
            placed = [await router.place(ProgramId(chat.name)) for router in routers]
            where = {placement.replica_id for placement in placed if placement is not None}
            assert len(where) == 1, f"routers do not agree: {where}"
            assert where <= living

    def _check_nothing_is_left(self, cluster: SimulatedCluster) -> None:
        ended = {client.record.id for client in self.programs if client.record is not None}
        for part in cluster.parts["engine"].values():
            assert isinstance(part, EngineDouble)
            assert part.turns_open == 0
            assert ended.isdisjoint(part.live_leases()), "a program that ended keeps KV"
        for ingress in cluster.ingresses:
            assert ingress.gate.status() == {"running": 0, "waiting": 0}
        for process in cluster.runners:
            assert process.runner.status()["running"] == 0
        assert not cluster.journal._queue


def tell(seed: int, faults: list[tuple[float, Fault]]) -> Story:
    """Run one schedule and check it; whatever fails names the schedule."""
    story = Story(seed, faults)
    try:
        run_virtually(story.run())
    except (AssertionError, TimeoutError, RuntimeError) as error:
        raise AssertionError(f"{story}: {type(error).__name__}: {error}") from error
    return story


def schedule(seed: int) -> list[tuple[float, Fault]]:
    """Between one and six faults, some of which come together."""
    chosen = random.Random(seed)
    times = sorted(chosen.uniform(0.0, FAULTS_UNTIL_S) for _ in range(chosen.randint(1, 6)))
    return [(at_s, chosen.choice(list(Fault))) for at_s in times]


def test_without_faults_every_program_answers_and_every_chat_streams_once() -> None:
    story = tell(0, [])
    assert story.outcomes == {"answer": 5}
    assert [chat.broken_streams for chat in story.chats] == [0] * 4


@pytest.mark.parametrize("fault", Fault)
def test_one_fault_of_each_kind_at_several_moments(fault: Fault) -> None:
    outcomes: Counter[str] = Counter()
    mended: Counter[str] = Counter()
    for number in range(6):
        story = tell(1000 + number, [(0.3 + 1.7 * number, fault)])
        outcomes += story.outcomes
        mended += story.mended
    if fault is Fault.ENGINE_REPLICA_KILLED:
        assert mended["turns replayed"]
    assert set(outcomes) == {"answer"}, "one fault alone fails no program"


@pytest.mark.parametrize("batch", range(8))
def test_several_faults_in_two_hundred_seeded_schedules(batch: int) -> None:
    mended: Counter[str] = Counter()
    outcomes: Counter[str] = Counter()
    for seed in range(batch * 25, batch * 25 + 25):
        story = tell(seed, schedule(seed))
        mended += story.mended
        outcomes += story.outcomes
    for what in ("programs resumed", "calls interrupted", "streams moved"):
        assert mended[what], f"the faults never led to {what}: they do not bite"
    assert outcomes["answer"] >= 0.95 * outcomes.total()


class LossOfTheStore(Story):
    """The store comes back empty, journal and all: what was accepted is gone, and its clients are told."""

    async def _strike(self, cluster: SimulatedCluster, at_s: float, fault: Fault) -> None:
        await asyncio.sleep(at_s)
        await _bindings_lost(cluster, random.Random(0))
        cluster.journal._entries.clear()
        cluster.journal._queue.clear()

    async def _check_programs(self, cluster: SimulatedCluster) -> None:
        for client in self.programs:
            assert client.record is not None
            page = await cluster.journal.list(state=None, limit=100, after=None)
            is_known = client.record.id in {record.id for record in page.records}
            is_told = client.is_unknown or client.end is not None
            assert is_told, "a program's client knows neither its end nor its loss"
            assert not (is_known and client.is_unknown)
        self.outcomes["unknown"] += sum(client.is_unknown for client in self.programs)
        assert all(runs == 1 for (_, call_id), runs in cluster.effects.items() if call_id.endswith("-0"))


def test_a_store_that_lost_everything_leaves_nothing_running_and_every_client_is_told() -> None:
    unknown = 0
    for seed in range(20):
        story = LossOfTheStore(seed, [(0.5 + 0.4 * seed, Fault.BINDINGS_LOST)])
        run_virtually(story.run())
        unknown += story.outcomes["unknown"]
    assert unknown, "some programs were lost with the store"
