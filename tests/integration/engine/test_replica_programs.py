"""Programs on a real engine: KV that is found again, leases, tool events, history."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from agent_program.ids import ProgramId, ToolKey
from agent_program.tool_events import LatencySample, SampleSource, ToolEvent, ToolEventKind, ToolOutcome
from engine_replicas.replica import EngineReplica
from support.redis_server import RedisServer
from support.turns import COUNT_TOOL, SHELL_TOOL, Turn, chat, hints, take
from support.waiting import wait_for_async
from tool_runtime.redis_history import RedisHistory

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="session")]

BLOCK = 32
#: One call a turn, at random, with room to end it.
CALLING = {
    "tools": [SHELL_TOOL, COUNT_TOOL],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "max_tokens": 96,
    "temperature": 1.0,
}


def reusable(turn: Turn) -> int:
    """Tokens in full KV blocks after a turn: the last token sampled has no KV."""
    return (turn.closed.prompt_tokens + turn.closed.output_tokens - 1) // BLOCK * BLOCK


@asynccontextmanager
async def history_in(store: RedisServer) -> AsyncIterator[RedisHistory]:
    history = RedisHistory(store.url)
    try:
        yield history
    finally:
        await history.close()


async def run_program(replica: EngineReplica, program_id: str, turns: int, **options: Any) -> list[Turn]:
    """Turns of a ReAct loop whose tools answer at once."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"Look around, {program_id}."}]
    taken = []
    for number in range(turns):
        body = chat(seed=number, **options) | {"messages": messages}
        turn = await take(replica, body, hints(program_id))
        assert turn.opened.status == 200, turn.chunks
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": f"a.txt b.txt {number}"}
            for call in turn.message["tool_calls"]
        ]
        messages = [*messages, turn.message, *(results or [{"role": "user", "content": "And then?"}])]
        taken.append(turn)
    return taken


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("options", [CALLING, {"temperature": 1.0, "max_tokens": 24}], ids=["tool calls", "answers"])
async def test_a_turn_finds_every_full_block_of_the_turn_before(
    engine_replica: EngineReplica, options: dict[str, Any], stream: bool
) -> None:
    """Whatever tokens the model chose to spell its output with, and although the client sends text back."""
    turns = await run_program(engine_replica, f"reuse-{stream}-{len(options)}", 4, stream=stream, **options)
    assert [turn.closed.cached_tokens for turn in turns[1:]] == [reusable(turn) for turn in turns[:-1]]


async def test_tokens_are_followed_not_re_spelled(engine_replica: EngineReplica) -> None:
    before = dict((await engine_replica.stats())["token_continuity"])
    await run_program(engine_replica, "continuity", 3, **CALLING)
    after = (await engine_replica.stats())["token_continuity"]
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown.get("same", 0) + grown.get("continued", 0) == 2
    assert grown.get("rewritten", 0) == grown.get("no_seam", 0) == 0


async def test_a_lease_is_armed_with_the_tool_that_runs(engine_replica: EngineReplica) -> None:
    (turn,) = await run_program(engine_replica, "leased", 1, **CALLING)
    assert turn.closed.lease is not None
    assert turn.closed.lease["blocks"] == reusable(turn) // BLOCK
    assert turn.closed.lease["ttl_s"] > 0
    (lease,) = (await engine_replica.explain("leased"))["leases"]
    assert lease["tool"] == "+".join(sorted(set(turn.closed.tool_keys)))
    assert engine_replica.record_routing_stats().keys() == {
        "free_blocks", "retained_blocks", "total_blocks", "waiting", "running", "queued_tokens",
    }  # fmt: skip
    released = await engine_replica.release_program("leased")
    assert released == {"replica": engine_replica.replica_id, "lease_outcomes": {"released": 1}}
    assert (await engine_replica.explain("leased")).get("leases", []) == []


