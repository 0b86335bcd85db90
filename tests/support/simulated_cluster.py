"""A cluster in one event loop and in virtual time, whose router, runner, journal, chat API, admission and draining are the real ones.

Engine replicas, tool actors, the store's reachability and the network are doubles (`simulated_parts.py`); a *controller* does what
Serve does: it replaces what died, and broadcasts who lives with their reports. Clients (`simulated_clients.py`) submit programs and
follow their events, or stream chats of their own, and hold against the cluster whatever they see that they should not.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from agent_program.clock import Clock
from agent_program.errors import EngineUnavailable, Unavailable
from agent_program.ids import ProgramId, ReplicaId
from agent_program.turn import TurnHints
from continuum_router.affinity import affinity_of
from continuum_router.bindings import MemoryBindings
from continuum_router.config import AdmissionSettings, RetrySettings, RouterSettings
from continuum_router.drain_orders import MemoryDrainOrders
from continuum_router.exchange import Note, TurnReplied
from continuum_router.program_router import Intent, ProgramRouter
from continuum_router.replica_view import ReplicaView
from continuum_router.resilience import RetryBudget
from continuum_router.routing_memory import Reply
from deployments.chat_api import ChatApi
from deployments.edge_gate import EdgeGate
from deployments.memory_journal import MemoryJournal
from deployments.ports import ReleasedProgram, ReplicaLost, ToolHostLost, TurnOutcome
from deployments.program_service import ProgramService
from deployments.program_settings import ProgramSettings
from deployments.routed_replica import ReplicaDrained
from deployments.runner import ProgramRunner
from deployments.turn_minder import SentItem, TurnItem, TurnMinder, TurnPatience, turn_outcome
from support.simulated_parts import EngineDouble, Network, Process, Store, StorePort, ToolActorDouble
from tool_runtime.held_program import HeldProgram
from tool_runtime.registry import BUILTIN_TOOLS
from tool_runtime.tool_call import ToolCall, ToolProgress, ToolResult, ToolStarted

MODEL = "small"
ROUTER = RouterSettings(turn_timeout_s=40.0, stream_silence_s=5.0)
PROGRAMS = ProgramSettings(turn_attempts_max=6)
PERIOD_S = 0.5
START_S = 3.0
HEALTH_S = 5.0
#: How long a process looks for a replica before it says that there is none.
ROUTE_S = 30.0
TURNS_MAX = 64

Part = EngineDouble | ToolActorDouble


class Handle:
    """A deployment as one process reaches it: its own router, as in Serve."""

    def __init__(self, cluster: SimulatedCluster, process: Process, namespace: str) -> None:
        self.cluster, self.process, self.namespace = cluster, process, namespace
        bindings = StorePort(cluster.bindings[namespace], process, cluster.store, cluster.network)
        self.router = ProgramRouter(bindings=bindings, settings=ROUTER, clock=cluster.clock)  # type: ignore[arg-type]
        cluster.handles.append(self)
        self.hear()

    def hear(self) -> None:
        """The controller's broadcast."""
        parts = self.cluster.parts[self.namespace].values()
        views = [ReplicaView.from_report(part.replica_id, TURNS_MAX, part.report()) for part in parts]
        self.router.replace_replicas(views)

    def take(self, note: Note) -> None:
        """What a caller says to the router of its handle."""
        if not isinstance(note, TurnReplied):
            self.router.turn_lost(note.program_id, note.replica_id)
            return
        view = ReplicaView.from_report(note.replica_id, TURNS_MAX, note.report)
        self.router.reply(
            Reply(program_id=note.program_id, view=view, kept_s=note.kept_s, context_tokens=note.context_tokens)
        )

    async def route(
        self, program_id: ProgramId, intent: Intent, affinity: Callable[[], Any] | None = None
    ) -> tuple[Part, dict[str, Any]]:
        """The replica for a request, and why; a dead one is found out and another sought, as Serve does."""
        give_up_s = self.cluster.clock.now_s() + ROUTE_S
        while True:
            await self.process.goes.wait()
            self.process.check()
            placement = await self.router.place(program_id, intent, affinity=affinity)
            if placement is not None:
                await self.cluster.network.reach(self.process.name, placement.replica_id)
                part = self.cluster.parts[self.namespace].get(placement.replica_id)
                if part is not None and not part.is_dead.is_set():
                    return part, {"reason": placement.reason.value, **(placement.detail or {})}
                self.router.lose_replica(placement.replica_id)
            elif self.cluster.clock.now_s() >= give_up_s:
                raise Unavailable("no replica")
            await asyncio.sleep(0.1)


