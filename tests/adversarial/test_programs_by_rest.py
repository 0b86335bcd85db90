"""Programs that do what one fears, submitted by REST and run to their end with real tools: each is told what came of it, the next
call works, others are not touched, and nothing is left. The model's part is a script; everything else is the real thing."""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest
import pytest_asyncio

from agent_program.ids import ProgramId, TenantId
from deployments.memory_clients import ScriptedEngine, answer, tool_calls
from support.api import ApiBench
from support.tools import Program, descendants_of, processes_with, tool_actor
from support.waiting import wait_for, wait_for_async
from tool_runtime.actor import ToolActor
from tool_runtime.config import MIB, OutputLimits, SandboxLimits
from tool_runtime.held_program import HeldProgram
from tool_runtime.tool_call import ToolCall, ToolProgress, ToolResult, ToolStarted

pytestmark = [pytest.mark.adversarial, pytest.mark.asyncio(loop_scope="module")]

LIMITS = SandboxLimits(processes_max=64, memory_bytes_max=256 * MIB, workspace_bytes_max=64 * MIB)


class ActorTools:
    """`ToolClient` over an actor of the test's own."""

    def __init__(self, actor: ToolActor) -> None:
        self._actor = actor

    async def call(
        self, call: ToolCall, on_started: Callable[[ToolStarted | ToolProgress], Awaitable[None]]
    ) -> ToolResult:
        async for event in self._actor.call(call):
            if isinstance(event, ToolResult):
                return event
            await on_started(event)
        raise AssertionError("a call ended without a result")

    async def cancel(self, program_id: str, call_id: str | None = None) -> None:
        await self._actor.cancel(ProgramId(program_id), call_id)

    async def release(self, program_id: str, *, tenant_id: TenantId, delete_workspace: bool) -> None:
        await self._actor.release(ProgramId(program_id), tenant_id=tenant_id, delete_workspace=delete_workspace)

    async def held(self, quiet_s: float) -> Sequence[HeldProgram]:
        return await self._actor.held(quiet_s)

    async def release_everywhere(self, held: HeldProgram, *, delete_workspace: bool) -> None:
        await self.release(held.program_id, tenant_id=held.tenant_id, delete_workspace=delete_workspace)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def actor() -> AsyncIterator[ToolActor]:
    async with tool_actor(
        limits=LIMITS, output=OutputLimits(hard_bytes_max=4 * MIB), interrupt_grace_s=0.2, call_timeout_s=20.0
    ) as one:
        yield one


async def outputs_of(actor: ToolActor, *commands: str, tool_timeout_s: float = 20.0) -> list[str]:
    """Submit a program whose model runs one command a turn and then answers; returns what each call told it."""
    bench = ApiBench()
    turns = [tool_calls((f"call_{n}", "shell", {"command": command})) for n, command in enumerate(commands)]
    body = {
        "input": "Do it.",
        "tools": ["shell"],
        "limits": {"max_turns": len(commands) + 1, "max_tokens_per_turn": 64, "tool_timeout_s": tool_timeout_s},
    }
    async with bench.client() as client:
        submitted = await client.post("/v1/programs", json=body)
        assert submitted.status_code == 202, submitted.text
        await bench.run_one(ScriptedEngine([*turns, answer("done")]), ActorTools(actor))  # type: ignore[arg-type]
        shown = (await client.get(f"/v1/programs/{submitted.json()['id']}", params={"include": "journal"})).json()
    assert (shown["state"], shown["output"]) == ("completed", "done")
    return [step["data"]["output"] for step in shown["journal"] if step["kind"] == "tool.finished"]


async def nothing_is_left(actor: ToolActor) -> bool:
    state = actor._settings.state_dir
    assert state is not None
    return (await actor.status())["live_sandboxes"] == 0 and not list((state / "workspaces").iterdir())