async def test_the_last_turn_retains_nothing(engine_replica: EngineReplica) -> None:
    turn = await take(engine_replica, chat("Bye."), hints("last", is_last_turn=True))
    assert turn.closed.lease is not None
    assert (turn.closed.lease["reason"], turn.closed.lease["blocks"]) == ("last_turn", 0)
    assert (await engine_replica.explain("last")).get("leases", []) == []


async def test_the_declared_tool_arms_the_lease_of_an_answer(engine_replica: EngineReplica) -> None:
    turn = await take(engine_replica, chat(), hints("declared", next_tool=ToolKey("pytest")))
    assert turn.closed.tool_keys == ("pytest",)
    assert [lease["tool"] for lease in (await engine_replica.explain("declared"))["leases"]] == ["pytest"]


async def test_tool_events_reach_the_scheduler(engine_replica: EngineReplica) -> None:
    before = (await engine_replica.stats())["scheduler_call_failures"]
    await take(engine_replica, chat(), hints("events", next_tool=ToolKey("make")))
    for kind, elapsed_s, outcome in [
        (ToolEventKind.STARTED, 0.0, None),
        (ToolEventKind.FINISHED, 0.25, ToolOutcome.OK),
    ]:
        event = ToolEvent(
            program_id=ProgramId("events"), kind=kind, tool=ToolKey("make"), elapsed_s=elapsed_s, outcome=outcome
        )
        await engine_replica.tool_event(event)
    assert (await engine_replica.stats())["scheduler_call_failures"] == before
    await take(engine_replica, chat("Go on."), hints("events"))


async def test_an_unknown_program_is_no_error(engine_replica: EngineReplica) -> None:
    assert (await engine_replica.release_program("never-seen"))["lease_outcomes"] == {}
    assert (await engine_replica.explain("never-seen"))["is_known"] is False


async def test_history_in_the_store_reaches_the_scheduler(
    engine_replica: EngineReplica, latency_store: RedisServer
) -> None:
    sample = LatencySample(
        tool=ToolKey("cargo"), duration_s=4.0, outcome=ToolOutcome.OK, source=SampleSource.TOOL_RUNTIME, at_wall_s=1.0
    )
    async with history_in(latency_store) as history:
        await history.add([sample])
        version = (await history.snapshot()).version

        async def taken() -> bool:
            return ((await engine_replica.stats())["tool_latency"]["version"] or 0) >= version

        await wait_for_async(taken, what="the scheduler has the snapshot")


async def test_the_gap_between_turns_is_a_sample_in_the_store(
    engine_replica: EngineReplica, latency_store: RedisServer
) -> None:
    await take(engine_replica, chat(), hints("gap", next_tool=ToolKey("gap-tool")))
    await take(engine_replica, chat("Go on."), hints("gap"))
    async with history_in(latency_store) as history:

        async def known() -> bool:
            return ToolKey("gap-tool") in (await history.snapshot()).tools

        await wait_for_async(known, what="the sample is in the store")


async def test_turns_go_on_while_the_store_is_away(engine_replica: EngineReplica, latency_store: RedisServer) -> None:
    latency_store.kill()
    try:
        before = (await engine_replica.stats())["latency_store_errors"]

        async def noticed() -> bool:
            return (await engine_replica.stats())["latency_store_errors"] > before

        await wait_for_async(noticed, what="the store is missed")
        assert (await take(engine_replica, chat(), hints("storeless"))).opened.status == 200
        await engine_replica.check_health()
    finally:
        latency_store.start()


async def test_metrics_tell_of_vllm_and_of_the_scheduler(engine_replica: EngineReplica) -> None:
    await take(engine_replica, chat(), hints("metrics"))
    await engine_replica.stats()
    text = await engine_replica.metrics_text()
    assert "vllm:prompt_tokens_total" in text
    assert 'continuum_engine_kv_blocks{state="total"} 159.0' in text
    assert "continuum_engine_leases_total" in text
    assert '"metrics"' not in text  # a program's id is no label
