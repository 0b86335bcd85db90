"""Chat completions: who the request belongs to, what passes through, and what happens when someone goes away."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from agent_program.errors import EngineUnavailable
from agent_program.ids import ReplicaId
from deployments.chat_identity import identify
from deployments.ports import ReplicaLost
from engine_replicas.turn_stream import NOT_GENERATED, TurnOpened
from support.api import CLOSED, MODEL, OPENED, STREAMING, ApiBench, error_of

BODY: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi."}]}
ANSWER = json.dumps({"id": "x", "choices": [{"message": {"role": "assistant", "content": "Hello."}}]})


async def test_an_answer_passes_through_with_the_replica_that_gave_it() -> None:
    bench = ApiBench([[OPENED, ANSWER, CLOSED]])
    async with bench.client() as client:
        response = await client.post("/v1/chat/completions", json={**BODY, "program_id": "p", "temperature": 0.5})
    assert response.json() == json.loads(ANSWER)
    assert response.headers["x-continuum-replica"] == "r1"
    assert response.headers["x-continuum-program"] == "p"
    assert bench.engine.bodies == [{**BODY, "temperature": 0.5}]
    assert bench.engine.aborted == [False]


async def test_a_stream_passes_through_event_by_event() -> None:
    events = ['data: {"choices":[]}\n\n', "data: [DONE]\n\n"]
    bench = ApiBench([[STREAMING, *events, CLOSED]])
    async with bench.client() as client:
        response = await client.post("/v1/chat/completions", json={**BODY, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.text == "".join(events)
    assert "x-continuum-program" not in response.headers


async def test_an_error_of_the_engine_passes_through_with_its_status() -> None:
    document = json.dumps({"error": {"message": "no", "type": "t", "param": None, "code": "invalid_request"}})
    refused = TurnOpened(status=400, is_stream=False, replica_id=ReplicaId("r1"))
    bench = ApiBench([[refused, document, NOT_GENERATED]])
    async with bench.client() as client:
        response = await client.post("/v1/chat/completions", json=BODY)
    assert response.status_code == 400
    assert error_of(response)["message"] == "no"


@pytest.mark.parametrize(
    ("body", "headers", "expected"),
    [
        ({}, {}, None),
        ({"program_id": "a"}, {}, "a"),
        ({"session_id": "b"}, {}, "b"),
        ({}, {"X-Program-ID": "c"}, "c"),
        ({}, {"x-session-id": "d"}, "d"),
        ({"program_id": "a", "session_id": "b"}, {"X-Program-ID": "c", "X-Session-ID": "d"}, "a"),
        ({"session_id": "b"}, {"X-Program-ID": "c"}, "b"),
        ({}, {"X-Program-ID": "c", "X-Session-ID": "d"}, "c"),
        ({"program_id": None}, {"X-Session-ID": ""}, None),
    ],
)
async def test_the_program_is_named_by_body_or_header(
    body: dict[str, Any], headers: dict[str, str], expected: str | None
) -> None:
    bench = ApiBench([[OPENED, ANSWER, CLOSED]])
    async with bench.client() as client:
        await client.post("/v1/chat/completions", json={**BODY, **body}, headers=headers)
    (hints,) = bench.engine.hints
    assert (hints.program_id if hints else None) == expected
    assert bench.engine.bodies == [BODY]  # what is the platform's does not reach the engine


@pytest.mark.parametrize("name", ["a" * 300, "../x", "", 7, ["a"]])
async def test_an_id_that_is_given_and_not_valid_is_refused(name: Any) -> None:
    bench = ApiBench()
    async with bench.client() as client:
        response = await client.post("/v1/chat/completions", json={**BODY, "program_id": name})
    assert response.status_code == 400
    assert error_of(response)["param"] == "program_id"
    assert bench.engine.bodies == []


def test_hints_are_read() -> None:
    hints = identify(
        {
            **BODY,
            "program_id": "p",
            "continuum": {"is_last_turn": True, "next_tool": "pytest", "remaining_turns": 3, "branch": "b"},
        },
        {},
    ).hints
    assert hints is not None
    assert (hints.is_last_turn, hints.next_tool, hints.remaining_turns, hints.branch) == (True, "pytest", 3, "b")


@pytest.mark.parametrize(
    "sent",
    [
        None,
        7,
        "last",
        [],
        {"unknown": 1},
        {"is_last_turn": "yes", "next_tool": 7, "remaining_turns": -1, "branch": ""},
        {"next_tool": "x" * 1000, "remaining_turns": True, "branch": []},
        {"remaining_turns": 10**30},
    ],
)
def test_hints_that_make_no_sense_are_ignored(sent: Any) -> None:
    plain = identify({**BODY, "program_id": "p"}, {}).hints
    assert identify({**BODY, "program_id": "p", "continuum": sent}, {}).hints == plain


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ([], 400, "invalid_request"),
        ({**BODY, "model": "gpt-9"}, 404, "model_not_found"),
        ({**BODY, "model": 7}, 404, "model_not_found"),
    ],
)
async def test_what_is_refused_before_the_engine_binds_nothing(body: Any, status: int, code: str) -> None:
    bench = ApiBench()
    async with bench.client() as client:
        response = await client.post("/v1/chat/completions", json=body, headers={"X-Program-ID": "p"})
    assert (response.status_code, error_of(response)["code"]) == (status, code)
    assert bench.engine.bodies == []


async def test_the_one_model_need_not_be_named() -> None:
    bench = ApiBench([[OPENED, ANSWER, CLOSED]])
    async with bench.client() as client:
        assert (await client.post("/v1/chat/completions", json={"messages": BODY["messages"]})).status_code == 200
    assert bench.engine.bodies == [BODY]


@pytest.mark.parametrize("body", [{"messages": []}, {"messages": "hi"}, {}], ids=str)
async def test_a_chat_without_messages_is_refused_before_an_engine_sees_it(body: dict[str, Any]) -> None:
    bench = ApiBench()
    async with bench.client() as client:
        response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert error_of(response)["param"] == "messages"
    assert bench.engine.bodies == []


@pytest.mark.parametrize("lost", [ReplicaLost("killed"), EngineUnavailable("dead")])
async def test_a_turn_lost_before_its_first_byte_is_sent_once_more(lost: Exception) -> None:
    bench = ApiBench([[lost], [STREAMING, "data: [DONE]\n\n", CLOSED]])
    async with bench.client() as client:
        response = await client.post("/v1/chat/completions", json={**BODY, "stream": True})
    assert response.text == "data: [DONE]\n\n"
    assert bench.engine.bodies[0] == bench.engine.bodies[1]


async def test_a_whole_answer_lost_half_way_is_sent_once_more_and_then_is_a_503() -> None:
    bench = ApiBench([[OPENED, ReplicaLost("killed")], [OPENED, ANSWER, CLOSED]])
    async with bench.client() as client:
        assert (await client.post("/v1/chat/completions", json=BODY)).status_code == 200
    bench = ApiBench([[ReplicaLost("killed")], [ReplicaLost("killed too")]])
    async with bench.client() as client:
        response = await client.post("/v1/chat/completions", json=BODY)
    assert (response.status_code, error_of(response)["code"]) == (503, "replica_lost")


async def test_a_stream_that_breaks_ends_in_an_error_and_not_as_if_it_were_complete() -> None:
    bench = ApiBench([[STREAMING, 'data: {"choices":[]}\n\n', ReplicaLost("killed")]] * 2)
    async with bench.client() as client:
        response = await client.post("/v1/chat/completions", json={**BODY, "stream": True})
    *_, last = response.text.strip().split("\n\n")
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "replica_lost"
    assert "[DONE]" not in response.text


@pytest.mark.parametrize("opened", [OPENED, STREAMING])
async def test_a_client_that_goes_away_takes_its_turn_with_it(opened: TurnOpened) -> None:
    never = asyncio.Event()
    bench = ApiBench([[opened, never, ANSWER, CLOSED]])
    async with bench.client() as client:
        waiting = asyncio.create_task(client.post("/v1/chat/completions", json={**BODY, "stream": opened.is_stream}))
        while not bench.engine.bodies:  # noqa: ASYNC110 - the double has no event to wait for
            await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    assert bench.engine.aborted == [True]


async def test_the_model_is_listed() -> None:
    async with ApiBench().client() as client:
        listed = (await client.get("/v1/models")).json()
    assert [card["id"] for card in listed["data"]] == [MODEL]
