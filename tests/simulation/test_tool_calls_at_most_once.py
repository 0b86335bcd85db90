"""Runners and tool actors that die, or stall and come back, at every step of a call: no call runs twice, every program ends.

The loop, the journal and their leases are the real ones; the engine is a function of the conversation, and tool actors are doubles
with one effect to a call. Everything that happens goes through numbered points; a schedule says at which of them what goes wrong:

    kill_runner    the runner that is there is gone at once: what it does next, it does not do
    stall_runner   it stops there, its lease lapses, another takes over, and at the very end it goes on as if nothing had been
    kill_actor     the actor that runs a call is gone, with or without the call's effect, and whoever waits hears of it

Every single fault at every point is tried, then seeded schedules of several.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from enum import StrEnum
from typing import Any

import pytest

from agent_program.clock import ManualClock
from agent_program.ids import ToolKey
from agent_program.states import ProgramState
from agent_program.tool_events import ToolOutcome
from agent_program.turn import TurnHints
from deployments.journal import LeaseLost
from deployments.memory_clients import answer, tool_calls
from deployments.memory_journal import MemoryJournal
from deployments.ports import ReleasedProgram, ToolHostLost, TurnOutcome
from deployments.program_loop import ProgramLoop
from deployments.program_settings import ProgramSettings
from support.programs import spec
from tool_runtime.registry import BUILTIN_TOOLS
from tool_runtime.tool_call import ToolCall, ToolProgress, ToolResult, ToolStarted
from tool_runtime.tool_key import tool_key

LEASE_S = 10.0
SETTINGS = ProgramSettings(retry_s=0.001, claims_in_a_row_max=100)
#: Two turns that call tools, two calls of one turn side by side, one of them idempotent, then the answer.
TURNS: tuple[TurnOutcome, ...] = (
    tool_calls(("c1", "shell", {"command": "make"}), ("c2", "read_file", {"path": "log"})),
    tool_calls(("c3", "shell", {"command": "make install"})),
    answer("done"),
)
CALLS = {"c1": "shell", "c2": "read_file", "c3": "shell"}
ONCE = Counter(list(CALLS))


class Fault(StrEnum):
    KILL_RUNNER = "kill_runner"
    STALL_RUNNER = "stall_runner"
    KILL_ACTOR = "kill_actor"


class Runner:
    """One runner process: a loop over the program it claimed, which reaches the world through `Port`s."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_dead = False
        self.stalled, self.resumed = asyncio.Event(), asyncio.Event()
        self.resumed.set()
        self.task: asyncio.Task[None] | None = None

    def stall(self) -> None:
        self.stalled.set()
        self.resumed.clear()

    def kill(self) -> None:
        self.is_dead = True
        if self.task is not None:
            self.task.cancel()


class Port:
    """A journal, engine or tool client as one runner reaches it: each call is a point before and a point after."""

    def __init__(self, target: Any, runner: Runner, world: World) -> None:
        self._target, self._runner, self._world = target, runner, world

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        method = getattr(self._target, name)

        async def reached(*arguments: Any, **keywords: Any) -> Any:
            await self._world.point(f"{name}: asked", self._runner)
            result = await method(*arguments, **keywords)
            await self._world.point(f"{name}: answered", self._runner)
            return result

        return reached


class ConversationEngine:
    """The next turn is a matter of how many turns the conversation has."""

    def __init__(self) -> None:
        self.conversations: list[list[Mapping[str, Any]]] = []

    async def run_turn(self, body: Mapping[str, Any], hints: TurnHints) -> TurnOutcome:
        self.conversations.append(body["messages"])
        return TURNS[sum(message["role"] == "assistant" for message in body["messages"])]

    async def tool_event(self, event: object) -> None: ...

    async def release(self, program_id: str) -> ReleasedProgram | None:
        return None


