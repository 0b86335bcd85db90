"""A tool actor of one's own, in a directory of its own, and the shortest way to call it."""

from __future__ import annotations

import asyncio
import itertools
import os
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from agent_program.ids import ProgramId
from support.cluster import fake_cluster
from tool_runtime.actor import ToolActor
from tool_runtime.config import SandboxBackend, ToolRuntimeSettings
from tool_runtime.history import LatencyHistory
from tool_runtime.tool_call import ToolCall, ToolResult, ToolStarted
from tool_runtime.trees import delete_tree

_NUMBERS = itertools.count(1)


@contextmanager
def state_directory() -> Iterator[Path]:
    """A directory that sandboxes of another user can reach, which pytest's own temporary directories are not."""
    path = Path(tempfile.mkdtemp(prefix="ct-tools-"))
    path.chmod(0o711)
    try:
        yield path
    finally:
        delete_tree(path)


@asynccontextmanager
async def tool_actor(
    *, history: LatencyHistory | None = None, store_url: str | None = None, **settings: Any
) -> AsyncIterator[ToolActor]:
    """An actor that has passed its probes; closed, and its directory removed, at the end."""
    settings.setdefault("warm_sandboxes", 0)
    with state_directory() as path:
        actor = ToolActor(ToolRuntimeSettings(state_dir=path, **settings), store_url, history=history)
        try:
            await actor.start()
            yield actor
        finally:
            await actor.close()


@asynccontextmanager
async def actor_with(backend: SandboxBackend, **settings: Any) -> AsyncIterator[ToolActor]:
    """An actor with a backend by name, and with a cluster of its own where the backend needs one."""
    async with AsyncExitStack() as stack:
        if backend is SandboxBackend.KUBERNETES:
            settings["kubernetes"] = (await stack.enter_async_context(fake_cluster())).settings()
        yield await stack.enter_async_context(tool_actor(sandbox=backend, **settings))


class Program:
    """One program's view of an actor."""

    def __init__(self, actor: ToolActor, name: str | None = None) -> None:
        self.actor = actor
        self.id = ProgramId(name or f"program-{next(_NUMBERS)}")

    async def events(
        self, tool: str, arguments: Mapping[str, Any] | str, **call: Any
    ) -> list[ToolStarted | ToolResult]:
        """Everything that one call yields."""
        call.setdefault("call_id", f"call-{next(_NUMBERS)}")
        wanted = ToolCall(program_id=self.id, tool=tool, arguments=arguments, **call)
        return [event async for event in self.actor.call(wanted)]

    async def run(self, tool: str, arguments: Mapping[str, Any] | str, **call: Any) -> ToolResult:
        """The result of one call."""
        result = (await self.events(tool, arguments, **call))[-1]
        assert isinstance(result, ToolResult)
        return result

    async def shell(self, command: str, **call: Any) -> ToolResult:
        """The result of one shell command."""
        return await self.run("shell", {"command": command}, **call)

    async def python(self, code: str, **call: Any) -> ToolResult:
        """The result of one piece of Python."""
        return await self.run("python", {"code": code}, **call)

    async def shell_running(self, command: str, **call: Any) -> asyncio.Task[ToolResult]:
        """Start a shell command and return once it runs."""
        call.setdefault("call_id", f"call-{next(_NUMBERS)}")
        wanted = ToolCall(program_id=self.id, tool="shell", arguments={"command": command}, **call)
        begun = asyncio.Event()

        async def follow() -> ToolResult:
            async for event in self.actor.call(wanted):
                if isinstance(event, ToolResult):
                    return event
                begun.set()
            raise AssertionError("a call ended without a result")

        task = asyncio.create_task(follow())
        await begun.wait()
        return task


def processes_with(word: str) -> list[int]:
    """Living processes of this machine whose command line holds `word`, this one left out."""
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            command = Path("/proc", entry, "cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if word.encode() in command:
            found.append(int(entry))
    return found


def descendants_of(root: int) -> set[int]:
    """Living processes below `root`."""
    parents: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                state, parent = Path("/proc", entry, "stat").read_text().rsplit(")", 1)[1].split()[:2]
            except (FileNotFoundError, ProcessLookupError):
                continue
            if state != "Z":
                parents[int(entry)] = int(parent)
    found = {root}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {root}
