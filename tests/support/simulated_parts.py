"""What a simulated cluster is made of: doubles of engine replicas, tool actors and the network between processes.

Decisions are not here. An engine double answers from the conversation alone, so that a replayed turn says the same; it takes time,
holds KV for programs, and dies in the ways that engines die. A tool actor has one effect a call, which is counted.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any

from agent_program.clock import Clock
from agent_program.errors import EngineUnavailable, StoreUnavailable
from agent_program.ids import ReplicaId
from agent_program.tool_events import ToolOutcome
from agent_program.turn import TurnHints
from continuum_router.drain_orders import DrainOrders
from deployments.ports import ReplicaLost, ToolHostLost
from deployments.routed_replica import RoutedReplica
from deployments.turn_minder import SentItem, TurnReport, TurnTaken
from engine_replicas.turn_stream import TurnClosed, TurnOpened
from support.chat_streams import chunk
from tool_runtime.tool_call import ToolCall, ToolResult, ToolStarted
from tool_runtime.tool_key import tool_key

TOKENS = 8
TOKEN_S = 0.1
PROMPT_S = 0.2
BATCH = 4
LEASE_TTL_S = 20.0
CALL_S = 1.5


class Process:
    """Something that can die: what it does next then does not happen. Or it stalls: that happens later, as if nothing had been."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_dead = False
        #: Not set while it stalls.
        self.goes = asyncio.Event()
        self.goes.set()
        self.tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    def check(self) -> None:
        if self.is_dead:
            raise asyncio.CancelledError(f"{self.name} is dead")

    def kill(self) -> None:
        self.is_dead = True
        for task in list(self.tasks):
            task.cancel()


class Network:
    """Delays of messages, and who cannot reach whom."""

    def __init__(self, chosen: random.Random) -> None:
        self._random = chosen
        self.delay_max_s = 0.01
        self.cut: set[tuple[str, str]] = set()

    async def hop(self) -> None:
        await asyncio.sleep(self._random.uniform(0.0, self.delay_max_s))

    async def reach(self, process: str, target: str) -> None:
        """Get there; for ever, where the two are parted."""
        await self.hop()
        while (process, target) in self.cut:  # noqa: ASYNC110 - time is virtual
            await asyncio.sleep(0.5)


class StorePort:
    """A store (journal, bindings) as one process reaches it: away at times, and its answers get lost."""

    def __init__(self, target: Any, process: Process, store: Store, network: Network) -> None:
        self._target, self._process, self._store, self._network = target, process, store, network

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._target, name)
        if name in ("listen", "close"):
            return method

        async def reached(*arguments: Any, **keywords: Any) -> Any:
            self._process.check()
            await self._network.hop()
            await self._process.goes.wait()
            self._process.check()
            self._store.check()
            result = await method(*arguments, **keywords)
            await self._network.hop()
            self._process.check()
            self._store.check()  # it was done, and the answer is lost
            return result

        return reached


class Store:
    """Whether the store answers."""

    def __init__(self) -> None:
        self.is_away = False

    def check(self) -> None:
        if self.is_away:
            raise StoreUnavailable