class EngineAtHandle:
    """`EngineClient` and `ChatEngine` over a handle, with the real minder."""

    def __init__(self, handle: Handle, clock: Clock) -> None:
        self._handle = handle
        patience = TurnPatience(turn_s=ROUTER.turn_timeout_s, silence_s=ROUTER.stream_silence_s)
        self._minder = TurnMinder(patience=patience, clock=clock, tell=handle.take)

    @asynccontextmanager
    async def chat(self, body: Mapping[str, Any], hints: TurnHints | None) -> AsyncIterator[AsyncIterator[TurnItem]]:
        assert hints is not None
        sent = self._send(body, hints)
        watched = self._minder.watch(sent, hints)
        try:
            yield watched
        finally:
            await watched.aclose()
            await sent.aclose()

    async def _send(self, body: Mapping[str, Any], hints: TurnHints) -> AsyncGenerator[SentItem, None]:
        handle = self._handle
        part, why = await handle.route(hints.program_id, Intent.BIND, partial(affinity_of, body, hints))
        assert isinstance(part, EngineDouble)
        handle.router.fleet.turn_sent(part.replica_id)
        answer = part.chat(body, hints, placement=why)
        try:
            async for item in answer:
                await handle.cluster.network.reach(handle.process.name, part.replica_id)
                handle.process.check()
                if part.is_dead.is_set():
                    raise ReplicaLost("the replica died")
                yield item
        finally:
            await answer.aclose()
            handle.router.fleet.turn_ended(part.replica_id)

    async def run_turn(self, body: Mapping[str, Any], hints: TurnHints) -> TurnOutcome:
        async with self.chat({**body, "stream": False}, hints) as items:
            return await turn_outcome(items, lambda status, document: EngineUnavailable(str(document)))

    async def tool_event(self, event: object) -> None: ...

    async def release(self, program_id: str) -> ReleasedProgram | None:
        part = await _advised(self._handle, program_id)
        if part is None:
            return None
        assert isinstance(part, EngineDouble)
        part.release(program_id)
        await self._handle.router.release(ProgramId(program_id))
        return ReleasedProgram(replica=part.replica_id, lease_outcomes={})


class ToolsAtHandle:
    """`ToolClient` over a handle."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    async def call(
        self, call: ToolCall, on_started: Callable[[ToolStarted | ToolProgress], Awaitable[None]]
    ) -> ToolResult:
        part, _ = await self._handle.route(ProgramId(call.program_id), Intent.BIND)
        assert isinstance(part, ToolActorDouble)
        result = await part.call(call, on_started)
        await self._handle.cluster.network.reach(self._handle.process.name, part.replica_id)
        if part.is_dead.is_set():
            raise ToolHostLost("the actor died")
        return result

    async def cancel(self, program_id: str, call_id: str | None = None) -> None:
        part = await _advised(self._handle, program_id)
        if isinstance(part, ToolActorDouble):
            part.cancel(program_id)

    async def release(self, program_id: str, **_: object) -> None:
        await self.cancel(program_id)
        await self._handle.router.release(ProgramId(program_id))

    async def held(self, quiet_s: float) -> Sequence[HeldProgram]:
        return []

    async def release_everywhere(self, held: HeldProgram, *, delete_workspace: bool) -> None: ...


async def _advised(handle: Handle, program_id: str) -> Part | None:
    """Where advice about a program goes; it waits for no more than ten seconds, as the real one."""
    try:
        async with asyncio.timeout(10.0):
            part, _ = await handle.route(ProgramId(program_id), Intent.FOLLOW)
    except (Unavailable, TimeoutError):
        return None
    return part


class RunnerProcess(Process):
    """A runner, in a process that can die."""

    def __init__(self, cluster: SimulatedCluster, name: str) -> None:
        super().__init__(name)
        self.runner = ProgramRunner(
            journal=StorePort(cluster.journal, self, cluster.store, cluster.network),  # type: ignore[arg-type]
            engine=EngineAtHandle(Handle(cluster, self, "engine"), cluster.clock),
            tools=ToolsAtHandle(Handle(cluster, self, "tools")),
            clock=cluster.clock,
            settings=PROGRAMS,
        )
        self.runner.start()

    def kill(self) -> None:
        # Nothing is handed back: its tasks end where they are, and what they still try does not happen.
        super().kill()
        running = [program.task for program in self.runner._running.values()]
        for task in (*self.runner._duties, *running):
            task.cancel()


class IngressProcess(Process):
    """The chat API and the programs' use cases, in a process that can die."""

    def __init__(self, cluster: SimulatedCluster, name: str) -> None:
        super().__init__(name)
        engine = EngineAtHandle(Handle(cluster, self, "engine"), cluster.clock)
        self.gate = EdgeGate(AdmissionSettings(turns_max=3), clock=cluster.clock)
        self.chat = ChatApi(engine, model=MODEL, gate=self.gate, budget=RetryBudget(RetrySettings()))

        async def tools() -> Mapping[str, Any]:
            return BUILTIN_TOOLS

        self.programs = ProgramService(
            journal=StorePort(cluster.journal, self, cluster.store, cluster.network),  # type: ignore[arg-type]
            model=MODEL, tools=tools, clock=cluster.clock, settings=PROGRAMS,
        )  # fmt: skip


