"""The programs API: what is accepted, what is refused and how, and what can be read."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from agent_program.clock import ManualClock
from deployments.memory_clients import ScriptedEngine, ScriptedTools, answer, tool_calls
from deployments.memory_journal import MemoryJournal
from deployments.program_settings import ProgramSettings
from support.api import MODEL, ApiBench, error_of

SUBMISSION: dict[str, Any] = {"input": "List the files.", "tools": ["shell"]}


def events_of(text: str) -> list[dict[str, Any]]:
    """Server-sent events; comments are left out."""
    events = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if line and not line.startswith(":"))
        if fields:
            events.append({**fields, "data": json.loads(fields["data"])})
    return events


async def test_a_submission_is_accepted_with_every_default_filled_in() -> None:
    bench = ApiBench()
    async with bench.client() as client:
        response = await client.post("/v1/programs", json=SUBMISSION)
        assert response.status_code == 202
        program = response.json()
        assert response.headers["location"] == f"/v1/programs/{program['id']}"
        assert (await client.get(response.headers["location"])).json() == program
    defaults = ProgramSettings().limit_defaults
    assert program["object"] == "program"
    assert program["state"] == "queued"
    assert program["model"] == MODEL
    assert program["limits"]["max_turns"] == defaults.max_turns
    stored = await bench.journal.load(program["id"])
    assert stored.spec.tool_choice == "auto"
    assert stored.spec.messages == [{"role": "user", "content": "List the files."}]


async def test_instructions_are_the_system_message() -> None:
    bench = ApiBench()
    async with bench.client() as client:
        body = {"program_id": "a", "instructions": "Be brief.", "messages": [{"role": "user", "content": "Hi."}]}
        await client.post("/v1/programs", json=body)
    messages = (await bench.journal.load("a")).spec.messages
    assert messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi."}]


async def test_tools_may_be_given_in_openais_shape() -> None:
    bench = ApiBench()
    function = {"type": "function", "function": {"name": "shell", "description": "mine", "parameters": {}}}
    async with bench.client() as client:
        response = await client.post("/v1/programs", json={"input": "x", "tools": [function, "python"]})
    assert response.json()["tools"] == ["shell", "python"]


BAD: list[tuple[str, Any, str | None, str]] = [
    ("not an object", [], None, "invalid_request"),
    ("nothing to do", {}, None, "invalid_request"),
    ("two things to do", {"input": "x", "messages": [{"role": "user", "content": "x"}]}, None, "invalid_request"),
    ("an unknown field", {"input": "x", "toolz": []}, "toolz", "invalid_request"),
    ("an unknown limit", {"input": "x", "limits": {"max_turn": 1}}, "limits.max_turn", "invalid_request"),
    ("a negative limit", {"input": "x", "limits": {"max_turns": -1}}, "limits.max_turns", "invalid_request"),
    ("no turns at all", {"input": "x", "limits": {"max_turns": 0}}, "limits.max_turns", "invalid_request"),
    (
        "a limit above the ceiling",
        {"input": "x", "limits": {"max_turns": 10**6}},
        "limits.max_turns",
        "invalid_request",
    ),
    ("a limit that is text", {"input": "x", "limits": {"max_turns": "3"}}, "limits.max_turns", "invalid_request"),
    ("negative seconds", {"input": "x", "limits": {"max_seconds": -0.5}}, "limits.max_seconds", "invalid_request"),
    ("limits that are no object", {"input": "x", "limits": 3}, "limits", "invalid_request"),
    ("an input that is no text", {"input": 3}, "input", "invalid_request"),
    ("an empty input", {"input": ""}, "input", "invalid_request"),
    ("an input of white space", {"input": " \n\t"}, "input", "invalid_request"),
    ("empty instructions", {"input": "x", "instructions": " "}, "instructions", "invalid_request"),
    ("an empty message", {"messages": [{"role": "user", "content": " "}]}, "messages.0.content", "invalid_request"),
    ("a message without content", {"messages": [{"role": "user"}]}, "messages.0.content", "invalid_request"),
    ("content of no parts", {"messages": [{"role": "user", "content": []}]}, "messages.0.content", "invalid_request"),
    (
        "content that is a number",
        {"messages": [{"role": "user", "content": 7}]},
        "messages.0.content",
        "invalid_request",
    ),
    ("a tool's output missing", {"messages": [{"role": "tool"}]}, "messages.0.content", "invalid_request"),
    ("no messages", {"messages": []}, "messages", "invalid_request"),
    ("a message that is no object", {"messages": ["hi"]}, "messages.0", "invalid_request"),
    ("an unknown role", {"messages": [{"role": "boss", "content": "x"}]}, "messages.0.role", "invalid_request"),
    ("a role that is no text", {"messages": [{"role": ["user"]}]}, "messages.0.role", "invalid_request"),
    ("an unknown tool", {"input": "x", "tools": ["hammer"]}, "tools", "tool_not_found"),
    ("a tool twice", {"input": "x", "tools": ["shell", "shell"]}, "tools", "invalid_request"),
    ("a tool that is a number", {"input": "x", "tools": [1]}, "tools.0", "invalid_request"),
    ("a choice without tools", {"input": "x", "tool_choice": "required"}, "tool_choice", "invalid_request"),
    ("an unknown choice", {"input": "x", "tools": ["shell"], "tool_choice": "maybe"}, "tool_choice", "invalid_request"),
    (
        "a list of choices",
        {"input": "x", "tools": ["shell"], "tool_choice": ["auto"]},
        "tool_choice",
        "invalid_request",
    ),
    (
        "a choice of another tool",
        {"input": "x", "tools": ["shell"], "tool_choice": {"type": "function", "function": {"name": "python"}}},
        "tool_choice",
        "invalid_request",
    ),
    (
        "a choice without a name",
        {"input": "x", "tools": ["shell"], "tool_choice": {"type": "function", "function": {}}},
        "tool_choice.function.name",
        "invalid_request",
    ),
    ("another model", {"input": "x", "model": "gpt-9"}, "model", "model_not_found"),
    ("an id of 300 bytes", {"input": "x", "program_id": "a" * 300}, "program_id", "invalid_request"),
    ("an id that is a path", {"input": "x", "program_id": "../../etc"}, "program_id", "invalid_request"),
    ("an empty id", {"input": "x", "program_id": ""}, "program_id", "invalid_request"),
    ("metadata that is no text", {"input": "x", "metadata": {"a": 1}}, "metadata.a", "invalid_request"),
    ("too much metadata", {"input": "x", "metadata": {str(n): "" for n in range(17)}}, "metadata", "invalid_request"),
    ("a temperature of 9", {"input": "x", "sampling": {"temperature": 9}}, "sampling.temperature", "invalid_request"),
]


@pytest.mark.parametrize(("body", "param", "code"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
async def test_a_bad_submission_is_refused_by_the_name_of_its_field_and_leaves_nothing(
    body: Any, param: str | None, code: str
) -> None:
    bench = ApiBench()
    async with bench.client() as client:
        response = await client.post("/v1/programs", json=body)
        error = error_of(response)
        assert 400 <= response.status_code < 500
        assert error["type"] == "invalid_request_error"
        assert error["code"] == code
        if param is not None:
            assert error["param"] == param
        assert (await client.get("/v1/programs")).json()["data"] == []


async def test_a_body_that_is_no_json_is_refused() -> None:
    bench = ApiBench()
    async with bench.client() as client:
        for body in (b"{", b"", b"\xff\xfe", b'{"input": NaN}', b"[" * 5000):
            response = await client.post("/v1/programs", content=body)
            assert response.status_code == 400, body[:10]
            assert "JSON" in error_of(response)["message"]


async def test_a_body_that_is_too_large_is_refused_whether_or_not_it_says_so() -> None:
    bench = ApiBench()

    async def pieces() -> Any:
        for _ in range(100):
            yield b"x" * 1000

    async with bench.client() as client:
        declared = await client.post("/v1/programs", content=b"x" * 10_001)
        undeclared = await client.post("/v1/programs", content=pieces())
    for response in (declared, undeclared):
        assert response.status_code == 413
        assert error_of(response)["code"] == "request_too_large"


async def test_an_id_is_used_once() -> None:
    bench = ApiBench()
    async with bench.client() as client:
        assert (await client.post("/v1/programs", json={**SUBMISSION, "program_id": "a"})).status_code == 202
        bench.clock.advance(1)
        again = await client.post("/v1/programs", json={**SUBMISSION, "program_id": "a"})
    assert again.status_code == 409
    assert error_of(again)["code"] == "program_exists"


async def test_an_idempotency_key_gives_the_same_program_again() -> None:
    bench = ApiBench()
    headers = {"Idempotency-Key": "once"}
    async with bench.client() as client:
        first = await client.post("/v1/programs", json=SUBMISSION, headers=headers)
        again = await client.post("/v1/programs", json=SUBMISSION, headers=headers)
        other = await client.post("/v1/programs", json={"input": "other"}, headers=headers)
        assert again.json()["id"] == first.json()["id"]
        assert other.status_code == 409
        assert error_of(other)["code"] == "idempotency_mismatch"
        assert len((await client.get("/v1/programs")).json()["data"]) == 1


async def test_a_finished_program_tells_what_it_did() -> None:
    bench = ApiBench()
    engine = ScriptedEngine(
        [
            tool_calls(("c", "shell", {"command": "ls"}), prompt_tokens=100, output_tokens=20),
            answer("Two files.", prompt_tokens=150, cached_tokens=96, output_tokens=5),
        ]
    )
    async with bench.client() as client:
        await client.post("/v1/programs", json={**SUBMISSION, "program_id": "a"})
        await bench.run_one(engine, ScriptedTools({"shell": ["a.txt b.txt"]}))
        program = (await client.get("/v1/programs/a?include=journal,turns")).json()
    assert program["state"] == "completed"
    assert program["end_reason"] == "answer"
    assert program["output"] == "Two files."
    # Of the second prompt's 150 tokens the first turn had seen 120; 96 were found, so 24 were computed again.
    assert program["usage"] == {
        "prompt_tokens": 250,
        "cached_tokens": 96,
        "recomputed_tokens": 24,
        "output_tokens": 25,
    }
    assert program["tool_calls"] == 1
    assert [step["seq"] for step in program["journal"]] == list(range(1, len(program["journal"]) + 1))
    assert [turn["turn"] for turn in program["turn_list"]] == [1, 2]


async def test_only_known_parts_can_be_included() -> None:
    bench = ApiBench()
    async with bench.client() as client:
        await client.post("/v1/programs", json={**SUBMISSION, "program_id": "a"})
        response = await client.get("/v1/programs/a?include=secrets")
    assert response.status_code == 400
    assert error_of(response)["param"] == "include"


async def test_lists_can_be_filtered_and_paged() -> None:
    bench = ApiBench()
    async with bench.client() as client:
        for name in ("a", "b", "c"):
            await client.post("/v1/programs", json={**SUBMISSION, "program_id": name})
        await client.post("/v1/programs/b/cancel")
        first = (await client.get("/v1/programs?limit=2")).json()
        assert ([program["id"] for program in first["data"]], first["has_more"]) == (["c", "b"], True)
        rest = (await client.get(f"/v1/programs?limit=2&after={first['last_id']}")).json()
        assert ([program["id"] for program in rest["data"]], rest["has_more"]) == (["a"], False)
        queued = (await client.get("/v1/programs?state=queued")).json()
        assert [program["id"] for program in queued["data"]] == ["c", "a"]


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=-1", "limit=101", "limit=x", "state=asleep", "after=nobody", "after=%2F"]
)
async def test_a_bad_list_query_is_refused(query: str) -> None:
    bench = ApiBench()
    async with bench.client() as client:
        response = await client.get(f"/v1/programs?{query}")
    assert response.status_code == 400
    assert error_of(response)["param"] == query.partition("=")[0]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/programs/nobody"),
        ("GET", "/v1/programs/nobody/events"),
        ("GET", "/v1/programs/nobody/explain"),
        ("POST", "/v1/programs/nobody/cancel"),
        ("DELETE", "/v1/programs/nobody"),
    ],
)
async def test_a_program_that_is_not_there_is_a_404_everywhere(method: str, path: str) -> None:
    bench = ApiBench()
    bench.explained("nobody", r1={"is_known": False})
    async with bench.client() as client:
        response = await client.request(method, path)
    assert response.status_code == 404
    assert error_of(response)["code"] == "program_not_found"


async def test_a_program_is_cancelled_once_and_deleted_when_it_has_ended() -> None:
    bench = ApiBench()
    async with bench.client() as client:
        await client.post("/v1/programs", json={**SUBMISSION, "program_id": "a"})
        early = await client.delete("/v1/programs/a")
        assert (early.status_code, error_of(early)["code"]) == (409, "illegal_state")
        assert (await client.post("/v1/programs/a/cancel")).json()["state"] == "cancelled"
        assert (await client.post("/v1/programs/a/cancel")).status_code == 200
        assert (await client.delete("/v1/programs/a")).json() == {
            "id": "a",
            "object": "program.deleted",
            "deleted": True,
        }
        assert (await client.get("/v1/programs/a")).status_code == 404


async def test_a_program_that_has_ended_otherwise_cannot_be_cancelled() -> None:
    bench = ApiBench()
    async with bench.client() as client:
        await client.post("/v1/programs", json={**SUBMISSION, "program_id": "a"})
        await bench.run_one(ScriptedEngine([answer("done")]))
        response = await client.post("/v1/programs/a/cancel")
    assert response.status_code == 409
    assert error_of(response)["code"] == "illegal_state"


# Events


async def test_events_are_the_steps_in_order_and_end_with_the_program() -> None:
    bench = ApiBench()
    async with bench.client() as client:
        await client.post("/v1/programs", json={**SUBMISSION, "program_id": "a"})
        await bench.run_one(ScriptedEngine([answer("done")]))
        response = await client.get("/v1/programs/a/events")
    assert response.headers["content-type"].startswith("text/event-stream")
    events = events_of(response.text)
    assert [(event["id"], event["event"]) for event in events] == [
        ("1", "program.queued"),
        ("2", "program.claimed"),
        ("3", "turn.started"),
        ("4", "turn.finished"),
        ("5", "program.ended"),
    ]
    assert events[-1]["data"]["end_reason"] == "answer"
    assert all(event["data"]["program_id"] == "a" for event in events)


async def test_the_last_event_is_seen_whenever_it_comes() -> None:
    """The program ends between any two looks of its follower at the journal."""

    class EndsAtLook(MemoryJournal):
        looks_left = 1_000_000

        async def look(self) -> None:
            self.looks_left -= 1
            if self.looks_left == 0:
                await bench.run_one(ScriptedEngine([answer("done")]))

        async def get(self, program_id: str) -> Any:
            record = await super().get(program_id)
            await self.look()
            return record

        async def steps(self, program_id: str, **options: Any) -> Any:
            steps = await super().steps(program_id, **options)
            await self.look()
            return steps

    for looks in range(1, 6):
        journal = EndsAtLook(ManualClock())
        bench = ApiBench(journal=journal)
        async with bench.client() as client:
            await client.post("/v1/programs", json={**SUBMISSION, "program_id": "a"})
            journal.looks_left = looks
            response = await client.get("/v1/programs/a/events")
        assert [event["id"] for event in events_of(response.text)] == ["1", "2", "3", "4", "5"], looks


async def test_events_go_on_behind_the_last_one_that_was_seen() -> None:
    bench = ApiBench()
    async with bench.client() as client:
        await client.post("/v1/programs", json={**SUBMISSION, "program_id": "a"})
        await bench.run_one(ScriptedEngine([answer("done")]))
        response = await client.get("/v1/programs/a/events", headers={"Last-Event-ID": "3"})
        assert [event["id"] for event in events_of(response.text)] == ["4", "5"]
        bad = await client.get("/v1/programs/a/events", headers={"Last-Event-ID": "yesterday"})
        assert error_of(bad)["param"] == "Last-Event-ID"


async def test_a_follower_sees_steps_as_they_come_with_heartbeats_in_between() -> None:
    bench = ApiBench()
    async with bench.client() as client:
        await client.post("/v1/programs", json={**SUBMISSION, "program_id": "a"})
        following = asyncio.create_task(client.get("/v1/programs/a/events"))
        await asyncio.sleep(0.12)  # longer than two heartbeats of 0.05 s
        await bench.run_one(ScriptedEngine([answer("done")]))
        response = await following
    assert response.text.count(": heartbeat") >= 1
    assert [event["id"] for event in events_of(response.text)] == ["1", "2", "3", "4", "5"]


async def test_no_more_event_streams_are_open_than_allowed() -> None:
    bench = ApiBench(event_streams_max=1)
    async with bench.client() as client:
        await client.post("/v1/programs", json={**SUBMISSION, "program_id": "a"})
        first = asyncio.create_task(client.get("/v1/programs/a/events"))
        await asyncio.sleep(0.05)
        second = await client.get("/v1/programs/a/events")
        assert second.status_code == 429
        assert error_of(second)["code"] == "overloaded"
        assert second.headers["retry-after"]
        await client.post("/v1/programs/a/cancel")
        await first
        assert (await client.get("/v1/programs/a/events")).status_code == 200


# Polling, and going on with a program that has ended


async def test_a_read_is_tagged_and_not_sent_again_while_nothing_has_changed() -> None:
    bench = ApiBench()
    async with bench.client() as client:
        await client.post("/v1/programs", json={**SUBMISSION, "program_id": "a"})
        for path in ("/v1/programs/a", "/v1/programs/a?include=journal", "/v1/programs"):
            first = await client.get(path)
            tag = first.headers["etag"]
            for known in (tag, f"W/{tag}", f'"old", {tag}', "*"):
                again = await client.get(path, headers={"If-None-Match": known})
                assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
            assert (await client.get(path, headers={"If-None-Match": '"old"'})).json() == first.json()
        tag = (await client.get("/v1/programs/a")).headers["etag"]
        await client.post("/v1/programs/a/cancel")
        changed = await client.get("/v1/programs/a", headers={"If-None-Match": tag})
    assert (changed.status_code, changed.json()["state"]) == (200, "cancelled")


async def test_a_program_goes_on_with_the_conversation_and_the_tools_of_one_that_ended() -> None:
    bench = ApiBench()
    engine = ScriptedEngine([tool_calls(("c", "shell", {"command": "ls"})), answer("Two files."), answer("Bye.")])
    async with bench.client() as client:
        first = {**SUBMISSION, "program_id": "a", "instructions": "Be brief."}
        await client.post("/v1/programs", json=first)
        early = await client.post("/v1/programs", json={"previous_program_id": "a", "input": "And now?"})
        assert (early.status_code, error_of(early)["code"]) == (409, "illegal_state")
        await bench.run_one(engine, ScriptedTools({"shell": ["a.txt b.txt"]}))
        body = {"previous_program_id": "a", "program_id": "b", "input": "And now?"}
        assert (await client.post("/v1/programs", json=body)).json()["tools"] == ["shell"]
        await bench.run_one(engine)
    before, after = engine.bodies[1], engine.bodies[2]
    conversation = [*before["messages"], {"role": "assistant", "content": "Two files."}]
    assert after["messages"] == [*conversation, {"role": "user", "content": "And now?"}]
    assert after["tools"] == before["tools"]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"previous_program_id": "nobody", "input": "x"}, 404),
        ({"previous_program_id": "../x", "input": "x"}, 400),
        ({"previous_program_id": 7, "input": "x"}, 400),
        ({"previous_program_id": "a", "input": "x", "instructions": "Be long."}, 400),
    ],
)
async def test_going_on_with_what_is_not_there_is_refused(body: dict[str, Any], status: int) -> None:
    bench = ApiBench()
    async with bench.client() as client:
        await client.post("/v1/programs", json={**SUBMISSION, "program_id": "a"})
        await client.post("/v1/programs/a/cancel")
        response = await client.post("/v1/programs", json=body)
    assert response.status_code == status
    assert error_of(response)["type"] == "invalid_request_error"