class EngineDouble:
    """One engine replica, with the router's side of a real one."""

    def __init__(self, name: str, *, orders: DrainOrders, clock: Clock, seed: int) -> None:
        self.replica_id = ReplicaId(name)
        self.routed = RoutedReplica(self.replica_id, orders=orders, clock=clock)
        self._clock = clock
        self._random = random.Random(seed)
        self._room = asyncio.Semaphore(BATCH)
        self.is_dead = asyncio.Event()
        self.is_core_dead = asyncio.Event()
        self.turns_open = 0
        #: When each turn came, and whose it was.
        self.turns: list[tuple[float, str]] = []
        #: Program → until when its KV is kept.
        self.leases: dict[str, float] = {}

    async def chat(
        self, body: Mapping[str, Any], hints: TurnHints, *, placement: Mapping[str, Any]
    ) -> AsyncGenerator[SentItem, None]:
        is_done = False
        self.routed.turn_began(body, hints, placement)
        self.turns_open += 1
        self.turns.append((self._clock.now_s(), hints.program_id))
        self.leases.pop(hints.program_id, None)
        try:
            yield TurnTaken(replica_id=self.replica_id)
            async with self._room:
                await self._work(PROMPT_S)
                async for item in self._answer(body, hints):
                    is_done = is_done or isinstance(item, TurnClosed)
                    yield item
        finally:
            self.turns_open -= 1
            self.routed.turn_ended(is_done=is_done)
        yield TurnReport(report=self.report())

    async def _answer(self, body: Mapping[str, Any], hints: TurnHints) -> AsyncGenerator[SentItem, None]:
        yield TurnOpened(status=200, is_stream=bool(body.get("stream")), replica_id=self.replica_id)
        if body.get("stream"):
            async for event in self._stream(body):
                yield event
        else:
            await self._work(TOKENS * TOKEN_S)
            yield json.dumps({"choices": [next_message(body, hints.program_id)]})
        self.leases[hints.program_id] = self._clock.now_s() + LEASE_TTL_S
        yield TurnClosed(
            prompt_tokens=100, cached_tokens=0, output_tokens=TOKENS, tool_keys=(), finish_reason="stop",
            lease={"ttl_s": LEASE_TTL_S, "blocks": 4, "outcomes": {}},
        )  # fmt: skip

    async def _stream(self, body: Mapping[str, Any]) -> AsyncGenerator[str, None]:
        chat_id = f"chat-{self._random.random()}"
        yield chunk(role="assistant", chat_id=chat_id)
        first = said_tokens(body["messages"][-1]["content"]) if body.get("continue_final_message") else 0
        for number in range(first, TOKENS):
            await self._work(TOKEN_S)
            wobble = "" if body.get("temperature") == 0 else f"~{self._random.randrange(1000)}"
            yield chunk(f"{number}{wobble} ", chat_id=chat_id)
        yield chunk(finish="stop", chat_id=chat_id)
        yield "data: [DONE]\n\n"

    async def _work(self, seconds: float) -> None:
        """Compute, unless something dies meanwhile."""
        dying = [asyncio.ensure_future(event.wait()) for event in (self.is_dead, self.is_core_dead)]
        try:
            await asyncio.wait(dying, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for waiting in dying:
                waiting.cancel()
        if self.is_dead.is_set():
            raise ReplicaLost("the replica died")
        if self.is_core_dead.is_set():
            raise EngineUnavailable("the engine core died")

    def release(self, program_id: str) -> None:
        self.leases.pop(program_id, None)

    def live_leases(self) -> list[str]:
        return [program for program, until_s in self.leases.items() if until_s > self._clock.now_s()]

    def report(self) -> dict[str, Any]:
        running = min(self.turns_open, BATCH)
        base = {"running": running, "waiting": self.turns_open - running, "queued_tokens": 0}
        kv = {"total_blocks": 100, "free_blocks": 100 - 4 * running - len(self.live_leases()) % 50}
        return self.routed.report({**base, **kv}, reload_s_per_1k=1.0)


def said_tokens(text: str) -> int:
    return len(text.split())


def tool_turns(program_id: str) -> int:
    """How many turns of the program call tools."""
    return 1 + sum(map(ord, program_id)) % 3


def next_message(body: Mapping[str, Any], program_id: str) -> dict[str, Any]:
    """The turn that the conversation is at: tool calls a number of times, two side by side at first, then the answer."""
    turn = sum(message["role"] == "assistant" for message in body["messages"])
    if turn >= tool_turns(program_id):
        return {"message": {"role": "assistant", "content": "done"}, "finish_reason": "stop"}
    calls = [("shell", {"command": f"make {turn}"}), ("read_file", {"path": "log"})][: 2 if turn == 0 else 1]
    entries = [
        {
            "id": f"call-{turn}-{number}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments)},
        }
        for number, (name, arguments) in enumerate(calls)
    ]
    message = {"role": "assistant", "content": None, "tool_calls": entries}
    return {"message": message, "finish_reason": "tool_calls"}


class ToolActorDouble:
    """Runs calls; each has one effect, shared with nobody."""

    def __init__(self, name: str, effects: Counter[tuple[str, str]]) -> None:
        self.replica_id = ReplicaId(name)
        self.effects = effects
        self.is_dead = asyncio.Event()
        self._running: dict[asyncio.Task[ToolResult], str] = {}

    async def call(self, call: ToolCall, on_started: Callable[[ToolStarted], Awaitable[None]]) -> ToolResult:
        key = tool_key(call.tool, call.arguments)
        performing = asyncio.ensure_future(self._perform(call))
        self._running[performing] = call.program_id
        performing.add_done_callback(lambda task: self._running.pop(task, None))
        dying = asyncio.ensure_future(self.is_dead.wait())
        try:
            await on_started(ToolStarted(call_id=call.call_id, tool_key=key, queue_s=0.0))
            await asyncio.wait({performing, dying}, return_when=asyncio.FIRST_COMPLETED)
            if not performing.done() or performing.cancelled():
                raise ToolHostLost("the actor died, or the call was cancelled")
            return performing.result()
        finally:
            dying.cancel()

    async def _perform(self, call: ToolCall) -> ToolResult:
        await asyncio.sleep(CALL_S / 2)
        self.effects[call.program_id, call.call_id] += 1
        await asyncio.sleep(CALL_S / 2)
        return ToolResult(
            call_id=call.call_id, tool=call.tool, tool_key=tool_key(call.tool, call.arguments), outcome=ToolOutcome.OK,
            output="ok", duration_s=CALL_S,
        )  # fmt: skip

    def cancel(self, program_id: str) -> None:
        for task, owner in list(self._running.items()):
            if owner == program_id:
                task.cancel()

    def kill(self) -> None:
        self.is_dead.set()
        for task in list(self._running):
            task.cancel()

    def report(self) -> dict[str, Any]:
        return {"queued_calls": 0, "live_sessions": len(self._running)}
