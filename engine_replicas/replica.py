"""One engine replica: a vLLM engine, its chat serving, and what the platform adds around a turn.

The path of a turn: the body and the hints become vLLM's request (`session_id` is the program, other hints ride in
`vllm_xargs`); vLLM answers; when its output is complete the tools that run next are read from it, and the scheduler is told
to arm the program's lease for them. Beside the turns two loops run, neither of which ever stops the replica: one reads the
scheduler's counters for the router, one carries tool-latency history (`latency_feed.py`).

A plain class: Ray Serve decorates it in `deployments/app.py`; tests construct it directly. The constructor blocks until the
model is loaded, so that a replica that cannot run fails where it is made. The first call of any coroutine finishes the
start: it needs the event loop that serves.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

from agent_program.clock import Clock, SystemClock
from agent_program.errors import EngineUnavailable, InvalidRequest
from agent_program.ids import ProgramId, ReplicaId, ToolKey
from agent_program.tool_events import ToolEvent
from agent_program.turn import TurnHints
from engine_replicas.config import SchedulingSettings
from engine_replicas.engine_config import EngineSettings
from engine_replicas.engine_metrics import exposition
from engine_replicas.latency_feed import LatencyFeed
from engine_replicas.request_gaps import RequestGaps
from engine_replicas.retention.events import ArmReason
from engine_replicas.scheduler_client import SchedulerClient
from engine_replicas.tool_calls import next_tools
from engine_replicas.turn_body import engine_body
from engine_replicas.turn_stream import NOT_GENERATED, TurnClosed, TurnOpened
from engine_replicas.vllm_engine import VllmEngine
from tool_runtime.history import LatencyHistory
from tool_runtime.redis_history import RedisHistory
from tool_runtime.tool_key import combine

if TYPE_CHECKING:
    from engine_replicas.vllm_turn import VllmTurn


logger = logging.getLogger(__name__)

#: For what is closed to close, and for what is cancelled to end, before it is told again.
_CLOSE_S, _CANCELS_MAX = 5.0, 4


class EngineReplica:
    """Serves the turns of the programs that the router sends here."""

    def __init__(
        self,
        engine: EngineSettings,
        scheduling: SchedulingSettings,
        store_url: str,
        *,
        replica_id: ReplicaId | None = None,
        history: LatencyHistory | None = None,
        clock: Clock | None = None,
    ):
        """Start the engine and wait until its model is loaded.

        Args:
            engine: which model runs, and how.
            scheduling: what the scheduler does with paused programs.
            store_url: the Redis store that holds tool-latency history.
            replica_id: this incarnation's name; a random one where none is given.
            history: tool-latency history, where it is not the store's.
            clock: the time.

        Raises:
            EngineUnavailable: vLLM, its build for the device, or the embedded model's package is missing.
        """
        self.replica_id = replica_id or ReplicaId(f"engine-{secrets.token_hex(4)}")
        self._settings = engine
        self._clock = clock or SystemClock()
        self._engine = VllmEngine(engine, scheduling.model_dump(mode="json"))
        self._scheduler = SchedulerClient(self._engine, timeout_s=engine.engine_rpc_timeout_s, clock=self._clock)
        self._feed = LatencyFeed(history or RedisHistory(store_url), self._scheduler, self._clock)
        self._gaps = RequestGaps()
        self._stats: dict[str, Any] = {}
        self._turns_open = 0
        self._loops: list[asyncio.Task[None]] = []
        self._closing: set[asyncio.Task[TurnClosed]] = set()
        self._start_lock = asyncio.Lock()
        self._is_stopped = False

    # --- turns -----------------------------------------------------------------------------------------------------------

    async def chat(
        self, body: dict[str, Any], hints: TurnHints | None
    ) -> AsyncGenerator[TurnOpened | str | TurnClosed, None]:
        """Answer one chat completion; see `turn_stream.py` for what is yielded.

        Closing the generator, or cancelling the task that reads it, aborts the turn in the engine.

        Raises:
            EngineUnavailable: the engine core is dead, or died under the turn; it may run on another replica.
        """
        await self._start()
        if hints is not None:
            self._turn_arrived(hints)
        try:
            turn = self._engine.turn(engine_body(body, hints), hints)
        except InvalidRequest as exc:
            yield TurnOpened(status=exc.status, is_stream=False, replica_id=self.replica_id)
            yield json.dumps(exc.body())
            yield NOT_GENERATED
            return
        closing: asyncio.Task[TurnClosed] | None = None
        self._turns_open += 1
        try:
            await turn.open()
            yield TurnOpened(status=turn.status, is_stream=turn.is_stream, replica_id=self.replica_id)
            async for chunk in turn.chunks():
                yield chunk
            closing = self._close(turn, hints)
            yield await asyncio.shield(closing)
        finally:
            self._turns_open -= 1
            await turn.aclose()
            if closing is None and turn.is_complete:
                # The reader left between the last token and the end: the program may well go on.
                self._close(turn, hints)

    def _turn_arrived(self, hints: TurnHints) -> None:
        sample = self._gaps.turn_arrived(hints, self._clock.now_s(), self._clock.wall_s())
        if sample is not None:
            self._feed.add(sample)

    def _close(self, turn: VllmTurn, hints: TurnHints | None) -> asyncio.Task[TurnClosed]:
        # A task of its own: the reader's end must not take the lease's arming with it.
        task = asyncio.create_task(self._closed(turn, hints))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        return task

    async def _closed(self, turn: VllmTurn, hints: TurnHints | None) -> TurnClosed:
        """What the turn cost and what comes next; arms the program's lease on the way."""
        record = turn.record
        tools: tuple[ToolKey, ...] = ()
        lease = None
        if hints is not None and turn.is_complete:
            tools = next_tools(turn.message(), hints)
            lease = await self._arm(hints, combine(tools) if tools else None)
        return TurnClosed(
            prompt_tokens=len(record.prompt_token_ids),
            cached_tokens=record.cached_tokens,
            output_tokens=record.output_tokens,
            tool_keys=tools,
            finish_reason=turn.finish_reason,
            lease=lease,
            timings=record.timings,
            context_tokens_max=self._engine.context_tokens_max,
        )

    async def _arm(self, hints: TurnHints, tool: ToolKey | None) -> dict[str, Any] | None:
        if hints.is_last_turn:
            self._gaps.forget(hints.program_id)
        else:
            self._gaps.turn_closed(hints.program_id, hints.branch, tool, self._clock.now_s())
        if not self._settings.has_leases:
            return None
        lease: dict[str, Any] | None = await self._scheduler.call(
            "continuum_lease_arm", hints.program_id, hints.branch, tool, hints.is_last_turn
        )
        if lease is not None and hints.is_last_turn:
            # The scheduler forgot the program as its turn ended: it was told beforehand. Why nothing is retained is known.
            return {**lease, "reason": ArmReason.LAST_TURN.value}
        return lease

    # --- programs --------------------------------------------------------------------------------------------------------

    async def tool_event(self, event: ToolEvent) -> None:
        """A tool of a program that waits here started or finished."""
        await self._start()
        self._gaps.forget(event.program_id)
        if self._settings.has_leases:
            outcome = event.outcome.value if event.outcome is not None else None
            await self._scheduler.call(
                "continuum_tool_event", event.program_id, event.kind.value, event.tool, event.elapsed_s, outcome
            )

    async def release_program(self, program_id: str) -> dict[str, Any]:
        """The program is over: its KV is free to go. An unknown program changes nothing.

        Returns:
            `replica`, this one, and `lease_outcomes`: how the program's leases have ended here, over its whole life.
        """
        await self._start()
        self._gaps.forget(ProgramId(program_id))
        self._engine.forget_program(program_id)
        explained: dict[str, Any] | None = None
        if self._settings.has_leases:
            await self._scheduler.call("continuum_release", program_id)
            explained = await self._scheduler.call("continuum_explain", program_id)
        return {"replica": self.replica_id, "lease_outcomes": (explained or {}).get("lease_outcomes", {})}

    async def explain(self, program_id: str) -> dict[str, Any]:
        """Why the program's KV was kept or dropped here.

        Raises:
            EngineUnavailable: the scheduler does not answer.
        """
        await self._start()
        if not self._settings.has_leases:
            return {"program_id": program_id, "is_known": False}
        return self._answered(await self._scheduler.call("continuum_explain", program_id))

    # --- the replica itself ----------------------------------------------------------------------------------------------

    async def models(self) -> dict[str, Any]:
        """OpenAI's list of the models served here."""
        await self._start()
        return await self._engine.models()

    async def stats(self) -> dict[str, Any]:
        """The scheduler's counters now, and the replica's own.

        Raises:
            EngineUnavailable: the scheduler does not answer.
        """
        await self._start()
        self._stats = self._answered(await self._read_stats())
        return {**self._stats, **self._own_stats()}

    def record_routing_stats(self) -> dict[str, Any]:
        """What the router weighs, at most `stats_period_s` old: KV blocks and queue. Never waits for the engine."""
        blocks = self._engine.kv_blocks
        return {
            "free_blocks": self._stats.get("free_blocks", blocks),
            "retained_blocks": self._stats.get("retained_blocks", 0),
            "total_blocks": self._stats.get("total_blocks", blocks),
            "waiting": self._stats.get("waiting", 0),
            "running": self._stats.get("running", self._engine.turns_unfinished),
            "queued_tokens": self._stats.get("queued_tokens", 0),
        }

    async def check_health(self) -> None:
        """Raise when this replica cannot serve.

        Raises:
            EngineUnavailable: the engine core is dead, or has been silent for longer than any step takes.
        """
        await self._engine.check_health()
        await self._start()
        silence_s = self._scheduler.silence_s
        if silence_s > self._settings.engine_silence_max_s:
            raise EngineUnavailable(f"the engine core has been silent for {silence_s:.0f} s")

    async def metrics_text(self) -> str:
        """Prometheus text: vLLM's own metrics of this process, and ours."""
        return exposition(self._stats, self._own_stats())

    @property
    def engine_process_ids(self) -> list[int]:
        """The engine core's processes, for operators and for tests that kill them."""
        return self._engine.process_ids

    def shutdown(self) -> None:
        """Stop the loops and the engine's processes. The second call changes nothing."""
        if self._is_stopped:
            return
        self._is_stopped = True
        for task in (*self._loops, *self._closing):
            _cancel(task)
        self._engine.shutdown()

    async def aclose(self) -> None:
        """`shutdown` from the event loop, and let go of the store."""
        await _end({*self._loops, *self._closing})
        try:
            async with asyncio.timeout(_CLOSE_S):
                await self._feed.close()
        except TimeoutError:
            logger.warning("the store's connections did not close within %g s", _CLOSE_S)
        await asyncio.to_thread(self.shutdown)

    def __del__(self) -> None:
        # Ray Serve calls this when it stops a replica. A constructor that failed left nothing to stop.
        if hasattr(self, "_is_stopped"):
            self.shutdown()

    async def _start(self) -> None:
        """Finish the start in the event loop that serves; afterwards, nothing to do."""
        if self._loops:
            return
        async with self._start_lock:
            if not self._loops:
                await self._engine.start_serving()
                self._loops.append(asyncio.create_task(self._watch()))
                if self._settings.has_leases:
                    self._loops.append(asyncio.create_task(self._feed.run(self._settings.latency_snapshot_period_s)))

    async def _watch(self) -> None:
        """Read the scheduler's counters for ever; the answers are also its sign of life."""
        while True:
            self._stats = await self._read_stats() or self._stats
            await asyncio.sleep(self._settings.stats_period_s)

    async def _read_stats(self) -> dict[str, Any] | None:
        if self._settings.has_leases:
            stats: dict[str, Any] | None = await self._scheduler.call("continuum_stats")
            return stats
        return None if await self._scheduler.call("is_scheduler_paused") is None else {}

    def _own_stats(self) -> dict[str, Any]:
        return {
            "turns_open": self._turns_open,
            "context_tokens_max": self._engine.context_tokens_max,
            "token_continuity": self._engine.token_continuity(),
            "latency_snapshot_version": self._feed.version,
            "latency_store_errors": self._feed.store_errors,
            "latency_snapshot_age_s": self._snapshot_age_s(),
            "scheduler_call_failures": dict(self._scheduler.failures),
        }

    def _snapshot_age_s(self) -> float | None:
        """Seconds since the store last confirmed the snapshot that the scheduler has; None before the first."""
        confirmed_s = self._feed.confirmed_s
        return None if confirmed_s is None else self._clock.now_s() - confirmed_s

    @staticmethod
    def _answered(answer: dict[str, Any] | None) -> dict[str, Any]:
        if answer is None:
            raise EngineUnavailable("the scheduler does not answer")
        return answer


async def _end(tasks: set[asyncio.Task[Any]]) -> None:
    """Cancel tasks of this loop and wait for them. What swallows a cancellation, as code with timeouts of its own may where
    both come together, is cancelled again."""
    for _ in range(_CANCELS_MAX):
        tasks = {task for task in tasks if not task.done()}
        if not tasks:
            return
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=_CLOSE_S)
    logger.error("%d tasks do not end", len([task for task in tasks if not task.done()]))


def _cancel(task: asyncio.Task[Any]) -> None:
    """Cancel from any thread; a task whose loop is gone needs no cancelling."""
    loop = task.get_loop()
    if not task.done() and not loop.is_closed():
        loop.call_soon_threadsafe(task.cancel)
