"""Registered functions, called as programs call them: in the sandbox of every backend, and in the actor."""

from __future__ import annotations

import asyncio

import pytest

from agent_program.tool_events import ToolOutcome
from support import sample_tools
from support.tools import Program, actor_with, tool_actor
from support.waiting import wait_for_async
from tool_runtime.actor import ToolActor
from tool_runtime.config import SandboxBackend
from tool_runtime.functions import BadTool
from tool_runtime.tool_call import ToolProgress

MODULE = ("support.sample_tools",)


BACKENDS = [SandboxBackend.BUBBLEWRAP, SandboxBackend.LANDLOCK, SandboxBackend.KUBERNETES]


@pytest.fixture(params=BACKENDS, ids=lambda backend: backend.value)
def backend(request: pytest.FixtureRequest) -> SandboxBackend:
    return request.param


async def test_a_function_runs_in_its_programs_sandbox(backend: SandboxBackend) -> None:
    async with actor_with(backend, function_modules=MODULE) as actor:
        program = Program(actor)
        result = await program.run("double", {"numbers": [1, 2.5], "label": "ä"})
        assert result.outcome is ToolOutcome.OK
        assert result.output == '{"label": "ä", "doubled": [2, 5.0]}\n[stderr]\nworking'
        await program.shell("touch here; exec 3</dev/null; python3() { echo mine; }")
        assert (await program.run("surroundings", {"detail": "files"})).output.split()[-1] == "here"
        assert (await program.run("surroundings", {"detail": "user"})).output == "False"
        wrong = await program.run("surroundings", {"detail": "all"})
        assert (wrong.outcome, wrong.duration_s) == (ToolOutcome.ERROR, 0.0)
        assert "'all' is not one of" in wrong.output


async def test_what_a_function_in_the_sandbox_does_wrong_is_its_result_and_hurts_nobody(
    backend: SandboxBackend,
) -> None:
    async with actor_with(backend, function_modules=MODULE) as actor:
        program = Program(actor)
        await program.shell("A=kept")

        async def misbehave(how: str, **call: float) -> str:
            result = await program.run("misbehave", {"how": how}, **call)
            return f"{result.outcome}: {result.output}"

        raised = await misbehave("raise")
        assert raised.startswith("error: [stderr]\nTraceback")
        assert 'raise ValueError("no good")' in raised  # its own line, from its own source
        assert "function_call.py" not in raised
        assert await misbehave("exit") == "error: [exit code 7]"
        assert "object is not JSON serializable" in await misbehave("object")
        assert await misbehave("thread") == "ok: left a thread"
        assert await misbehave("forge") == 'ok: true\n[stderr]\n{"result": "forged"}'
        assert "left out …]" in await misbehave("large")
        assert (await program.shell("echo $A")).output == "kept"
        spun = await misbehave("spin", timeout_s=0.5)
        assert spun.startswith("timeout: ")
        assert "Stopped after 0.5 s" in spun


async def test_a_trusted_function_runs_in_the_actor_with_its_own_types() -> None:
    async with tool_actor(function_modules=MODULE) as actor:
        program = Program(actor)
        events = await program.events("weekday", {"day": "2026-11-30"})
        assert events[-1].output == f"Monday for {program.id}"  # type: ignore[union-attr]
        assert all(event.fraction == 0.5 for event in events if isinstance(event, ToolProgress))
        impossible = await program.run("weekday", {"day": "2026-02-31"})
        assert impossible.outcome is ToolOutcome.ERROR
        assert "arguments of weekday are wrong" in impossible.output
        assert (await program.run("refuse", {"how": "raise"})).output == "RuntimeError: not today"
        assert "which is not JSON" in (await program.run("refuse", {"how": "object"})).output
        late = await program.run("wait", {"seconds": 1000}, timeout_s=0.2)
        assert late.outcome is ToolOutcome.TIMEOUT
        running = asyncio.create_task(program.run("wait", {"seconds": 1000}, call_id="w"))
        await wait_for_async(lambda: is_running(actor), what="the function runs")
        assert await actor.cancel(program.id, "w") == 1
        assert (await running).outcome is ToolOutcome.CANCELLED


async def is_running(actor: ToolActor) -> bool:
    return (await actor.status())["calls_running"] == 1


async def threads_of(actor: ToolActor) -> int:
    return (await actor.status())["function_threads"]


async def test_threads_that_never_end_are_left_behind_and_counted() -> None:
    sample_tools.released.clear()
    async with tool_actor(function_modules=MODULE, function_threads_max=2) as actor:
        program = Program(actor)
        try:
            for _ in range(2):
                assert (await program.run("block", {}, timeout_s=0.1)).outcome is ToolOutcome.TIMEOUT
            assert await threads_of(actor) == 2
            refused = await program.run("block", {}, timeout_s=10)
            assert refused.outcome is ToolOutcome.ERROR
            assert "all 2 threads" in refused.output
        finally:
            sample_tools.released.set()

        async def all_ended() -> bool:
            return await threads_of(actor) == 0

        await wait_for_async(all_ended, what="the threads end")
        assert (await program.run("block", {})).output == "released"


async def test_registered_functions_are_listed_beside_the_built_in_tools() -> None:
    async with tool_actor(function_modules=MODULE) as actor:
        names = [spec.name for spec in await actor.tools()]
        assert {"shell", "double", "wait"} <= set(names)
        assert len(names) == len(set(names))


async def test_an_actor_with_a_bad_registration_does_not_start() -> None:
    with pytest.raises(BadTool, match="no_such_module"):
        async with tool_actor(function_modules=("no_such_module",)):
            pass
