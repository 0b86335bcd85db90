"""Chat completions on a real engine: with and without streaming, with tools, with schemas, with errors."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from typing import Any

import jsonschema
import pytest

from engine_replicas.replica import EngineReplica
from engine_replicas.turn_stream import TurnOpened
from support.turns import COUNT_TOOL, MODEL, SHELL_TOOL, chat, hints, take
from support.waiting import wait_for_async

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="session")]

TOOLS = [SHELL_TOOL, COUNT_TOOL]
SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}


async def nothing_runs(replica: EngineReplica) -> bool:
    stats = await replica.stats()
    return stats["running"] == stats["waiting"] == stats["turns_open"] == 0


async def test_an_answer_is_one_document_with_its_usage(engine_replica: EngineReplica) -> None:
    turn = await take(engine_replica, chat())
    assert (turn.opened.status, turn.opened.is_stream) == (200, False)
    assert turn.opened.replica_id == engine_replica.replica_id
    usage = turn.document["usage"]
    assert turn.document["model"] == MODEL
    assert turn.document["choices"][0]["message"]["content"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (
        turn.closed.prompt_tokens,
        turn.closed.output_tokens,
    )
    assert usage["prompt_tokens_details"]["cached_tokens"] == turn.closed.cached_tokens
    assert turn.closed.output_tokens == 16
    assert turn.closed.finish_reason == "length"
    assert turn.closed.tool_keys == ()
    assert turn.closed.lease is None  # no program, no lease


async def test_a_stream_says_the_same_as_a_document(engine_replica: EngineReplica) -> None:
    whole = await take(engine_replica, chat())
    stream = await take(engine_replica, chat(stream=True))
    assert (stream.opened.status, stream.opened.is_stream) == (200, True)
    assert len(stream.events) > 2
    assert stream.message["content"] == whole.message["content"]
    assert stream.closed.output_tokens == whole.closed.output_tokens
    assert all(not event.get("usage") for event in stream.events)  # nobody asked for it


async def test_a_stream_ends_with_its_usage_when_asked(engine_replica: EngineReplica) -> None:
    turn = await take(engine_replica, chat(stream=True, stream_options={"include_usage": True}))
    usage = turn.events[-1]["usage"]
    assert usage["prompt_tokens"] == turn.closed.prompt_tokens
    assert usage["completion_tokens"] == turn.closed.output_tokens
    assert usage["prompt_tokens_details"]["cached_tokens"] == turn.closed.cached_tokens


@pytest.mark.parametrize("stream", [False, True])
async def test_a_required_call_always_fits_its_schema(engine_replica: EngineReplica, stream: bool) -> None:
    for seed in range(3):
        body = chat(
            "Use a tool.", tools=TOOLS, tool_choice="required", parallel_tool_calls=False, max_tokens=96,
            temperature=1.0, seed=seed, stream=stream,
        )  # fmt: skip
        turn = await take(engine_replica, body, hints(f"required-{stream}-{seed}"))
        (call,) = turn.message["tool_calls"]
        jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMAS[call["function"]["name"]])
        assert turn.closed.finish_reason == "tool_calls"
        assert len(turn.closed.tool_keys) == 1
        assert turn.closed.lease is not None


@pytest.mark.parametrize("stream", [False, True])
async def test_a_named_call_is_of_that_tool(engine_replica: EngineReplica, stream: bool) -> None:
    choice = {"type": "function", "function": {"name": "count"}}
    body = chat("Count.", tools=TOOLS, tool_choice=choice, max_tokens=96, stream=stream)
    turn = await take(engine_replica, body, hints(f"named-{stream}"))
    (call,) = turn.message["tool_calls"]
    assert call["function"]["name"] == "count"
    jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMAS["count"])
    assert turn.closed.tool_keys == ("count",)


async def test_parallel_calls_are_each_seen(engine_replica: EngineReplica) -> None:
    body = chat(
        "Count.", tools=[COUNT_TOOL], tool_choice="required", max_tokens=400, min_tokens=120, temperature=1.0, seed=3
    )
    turn = await take(engine_replica, body, hints("parallel"))
    assert len(turn.message["tool_calls"]) == len(turn.closed.tool_keys) >= 2
    assert set(turn.closed.tool_keys) == {"count"}


async def test_a_json_schema_binds_the_answer(engine_replica: EngineReplica) -> None:
    schema = SCHEMAS["count"]
    answer_format = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    turn = await take(engine_replica, chat("Answer.", response_format=answer_format, max_tokens=64))
    jsonschema.validate(json.loads(turn.message["content"]), schema)


async def test_several_choices_and_stop_strings_work(engine_replica: EngineReplica) -> None:
    several = await take(engine_replica, chat(n=2, temperature=1.0), hints("several"))
    assert len(several.document["choices"]) == 2
    assert several.closed.output_tokens == several.document["usage"]["completion_tokens"]
    text = (await take(engine_replica, chat())).message["content"]
    stopped = await take(engine_replica, chat(stop=[text[5:9]]), hints("stopped"))
    assert stopped.message["content"] == text[: text.index(text[5:9])]
    assert stopped.closed.finish_reason == "stop"


async def test_many_turns_run_at_once(engine_replica: EngineReplica) -> None:
    bodies = [chat(f"Tell me about {number}.", stream=number % 2 == 0) for number in range(12)]
    turns = await asyncio.gather(*(take(engine_replica, b, hints(f"many-{n}")) for n, b in enumerate(bodies)))
    assert [turn.closed.output_tokens for turn in turns] == [16] * 12


USER = [{"role": "user", "content": "hi"}]
REFUSED: dict[str, tuple[dict[str, Any], int, str]] = {
    "unknown model": ({"model": "gpt-9", "messages": USER}, 404, "model_not_found"),
    "no messages": ({"model": MODEL}, 400, "invalid_request"),
    "messages that are none": ({"messages": "hi"}, 400, "invalid_request"),
    "a role that is none": ({"messages": [{"role": 7, "content": "hi"}]}, 400, "invalid_request"),
    "negative temperature": ({"messages": USER, "temperature": -1}, 400, "invalid_request"),
    "negative limit": ({"messages": USER, "max_tokens": -5}, 400, "invalid_request"),
    "tools that are none": ({"messages": USER, "tools": [1]}, 400, "invalid_request"),
    "a tool without a function": ({"messages": USER, "tools": [{"type": "function"}]}, 400, "invalid_request"),
    "a call forced without tools": ({"messages": USER, "tool_choice": "required"}, 400, "invalid_request"),
    "a call of a tool that is not there": (
        {"messages": USER, "tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
        400,
        "invalid_request",
    ),
    "a context that is too long": (
        {"messages": [{"role": "user", "content": "word " * 4000}]},
        400,
        "context_length_exceeded",
    ),
    "a pattern that does not compile": (
        {"messages": USER, "structured_outputs": {"regex": "("}},
        400,
        "invalid_request",
    ),
    "a token that is not there": ({"messages": USER, "allowed_token_ids": [10**9]}, 400, "invalid_request"),
    "a template from outside": ({"messages": USER, "chat_template": "{{ 7 * 7 }}"}, 400, "invalid_request"),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("wrong", REFUSED)
async def test_a_wrong_request_is_refused_and_leaves_nothing(
    engine_replica: EngineReplica, wrong: str, stream: bool
) -> None:
    body, status, code = REFUSED[wrong]
    turn = await take(engine_replica, body | {"stream": stream}, hints("refused"))
    assert (turn.opened.status, turn.opened.is_stream) == (status, False)
    assert turn.error["code"] == code
    assert turn.error["type"] == "invalid_request_error"
    assert turn.error["message"]
    assert (turn.closed.output_tokens, turn.closed.tool_keys, turn.closed.lease) == (0, (), None)
    assert await nothing_runs(engine_replica)


async def test_a_stream_that_nobody_reads_on_is_aborted(engine_replica: EngineReplica) -> None:
    async with aclosing(
        engine_replica.chat(chat(stream=True, max_tokens=1500, ignore_eos=True), hints("left"))
    ) as items:
        assert isinstance(await anext(items), TurnOpened)
        await anext(items)
        assert (await engine_replica.stats())["running"] == 1
    await wait_for_async(lambda: nothing_runs(engine_replica), what="the aborted stream is gone")


async def test_a_stream_is_open_before_its_first_token_and_may_be_left_there(engine_replica: EngineReplica) -> None:
    async with aclosing(
        engine_replica.chat(chat(stream=True, max_tokens=1500, ignore_eos=True), hints("left-2"))
    ) as items:
        assert isinstance(await anext(items), TurnOpened)
    await wait_for_async(lambda: nothing_runs(engine_replica), what="the aborted stream is gone")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_cancelled_turn_is_aborted(engine_replica: EngineReplica, stream: bool) -> None:
    body = chat(max_tokens=1500, ignore_eos=True, stream=stream)
    task = asyncio.create_task(take(engine_replica, body, hints(f"cancelled-{stream}")))

    async def runs() -> bool:
        return (await engine_replica.stats())["running"] == 1

    await wait_for_async(runs, what="the turn runs")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await wait_for_async(lambda: nothing_runs(engine_replica), what="the cancelled turn is gone")


async def test_the_model_is_listed(engine_replica: EngineReplica) -> None:
    models = await engine_replica.models()
    assert models["object"] == "list"
    assert [model["id"] for model in models["data"]] == [MODEL]
