"""One running sandbox, seen from the host: executions, deadlines, and an end that leaves nothing.

How an execution that must stop is stopped, each step only if the one before did not do:

    SIGINT to the command's group  →  grace  →  SIGKILL to everything in the sandbox, by the agent  →  SIGKILL to the sandbox

The second kill does not need the agent's help, for a program can stop or kill its own agent. Output arrives as it is printed,
so whatever the end, what was printed before it is kept. Nothing waits for an end of file.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Mapping

from agent_program.clock import Clock, SystemClock
from agent_program.errors import SandboxUnavailable
from tool_runtime.config import OutputLimits
from tool_runtime.inside import frames
from tool_runtime.listener_handover import received_listener
from tool_runtime.pending_execution import PendingExecution
from tool_runtime.sandbox import Ending, Execution, KillScope, SpawnPlan
from tool_runtime.spawning import Exit, Launcher, Spawned

_LOG = logging.getLogger(__name__)

#: The agent sends output in pieces of 64 KiB; a larger frame is not from it.
_FRAME_BYTES_MAX = 1024 * 1024
_READ_BYTES = 256 * 1024
#: After SIGKILL to everything inside, how long the agent may take to say so.
_KILL_ANSWER_S = 1.0
#: A hostile agent names at most this many tools as lost.
_LOST_MAX = 8
#: After SIGKILL to the sandbox, how long its death may take (memory must be torn down).
_DEATH_S = 10.0


class LiveSandbox:
    """A sandbox whose agent is ready. Use `start`."""

    def __init__(self, launcher: Launcher, plan: SpawnPlan, child: Spawned, clock: Clock) -> None:
        self._launcher = launcher
        self._plan = plan
        self._child = child
        self._clock = clock
        self._pending: dict[str, PendingExecution] = {}
        self._ready = asyncio.Event()
        #: Held while the agent falls asleep or wakes up.
        self._changing = asyncio.Lock()
        self._is_asleep = False
        self._lost_sessions: set[str] = set()
        #: Where programs inside look for the egress proxy; None if there is none to be found.
        self.listener: socket.socket | None = None
        #: What came together with the listener.
        self._early = b""
        #: Called at the end, to stop what serves the sandbox.
        self.on_close: Callable[[], None] | None = None
        self._sleep_answered = asyncio.Event()
        self._dead = asyncio.Event()
        self._death_reason = ""
        self._calls = 0
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        #: Ends of executions whose caller was cancelled, perhaps twice; kept so that they are not collected half-way.
        self._stopping: set[asyncio.Task[None]] = set()

    @classmethod
    async def start(
        cls, launcher: Launcher, plan: SpawnPlan, *, timeout_s: float, clock: Clock | None = None
    ) -> LiveSandbox:
        """Start a sandbox and wait until its agent answers.

        Raises:
            SandboxUnavailable: it does not come up; the message has what it said.
        """
        sandbox = cls(launcher, plan, await launcher.spawn(plan), clock or SystemClock())
        try:
            await sandbox._connect(timeout_s)
        except BaseException:
            await sandbox.close()
            raise
        return sandbox

    @property
    def pid(self) -> int | None:
        """The outermost process on this machine; None where it runs elsewhere."""
        return self._child.pid

    @property
    def child(self) -> Spawned:
        """What the launcher knows it by."""
        return self._child

    @property
    def is_alive(self) -> bool:
        """It takes executions."""
        return not self._dead.is_set()

    @property
    def death_reason(self) -> str:
        """Why it is not alive."""
        return self._death_reason

    @property
    def is_asleep(self) -> bool:
        """The agent has given up most of its memory; `wake` before executing anything."""
        return self._is_asleep

    async def sleep(self) -> bool:
        """Have the agent give up most of its memory; False if something runs in the sandbox that it must look after."""
        async with self._changing:
            if self._is_asleep or self._pending or self._dead.is_set():
                return self._is_asleep
            self._sleep_answered.clear()
            self._ready.clear()
            self._write(frames.encode({"op": "sleep"}))
            await self._answer_of(self._sleep_answered, _KILL_ANSWER_S)
            return self._is_asleep

    async def wake(self) -> None:
        """Have the agent ready for executions, if it is not.

        Raises:
            SandboxUnavailable: it does not wake up, and is dead now.
        """
        async with self._changing:
            if self._is_asleep:
                self._write(b"\n")
                await self._answer_of(self._ready, _DEATH_S)
                self._is_asleep = False
        if self._dead.is_set():
            raise SandboxUnavailable(self._death_reason)

    def take_lost_sessions(self) -> set[str]:
        """Tools whose kept process died between calls since this was last asked."""
        lost, self._lost_sessions = self._lost_sessions, set()
        return lost

    async def _answer_of(self, event: asyncio.Event, seconds: float) -> None:
        """Wait for the agent to say something; it is killed if it does not."""
        answered, dead = asyncio.create_task(event.wait()), asyncio.create_task(self._dead.wait())
        try:
            await asyncio.wait({answered, dead}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            answered.cancel()
            dead.cancel()
        if not event.is_set():
            await self._kill("its agent did not answer")

    async def execute(
        self,
        tool: str,
        fields: Mapping[str, str | bytes | int],
        *,
        timeout_s: float,
        grace_s: float,
        output: OutputLimits,
        cancelled: asyncio.Event | None = None,
    ) -> Execution:
        """Run one thing and wait for its end, which comes at the latest a few seconds after `timeout_s` and `grace_s`.

        Executions of one tool that keeps a session must not overlap; the caller sees to that. When the awaiting task is
        cancelled, what runs is killed.
        """
        started_s = self._clock.now_s()
        self._calls += 1
        call_id = str(self._calls)
        pending = self._pending[call_id] = PendingExecution(output)
        try:
            ending = await self._run(call_id, pending, tool, fields, timeout_s, cancelled)
            if ending is not Ending.FINISHED:
                await self._stop(call_id, pending, 0.0 if ending is Ending.LIMIT else grace_s)
        except asyncio.CancelledError:
            # The caller goes on when what it started is gone, so that whoever takes the session next finds it quiet.
            stopping = asyncio.create_task(self._stop(call_id, pending, 0.0))
            self._stopping.add(stopping)
            stopping.add_done_callback(self._stopping.discard)
            await asyncio.shield(stopping)
            raise
        finally:
            self._pending.pop(call_id, None)
        if ending is Ending.FINISHED and pending.failure is not None:
            # Whoever cancels may also close the sandbox; which of the two is seen first says nothing.
            ending = Ending.CANCELLED if cancelled is not None and cancelled.is_set() else Ending.INTERRUPTED
        return Execution(
            ending=ending,
            exit_code=pending.exit_code,
            stdout=pending.streams[b"stdout"].result(),
            stderr=pending.streams[b"stderr"].result(),
            duration_s=self._clock.now_s() - started_s,
            session_lost=pending.session_lost,
            reason=pending.limit or pending.failure or "",
        )

    async def exceed(self, limit: str) -> None:
        """It used more than it may of what `limit` names in words: end what runs, and the sandbox."""
        for pending in self._pending.values():
            pending.exceed(limit)
        await self._kill(limit)

    async def watch(self, *, is_busy: bool) -> None:
        """Say whether something runs, which decides how closely its memory is watched."""
        await self._launcher.watch(self._child, is_busy=is_busy)

    async def close(self) -> None:
        """Kill everything in it, and return when it is gone."""
        self._die("the sandbox was closed")
        if self.on_close is not None:
            self.on_close()
        elif self.listener is not None:
            self.listener.close()
        await self._launcher.kill(self._child)
        await asyncio.wait({self._child.exited}, timeout=_DEATH_S)
        if not self._child.exited.done():
            _LOG.error("sandbox %s does not die (process %s)", self._child.id, self._child.pid)
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, *self._stopping, return_exceptions=True)
        if self._writer is not None:
            self._writer.close()
            with contextlib.suppress(OSError):
                await self._writer.wait_closed()
        else:
            self._child.socket.close()

    async def _connect(self, timeout_s: float) -> None:
        if self._plan.hands_out_listener:
            await self._receive_listener(timeout_s)
        reader, self._writer = await asyncio.open_unix_connection(sock=self._child.socket)
        self._reading = asyncio.create_task(self._read(reader))
        self._child.exited.add_done_callback(self._on_exited)
        await self._answer_of(self._ready, timeout_s)
        if not self._ready.is_set():
            raise SandboxUnavailable(f"the sandbox does not start: {self._death_reason}")

    async def _receive_listener(self, timeout_s: float) -> None:
        """The agent's first message, which has a descriptor with it."""
        self.listener, self._early = await received_listener(self._child.socket, timeout_s)
        if self.listener is None:
            await asyncio.wait({self._child.exited}, timeout=_KILL_ANSWER_S)
            raise SandboxUnavailable(f"the sandbox does not start: {self._exit_reason()}")

    async def _run(
        self,
        call_id: str,
        pending: PendingExecution,
        tool: str,
        fields: Mapping[str, str | bytes | int],
        timeout_s: float,
        cancelled: asyncio.Event | None,
    ) -> Ending:
        self._send({**fields, "op": "call", "id": call_id, "nonce": pending.nonce, "tool": tool}, pending)
        events = {Ending.LIMIT: pending.over_limit, Ending.FINISHED: pending.done}
        if cancelled is not None:
            events[Ending.CANCELLED] = cancelled
        waits = {asyncio.create_task(event.wait()): ending for ending, event in events.items()}
        try:
            await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        for ending, event in events.items():
            if event.is_set():
                return ending
        return Ending.TIMED_OUT

    async def _stop(self, call_id: str, pending: PendingExecution, grace_s: float) -> None:
        if grace_s > 0:
            self._send({"op": "interrupt", "id": call_id}, pending)
            await _within(pending.done, grace_s)
        # Even a command that heeded the interrupt may have left something running.
        if self._plan.kill_scope is not KillScope.DESCENDANTS:
            for other in self._pending.values():
                if other is not pending:
                    other.fail(
                        "another call of this program had to be stopped, and everything in its sandbox was killed"
                    )
            self._send({"op": "kill"}, pending)
            await _within(pending.done, _KILL_ANSWER_S)
            if pending.done.is_set():
                pending.session_lost = True
                return
        await self._kill("its program had to be stopped")
        pending.fail("the sandbox was killed")

    async def _kill(self, reason: str) -> None:
        self._die(reason)
        await self._launcher.kill(self._child)
        await asyncio.wait({self._child.exited}, timeout=_DEATH_S)

    def _send(self, fields: dict[str, str | bytes | int], pending: PendingExecution) -> None:
        if self._dead.is_set():
            pending.fail(self._death_reason)
            return
        # Not waited for: an agent that was stopped by its own program never reads, and the call's deadline is what ends that.
        # What piles up is bounded by the size and the number of calls.
        self._write(frames.encode(fields))

    def _write(self, data: bytes) -> None:
        assert self._writer is not None
        self._writer.write(data)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        decoder = frames.Decoder(_FRAME_BYTES_MAX)
        reason = ""
        try:
            for record in decoder.feed(self._early):
                self._on_record(record)
            while data := await reader.read(_READ_BYTES):
                for record in decoder.feed(data):
                    self._on_record(record)
        except frames.FrameError as exc:
            reason = f"the sandbox sent nonsense: {exc}"
        except OSError:
            pass
        if not reason:
            await asyncio.wait({self._child.exited}, timeout=_DEATH_S)
            reason = self._exit_reason()
        self._die(reason)
        await self._launcher.kill(self._child)

    def _on_record(self, record: frames.Fields) -> None:
        event = record.get("ev")
        if event == b"ready":
            self._ready.set()
            return
        if event in (b"asleep", b"awake"):
            self._is_asleep = event == b"asleep"
            self._sleep_answered.set()
            return
        if event == b"lost" and len(self._lost_sessions) < _LOST_MAX:
            self._lost_sessions.add(record.get("tool", b"")[:32].decode("ascii", "replace"))
            return
        pending = self._pending.get(record.get("id", b"").decode("ascii", "replace"))
        if pending is None or pending.done.is_set():
            return
        if event == b"out":
            pending.feed(record.get("stream", b""), record.get("data", b""))
        elif event == b"failed":
            pending.fail(record.get("error", b"")[:1000].decode("utf-8", "replace"))
        elif event == b"done" and record.get("nonce") == pending.nonce.encode():
            code = record.get("exit_code", b"")
            pending.exit_code = int(code) if code.isdigit() and len(code) <= 3 else None
            pending.session_lost = record.get("session_lost") == b"1"
            pending.done.set()

    def _on_exited(self, exited: asyncio.Future[Exit]) -> None:
        limit = exited.result().reason
        if limit:
            for pending in self._pending.values():
                pending.exceed(limit)
        self._die(self._exit_reason())
        if self._writer is not None:
            # If it was the launcher that ended and an agent is left, this tells it to go and take everything with it.
            self._writer.close()

    def _exit_reason(self) -> str:
        if not self._child.exited.done():
            return "the sandbox closed its connection"
        ended = self._child.exited.result()
        said = f": {ended.stderr.strip()}" if ended.stderr.strip() else ""
        status = "" if ended.status is None else f" (status {ended.status})"
        return ended.reason or f"the sandbox ended{status}{said}"

    def _die(self, reason: str) -> None:
        if not self._dead.is_set():
            self._death_reason = reason
            self._dead.set()
        for pending in self._pending.values():
            pending.fail(self._death_reason)


async def _within(event: asyncio.Event, seconds: float) -> None:
    # Not `asyncio.wait_for`: in Python 3.11 it swallows a cancellation that comes as the awaited thing ends.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