ATTACKS = {
    "a fork bomb": ("f() { f | f & }; f; wait; sleep 100", 2.0, "Stopped after 2 s|processes|Resource temporarily"),
    "yes": ("yes", 20.0, "it printed too much"),
    "one line of a gigabyte": ("head -c 1G /dev/zero | tr '\\0' x", 20.0, "it printed too much"),
    "a sleeper that holds the output": ("sleep infinity & echo started", 20.0, "started"),
    "a sleeper that is waited for": ("echo partial; sleep infinity", 1.0, "partial"),
    "a daemon": ("(setsid sleep 100 &) ; echo gone", 20.0, "gone"),
    "a full disk": ("for i in $(seq 20); do head -c 20M /dev/zero > f$i; done; sleep 100", 60.0, "more than 64 MiB"),
    "a suicide": ("kill -9 -1", 20.0, "gone|ended|killed|Killed"),
    "an open quote": ("echo 'it", 20.0, "unexpected EOF"),
}


@pytest.mark.parametrize(("command", "timeout_s", "told"), ATTACKS.values(), ids=ATTACKS)
async def test_the_model_is_told_and_the_next_call_works_and_nothing_is_left(
    actor: ToolActor, command: str, timeout_s: float, told: str
) -> None:
    others = Program(actor)
    await others.shell("KEPT=1")
    attacked, next_call = await outputs_of(actor, command, "rm -f f*; echo alive", tool_timeout_s=timeout_s)
    assert any(words in attacked for words in told.split("|")), attacked
    assert len(attacked) < 400_000
    assert "alive" in next_call
    assert (await others.shell("echo $KEPT")).output == "1"
    await actor.release(others.id, delete_workspace=True)
    await wait_for_async(lambda: nothing_is_left(actor), what="sandboxes and files are gone")


async def test_a_file_server_serves_its_own_program_and_nobody_else(actor: ToolActor) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as probe:
        port = probe.getsockname()[1]
    mark = f"http.server {port}"
    started, fetched, stolen = await outputs_of(
        actor,
        f"echo served > page; python3 -m {mark} --bind 0.0.0.0 >/dev/null 2>&1 & "
        f"for i in $(seq 100); do (: < /dev/tcp/127.0.0.1/{port}) 2>/dev/null && break; sleep 0.1; done; echo up",
        f"exec 3<>/dev/tcp/127.0.0.1/{port}; printf 'GET /page HTTP/1.0\\r\\n\\r\\n' >&3; tail -1 <&3",
        "ls /proc/1/root/etc/shadow /root 2>&1 | head -3; cat /proc/1/root/etc/shadow",
    )
    assert (started, fetched) == ("up", "served")
    assert "root:" not in stolen
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port), timeout=5)
    wait_for(lambda: not processes_with(mark.replace(" ", "\0")), what="the server ended with its program")


@pytest.fixture
def secret() -> Iterator[Path]:
    """A file that everybody may read, alone in its directory."""
    with tempfile.TemporaryDirectory(prefix="ct-secret-") as place:
        Path(place).chmod(0o755)
        path = Path(place, "secret")
        path.write_text("the-canary-sings")
        yield path
        assert path.read_text() == "the-canary-sings"


async def test_a_race_of_links_wins_nothing_and_ends_with_the_program(actor: ToolActor, secret: Path) -> None:
    raced, read = await outputs_of(
        actor,
        f"mkdir d; echo own > d/secret; ln -s {secret.parent} l; "
        "(while :; do mv -T d t; mv -T l d; mv -T d l; mv -T t d; done) >/dev/null 2>&1 & echo racing",
        "for i in $(seq 200); do cat d/secret l/secret 2>/dev/null; done | sort -u; kill %1",
    )
    assert raced == "racing"
    assert "canary" not in read


async def test_thirty_programs_at_once_leave_nothing(actor: ToolActor) -> None:
    """Each with its own sandbox, more than may run at once."""
    before = descendants_of(os.getpid())
    told = await asyncio.gather(*(outputs_of(actor, f"echo {n}; sleep 1000 &", f"echo {n}") for n in range(30)))
    assert [outputs[0].split()[0] for outputs in told] == [str(n) for n in range(30)]
    await wait_for_async(lambda: nothing_is_left(actor), what="sandboxes and files are gone")

    async def no_process_is_left() -> bool:
        return not descendants_of(os.getpid()) - before

    await wait_for_async(no_process_is_left, what="processes are gone")
