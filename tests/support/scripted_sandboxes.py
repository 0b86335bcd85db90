"""Sandboxes that are tasks of the test's own: a launcher whose agents answer at once, late, or never, as a seed has it.

They speak the real protocol over real sockets, so that everything of the host's is the real thing (`LiveSandbox`,
`ProgramSandboxes`, `ToolActor`); what is missing is the process, and with it most of the time that a sandbox takes.
"""

from __future__ import annotations

import asyncio
import random
import socket
from contextlib import suppress
from pathlib import Path

from agent_program.clock import Clock, SystemClock
from agent_program.errors import SandboxUnavailable
from tool_runtime.actor import ToolActor
from tool_runtime.config import MIB, ToolRuntimeSettings
from tool_runtime.inside import frames
from tool_runtime.launcher_client import LauncherClient
from tool_runtime.program_sandboxes import ProgramSandboxes
from tool_runtime.sandbox import SandboxSpec, SpawnPlan
from tool_runtime.spawning import Exit, Spawned
from tool_runtime.workspaces import Workspaces


class ScriptedBackend:
    """Plans that only `ScriptedLauncher` can start."""

    name = "scripted"
    isolates = True
    has_own_view = True

    def plan(self, spec: SandboxSpec) -> SpawnPlan:
        return SpawnPlan(
            executable="", argv=(), cwd=str(spec.workspace), memory_bytes_max=64 * MIB, cgroup_processes_max=8
        )


class ScriptedLauncher(LauncherClient):
    """Runs an agent as a task. `alive` is what a leak would show in."""

    def __init__(self, seed: int = 0, *, start_failures: float = 0.0) -> None:
        """A start fails with the probability `start_failures`."""
        super().__init__()
        self._random = random.Random(seed)
        self._start_failures = start_failures
        self._serial = 0
        self._agents: dict[str, tuple[Spawned, asyncio.Task[None]]] = {}

    @property
    def alive(self) -> int:
        """Sandboxes that were started and have not ended."""
        return len(self._agents)

    async def spawn(self, plan: SpawnPlan) -> Spawned:
        await self._pause()
        if self._random.random() < self._start_failures:
            raise SandboxUnavailable("the seed says no")
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setblocking(False)
        self._serial += 1
        child = Spawned(
            id=str(self._serial), pid=self._serial, socket=ours, exited=asyncio.get_running_loop().create_future()
        )
        # Registered before anything else can happen, as a real launcher has its child before it tells of it.
        self._agents[child.id] = (child, asyncio.create_task(self._agent(theirs)))
        try:
            await self._pause()
        except asyncio.CancelledError:
            await self.kill(child)
            ours.close()
            raise
        return child

    async def watch(self, child: Spawned, *, is_busy: bool) -> None:
        await self._pause()

    async def kill(self, child: Spawned) -> None:
        found = self._agents.get(child.id)
        if found is None:
            return
        found[1].cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.wait({found[1]})
        if self._agents.pop(child.id, None) is not None:
            child.exited.set_result(Exit(status=-9, stderr=""))

    async def close(self) -> None:
        for child, _ in list(self._agents.values()):
            await self.kill(child)

    async def _pause(self) -> None:
        """Some turns of the event loop, in which whatever else is ready happens first."""
        for _ in range(self._random.randrange(4)):
            await asyncio.sleep(0)

    async def _agent(self, host: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        decoder, hung = frames.Decoder(), list[frames.Fields]()
        with host:
            await self._pause()
            await loop.sock_sendall(host, frames.encode({"ev": "ready"}))
            while data := await loop.sock_recv(host, 65536):
                if data == b"\n":
                    await loop.sock_sendall(host, frames.encode({"ev": "ready"}))
                    continue
                for request in decoder.feed(data):
                    await self._pause()
                    await loop.sock_sendall(host, self._answer(request, hung))

    def _answer(self, request: frames.Fields, hung: list[frames.Fields]) -> bytes:
        match request["op"]:
            case b"sleep":
                return frames.encode({"ev": "asleep"})
            case b"call" if request.get("command") == b"hang":
                hung.append(request)
            case b"call":
                return _done(request, 0)
            case b"kill":
                killed = [_done(call, 137) for call in hung]
                hung.clear()
                return b"".join(killed)
        return b""


def _done(call: frames.Fields, exit_code: int) -> bytes:
    return frames.encode({"ev": "done", "id": call["id"], "nonce": call["nonce"], "exit_code": exit_code})


def scripted_actor(
    state: Path, launcher: ScriptedLauncher, *, clock: Clock | None = None, **settings: object
) -> ToolActor:
    """A tool actor over scripted sandboxes. Its housekeeping is not started: a test does that itself, when it wants it."""
    chosen = ToolRuntimeSettings(state_dir=state, interrupt_grace_s=0.0, **settings)  # type: ignore[arg-type]
    clock = clock or SystemClock()
    workspaces = Workspaces(state, uid_first=200_000, uid_count=1000)
    actor = ToolActor(chosen, None, clock=clock)
    actor._launcher = launcher
    actor._sandboxes = ProgramSandboxes(chosen, launcher, ScriptedBackend(), workspaces, clock)
    return actor
