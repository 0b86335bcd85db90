"""A stream that goes on behind what its client has seen: one answer, no gap, nothing twice."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_program.errors import EngineUnavailable
from deployments.ports import ReplicaLost
from deployments.stream_replay import ReplayMode, SentStream, StreamDiverged, StreamSplicer, replay_plan
from support.api import CLOSED, MODEL, STREAMING, ApiBench
from support.chat_streams import chunk, events, text_of, tool_chunk

USER = [{"role": "user", "content": "Hi."}]
SAMPLED: dict[str, Any] = {"model": MODEL, "messages": USER, "stream": True, "max_tokens": 20}
GREEDY = {**SAMPLED, "temperature": 0}


def sent(*chunks: str) -> SentStream:
    splicer = StreamSplicer()
    for one in chunks:
        list(splicer.take(one))
    return splicer.sent


# What is asked of another replica


@pytest.mark.parametrize(
    ("body", "chunks", "mode"),
    [
        (SAMPLED, [], ReplayMode.RESTART),
        (SAMPLED, [chunk(role="assistant")], ReplayMode.RESTART),
        (GREEDY, [chunk("He")], ReplayMode.AGAIN),
        ({**SAMPLED, "seed": 7}, [chunk("He")], ReplayMode.AGAIN),
        (SAMPLED, [chunk("He")], ReplayMode.CONTINUE),
        (SAMPLED, [chunk("He", finish="stop")], ReplayMode.FINISH),
        (SAMPLED, [tool_chunk("shell", "{")], ReplayMode.GIVE_UP),
        (GREEDY, [tool_chunk("shell", "{")], ReplayMode.AGAIN),
        ({**SAMPLED, "n": 2}, [chunk("He")], ReplayMode.GIVE_UP),
        ({**SAMPLED, "response_format": {"type": "json_object"}}, [chunk("{")], ReplayMode.GIVE_UP),
        ({**SAMPLED, "tool_choice": "required"}, [chunk("He")], ReplayMode.GIVE_UP),
        (SAMPLED, [chunk(reasoning="Hm")], ReplayMode.GIVE_UP),
    ],
)
def test_how_a_broken_stream_goes_on(body: dict[str, Any], chunks: list[str], mode: ReplayMode) -> None:
    assert replay_plan(body, sent(*chunks)).mode is mode


def test_a_sampled_answer_is_written_on_from_its_last_token_within_its_limits() -> None:
    plan = replay_plan(SAMPLED, sent(chunk(role="assistant"), chunk("Hel"), chunk("lo")))
    assert plan.body["messages"] == [*USER, {"role": "assistant", "content": "Hello"}]
    assert plan.body["continue_final_message"] is True
    assert plan.body["add_generation_prompt"] is False
    assert plan.body["max_tokens"] == 18


def test_the_original_request_is_left_as_it_is() -> None:
    body = {**SAMPLED, "messages": list(USER)}
    replay_plan(body, sent(chunk("He")))
    assert body["messages"] == USER


# What the client gets


WORDS = ["The", " cat", " sat", " on", " the", " mat", "."]


@given(cut=st.integers(0, len(WORDS)), pieces=st.lists(st.integers(1, 6), min_size=1, max_size=30))
@settings(max_examples=60, deadline=None)
def test_the_same_answer_in_other_pieces_continues_where_the_first_one_broke(cut: int, pieces: list[int]) -> None:
    whole = "".join(WORDS)
    splicer = StreamSplicer()
    out = [event for one in [chunk(role="assistant"), *map(chunk, WORDS[:cut])] for event in splicer.take(one)]
    plan = replay_plan(GREEDY, splicer.sent)
    splicer.replays(plan.mode)
    again, at = [chunk(role="assistant", chat_id="other")], 0
    for length in pieces:
        again.append(chunk(whole[at : at + length], chat_id="other"))
        at += length
    again += [chunk(whole[at:], chat_id="other"), chunk(finish="stop", chat_id="other"), "data: [DONE]\n\n"]
    out += [event for one in again for event in splicer.take(one)]
    assert text_of(out) == whole
    assert {event["id"] for event in events(out)} == {"chat"}
    assert sum("role" in event["choices"][0]["delta"] for event in events(out)) == 1
    assert out[-1] == "data: [DONE]\n\n"


def test_other_text_than_was_sent_is_never_passed_on() -> None:
    splicer = StreamSplicer()
    list(splicer.take(chunk("The cat")))
    splicer.replays(ReplayMode.AGAIN)
    assert list(splicer.take(chunk("The"))) == []
    with pytest.raises(StreamDiverged):
        list(splicer.take(chunk(" dog")))
    assert splicer.sent.choice(0).content == "The cat"


def test_half_a_tool_call_is_completed_under_the_id_that_the_client_knows() -> None:
    splicer = StreamSplicer()
    out = list(splicer.take(tool_chunk("shell", '{"comm', call_id="first")))
    splicer.replays(ReplayMode.AGAIN)
    for one in (
        tool_chunk("shell", '{"co', call_id="second"),
        tool_chunk(None, 'mmand": "ls"}'),
        chunk(finish="tool_calls"),
    ):
        out += splicer.take(one)
    calls = [call for event in events(out) for call in event["choices"][0]["delta"].get("tool_calls", [])]
    assert [call["id"] for call in calls if "id" in call] == ["first"]
    assert "".join(call["function"]["arguments"] for call in calls) == '{"command": "ls"}'


def test_usage_of_a_continued_answer_is_that_of_one_answer() -> None:
    splicer = StreamSplicer()
    for one in (chunk("a"), chunk("b")):
        list(splicer.take(one))
    splicer.replays(ReplayMode.CONTINUE)
    usage = {"prompt_tokens": 12, "completion_tokens": 3, "total_tokens": 15}
    (event,) = events(list(splicer.take(chunk(finish="stop", usage=usage))))
    assert event["usage"] == {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}


def test_an_error_of_the_engine_passes_through() -> None:
    splicer = StreamSplicer()
    splicer.replays(ReplayMode.RESTART)
    error = 'data: {"error": {"message": "no"}}\n\n'
    assert list(splicer.take(error)) == [error]


# Through the API


async def answer_of(body: dict[str, Any], *turns: list[Any]) -> tuple[str, ApiBench]:
    bench = ApiBench(turns)
    async with bench.client() as client:
        response = await client.post("/v1/chat/completions", json={**body, "program_id": "p"})
    assert response.status_code == 200
    return response.text, bench


def pieces(text: str) -> list[str]:
    return [f"{event}\n\n" for event in text.split("\n\n") if event]


@pytest.mark.parametrize("loss", [ReplicaLost("killed"), EngineUnavailable("its engine died")])
async def test_a_greedy_stream_goes_on_after_its_replica_died(loss: Exception) -> None:
    again = [chunk(role="assistant"), chunk("Hello"), chunk(" you"), chunk(finish="stop"), "data: [DONE]\n\n"]
    text, bench = await answer_of(
        GREEDY, [STREAMING, chunk(role="assistant"), chunk("Hel"), loss], [STREAMING, *again, CLOSED]
    )
    assert text_of(pieces(text)) == "Hello you"
    assert text.endswith("data: [DONE]\n\n")
    assert bench.engine.bodies[0] == bench.engine.bodies[1]
    assert bench.engine.aborted == [True, False]


async def test_a_sampled_stream_is_continued_and_not_begun_again() -> None:
    on = [chunk(role="assistant"), chunk("lo"), chunk(" you", finish="stop"), "data: [DONE]\n\n"]
    text, bench = await answer_of(SAMPLED, [STREAMING, chunk("Hel"), ReplicaLost("killed")], [STREAMING, *on, CLOSED])
    assert text_of(pieces(text)) == "Hello you"
    assert bench.engine.bodies[1]["messages"][-1] == {"role": "assistant", "content": "Hel"}


async def test_a_greedy_stream_that_comes_out_differently_is_written_on_instead() -> None:
    text, bench = await answer_of(
        GREEDY,
        [STREAMING, chunk("Hel"), ReplicaLost("killed")],
        [STREAMING, chunk("Hey"), CLOSED],
        [STREAMING, chunk("lo", finish="stop"), "data: [DONE]\n\n", CLOSED],
    )
    assert text_of(pieces(text)) == "Hello"
    assert bench.engine.bodies[2]["continue_final_message"] is True


async def test_a_stream_that_cannot_go_on_says_so() -> None:
    text, bench = await answer_of(SAMPLED, [STREAMING, tool_chunk("shell", "{"), ReplicaLost("killed")])
    assert json.loads(pieces(text)[-1].removeprefix("data: "))["error"]["code"] == "replica_lost"
    assert len(bench.engine.bodies) == 1


async def test_a_stream_of_which_only_the_end_is_missing_is_ended_without_another_turn() -> None:
    text, bench = await answer_of(SAMPLED, [STREAMING, chunk("Hi", finish="stop"), ReplicaLost("killed")])
    assert text.endswith("data: [DONE]\n\n")
    assert len(bench.engine.bodies) == 1