class SimulatedCluster:
    """Everything that runs."""

    def __init__(self, *, clock: Clock, seed: int, engines: int = 3, actors: int = 2, runners: int = 2) -> None:
        self.clock = clock
        self.chosen = random.Random(seed)
        self.network = Network(random.Random(seed + 1))
        self.store = Store()
        self.journal = MemoryJournal(clock)
        self.bindings = {name: MemoryBindings(clock=clock, ttl_s=600.0) for name in ("engine", "tools")}
        self.orders = MemoryDrainOrders(clock=clock)
        #: How often each call had its effect, by program and call id.
        self.effects: Counter[tuple[str, str]] = Counter()
        self.parts: dict[str, dict[ReplicaId, Part]] = {"engine": {}, "tools": {}}
        #: Every engine replica that there ever was.
        self.engines: list[EngineDouble] = []
        self.handles: list[Handle] = []
        self._born = 0
        self._tasks: set[asyncio.Task[Any]] = set()
        for _ in range(engines):
            self.add("engine")
        for _ in range(actors):
            self.add("tools")
        self.runners = [RunnerProcess(self, self._name("runner")) for _ in range(runners)]
        self.ingresses = [IngressProcess(self, self._name("ingress")) for _ in range(2)]
        self.spawn(self._control())

    def spawn(self, work: Any) -> asyncio.Task[Any]:
        """Something that goes on until it is done or the cluster is closed."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def add(self, namespace: str) -> ReplicaId:
        """A new replica, which the next broadcast tells of."""
        name = self._name(namespace)
        part: Part
        if namespace == "engine":
            part = EngineDouble(name, orders=self.orders, clock=self.clock, seed=self._born)
            self.engines.append(part)
            part.routed.check_health()  # the last step of a start
        else:
            part = ToolActorDouble(name, self.effects)
        self.parts[namespace][part.replica_id] = part
        return part.replica_id

    def lose(self, namespace: str, replica_id: ReplicaId, *, is_replaced: bool = True) -> None:
        """A replica dies at once, and another one starts."""
        part = self.parts[namespace].pop(replica_id)
        if isinstance(part, ToolActorDouble):
            part.kill()
        else:
            part.is_dead.set()
            part.routed.stop()
        if is_replaced:
            self.spawn(self._replace(namespace))

    def kill_runner(self, index: int) -> None:
        """A runner dies; another one starts in its place."""
        self.runners[index].kill()
        self.spawn(self._restart(self.runners, index, lambda: RunnerProcess(self, self._name("runner"))))

    def kill_ingress(self, index: int) -> None:
        """An ingress dies; another one starts in its place."""
        self.ingresses[index].kill()
        self.spawn(self._restart(self.ingresses, index, lambda: IngressProcess(self, self._name("ingress"))))

    def homes(self, program_id: str) -> list[ReplicaId]:
        """The replicas that took the program's turns, in order, each as often as it took one."""
        turns = [
            (at_s, engine.replica_id) for engine in self.engines for at_s, owner in engine.turns if owner == program_id
        ]
        return [replica_id for _, replica_id in sorted(turns)]

    def ingress(self) -> IngressProcess | None:
        """One that lives, as a load balancer picks it."""
        alive = [ingress for ingress in self.ingresses if not ingress.is_dead]
        return self.chosen.choice(alive) if alive else None

    async def close(self) -> None:
        """End everything."""
        for process in (*self.runners, *self.ingresses):
            process.kill()
        for part in self.parts["engine"].values():
            assert isinstance(part, EngineDouble)
            part.routed.stop()
        me = asyncio.current_task()
        rest = [task for task in asyncio.all_tasks() if task is not me]
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    # What the controller does

    async def _control(self) -> None:
        looked_s = self.clock.now_s()
        while True:
            await asyncio.sleep(PERIOD_S)
            for handle in self.handles:
                if not handle.process.is_dead:
                    self.spawn(self._broadcast(handle))
            if self.clock.now_s() - looked_s >= HEALTH_S:
                looked_s = self.clock.now_s()
                self._check_health()

    async def _broadcast(self, handle: Handle) -> None:
        await self.network.hop()
        if not handle.process.is_dead:
            handle.hear()

    def _check_health(self) -> None:
        for part in list(self.parts["engine"].values()):
            assert isinstance(part, EngineDouble)
            try:
                part.routed.check_health()
            except ReplicaDrained:
                self.lose("engine", part.replica_id)
                continue
            if part.is_core_dead.is_set():
                self.lose("engine", part.replica_id)

    async def _replace(self, namespace: str) -> None:
        await asyncio.sleep(START_S)
        self.add(namespace)

    async def _restart(self, processes: list[Any], index: int, start: Callable[[], Process]) -> None:
        await asyncio.sleep(START_S)
        processes[index] = start()
        self.handles = [handle for handle in self.handles if not handle.process.is_dead]

    def _name(self, kind: str) -> str:
        self._born += 1
        return f"{kind}-{self._born}"