class Actors:
    """Tool actors. A call goes on when the runner that sent it is gone, until it is cancelled or its actor dies."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.effects: Counter[str] = Counter()
        self._running: set[asyncio.Task[ToolResult]] = set()

    async def call(
        self, call: ToolCall, on_started: Callable[[ToolStarted | ToolProgress], Awaitable[None]]
    ) -> ToolResult:
        key, started = tool_key(call.tool, call.arguments), asyncio.Event()
        performing = asyncio.create_task(self._perform(call, key, started))
        self._running.add(performing)
        performing.add_done_callback(self._running.discard)
        waiting = asyncio.create_task(started.wait())
        await asyncio.wait({performing, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if started.is_set():
            await on_started(ToolStarted(call_id=call.call_id, tool_key=key, queue_s=0.0))
        await asyncio.wait({performing})
        if performing.cancelled():
            raise ToolHostLost("cancelled")
        return performing.result()

    async def _perform(self, call: ToolCall, key: ToolKey, started: asyncio.Event) -> ToolResult:
        await self._world.actor_point(f"{call.call_id}: received")
        started.set()
        await self._world.actor_point(f"{call.call_id}: about to act")
        self.effects[call.call_id] += 1
        await self._world.actor_point(f"{call.call_id}: has acted")
        output = f"effect {self.effects[call.call_id]} of {call.call_id}"
        return ToolResult(
            call_id=call.call_id, tool=call.tool, tool_key=key, outcome=ToolOutcome.OK, output=output, duration_s=1.0
        )

    async def cancel(self, program_id: str, call_id: str | None = None, **_: object) -> None:
        for task in list(self._running):
            task.cancel()

    async def release(self, program_id: str, **_: object) -> None:
        await self.cancel(program_id)

    async def settled(self) -> None:
        """What still runs for nobody comes to its end."""
        await asyncio.gather(*self._running, return_exceptions=True)


class World:
    """One program from its submission to its end, with the faults of one schedule."""

    def __init__(self, faults: Mapping[int, Fault]) -> None:
        self._faults = faults
        self.points: list[str] = []
        self.clock = ManualClock()
        self.journal = MemoryJournal(self.clock)
        self.engine = ConversationEngine()
        self.actors = Actors(self)
        self.program = spec()
        self.runner: Runner | None = None
        self._stalled: list[Runner] = []
        self.claims = 0

    async def point(self, name: str, runner: Runner) -> None:
        """Something that `runner` does."""
        if runner.is_dead:
            raise asyncio.CancelledError  # its task is cancelled already; whatever it still tries does not happen either
        fault = await self._next(name)
        if fault is Fault.KILL_RUNNER:
            runner.kill()
        elif fault is Fault.STALL_RUNNER:
            runner.stall()
        await runner.resumed.wait()
        if runner.is_dead:
            raise asyncio.CancelledError

    async def actor_point(self, name: str) -> None:
        """Something that an actor does; its runner may die meanwhile."""
        fault = await self._next(name)
        if fault is Fault.KILL_ACTOR:
            raise ToolHostLost(f"killed at {name}")
        if fault is Fault.KILL_RUNNER and self.runner is not None:
            self.runner.kill()
        elif fault is Fault.STALL_RUNNER and self.runner is not None:
            self.runner.stall()

    async def _next(self, name: str) -> Fault | None:
        self.points.append(name)
        number = len(self.points)
        await asyncio.sleep(0)
        return self._faults.get(number)

    async def run(self) -> None:
        """Submit, and have runners take the program, one after the other, until it has ended; then wake those that stalled."""
        await self.journal.create(self.program, queued_max=10)
        while not (await self.journal.get(self.program.id)).state.is_final:
            await self._take()
            assert self.claims < 50, "the program does not end"
        for runner in self._stalled:
            runner.resumed.set()
        await asyncio.gather(*(self._ended(runner) for runner in self._stalled))
        await self.actors.settled()

    async def _take(self) -> None:
        self.clock.advance(LEASE_S + 1)
        self.claims += 1
        runner = self.runner = Runner(f"runner_{self.claims}")
        claim = await self.journal.claim(runner.name, lease_s=LEASE_S)
        assert claim is not None, "nobody has it, and nobody can take it"
        loop = ProgramLoop(
            claim,
            await self.journal.load(claim.program_id),
            runner=runner.name,
            journal=Port(self.journal, runner, self),  # type: ignore[arg-type]
            engine=Port(self.engine, runner, self),  # type: ignore[arg-type]
            tools=Port(self.actors, runner, self),  # type: ignore[arg-type]
            clock=self.clock,
            settings=SETTINGS,
        )
        runner.task = asyncio.create_task(self._loop(loop))
        stalled = asyncio.create_task(runner.stalled.wait())
        await asyncio.wait({runner.task, stalled}, return_when=asyncio.FIRST_COMPLETED)
        stalled.cancel()
        if runner.stalled.is_set():
            self._stalled.append(runner)
        else:
            await self._ended(runner)

    @staticmethod
    async def _loop(loop: ProgramLoop) -> None:
        with contextlib.suppress(LeaseLost):
            await loop.run()

    @staticmethod
    async def _ended(runner: Runner) -> None:
        assert runner.task is not None
        await asyncio.wait({runner.task})
        if not runner.task.cancelled() and runner.task.exception() is not None:
            raise AssertionError(f"{runner.name} ended with an error") from runner.task.exception()

    async def check(self) -> None:
        """What must hold whatever went wrong."""
        record = await self.journal.get(self.program.id)
        steps = await self.journal.steps(self.program.id)
        assert record.state is ProgramState.COMPLETED
        assert record.output == "done"
        finished = Counter(step.data["call_id"] for step in steps if step.kind == "tool.finished")
        assert finished == ONCE, "each call has one result in the journal"
        outcomes = {step.data["call_id"]: step.data for step in steps if step.kind == "tool.finished"}
        for call_id, tool in CALLS.items():
            if not BUILTIN_TOOLS[tool].idempotent:
                assert self.actors.effects[call_id] <= 1, f"{call_id} ran {self.actors.effects[call_id]} times"
            if outcomes[call_id]["outcome"] == ToolOutcome.OK:
                assert self.actors.effects[call_id] >= 1, f"{call_id} has a result and never ran"
            else:
                assert outcomes[call_id]["outcome"] == ToolOutcome.INTERRUPTED
        last = max(
            self.engine.conversations, key=len
        )  # one that stalled asks with an old conversation, at the very end
        told = {message["tool_call_id"]: message["content"] for message in last if message["role"] == "tool"}
        assert told == {call_id: outcomes[call_id]["output"] for call_id in CALLS}, "the model is told each result"


def run(faults: Mapping[int, Fault]) -> World:
    """Run one schedule to its end and check it. Identical schedules run identically."""

    async def within() -> World:
        loop = asyncio.get_running_loop()
        # A runner that dies while it writes leaves the write's own task behind, with nobody to hear how it ended.
        loop.set_exception_handler(
            lambda _, context: None if _is_death(context) else loop.default_exception_handler(context)
        )
        world = World(faults)
        async with asyncio.timeout(60):  # no schedule takes a second: this is a program that does not end
            await world.run()
        await world.check()
        return world

    return asyncio.run(within())


def _is_death(context: Mapping[str, Any]) -> bool:
    return isinstance(context.get("exception"), LeaseLost)


def test_without_faults_each_call_runs_once_under_one_runner() -> None:
    world = run({})
    assert world.claims == 1
    assert world.actors.effects == ONCE


@functools.cache
def points() -> tuple[str, ...]:
    """Every point of a run without faults."""
    return tuple(run({}).points)


@pytest.mark.parametrize("fault", Fault)
def test_one_fault_at_every_point_of_the_program(fault: Fault) -> None:
    interrupted = 0
    for point in range(1, len(points()) + 1):
        try:
            world = run({point: fault})
        except (AssertionError, TimeoutError) as error:
            raise AssertionError(f"{fault} at point {point}, {points()[point - 1]!r}: {error}") from error
        interrupted += world.claims > 1 or world.actors.effects != ONCE
    assert interrupted, "the faults made a difference"


@pytest.mark.parametrize("batch", range(4))
def test_several_faults_in_two_hundred_seeded_schedules(batch: int) -> None:
    claims = 0
    for seed in range(batch * 50, batch * 50 + 50):
        chosen = random.Random(seed)
        at = chosen.sample(range(1, 3 * len(points())), k=chosen.randint(2, 8))
        faults = {point: chosen.choice(list(Fault)) for point in at}
        try:
            claims += run(faults).claims
        except (AssertionError, TimeoutError) as error:
            raise AssertionError(f"seed {seed}, {faults}: {error}") from error
    assert claims > 60, "programs changed hands"


def test_a_schedule_runs_the_same_twice() -> None:
    faults = {12: Fault.STALL_RUNNER, 30: Fault.KILL_ACTOR, 41: Fault.KILL_RUNNER}
    one, two = run(faults), run(faults)
    assert one.points == two.points
    assert one.actors.effects == two.actors.effects


def test_a_journal_that_let_a_call_run_twice_would_be_found_out() -> None:
    """The check itself is checked: a shell that claims to be idempotent is run again, and that is seen."""

    class Forgetful(World):
        def __init__(self, faults: Mapping[int, Fault]) -> None:
            super().__init__(faults)
            tools = [{**tool, "idempotent": True} for tool in self.program.tool_specs]
            self.program = self.program.model_copy(update={"tool_specs": tools})

    async def within(point: int) -> bool:
        world = Forgetful({point: Fault.KILL_ACTOR})
        await world.run()
        try:
            await world.check()
        except AssertionError as error:
            return "ran 2 times" in str(error)
        return False

    assert any(asyncio.run(within(point)) for point in range(1, len(points()) + 1))
