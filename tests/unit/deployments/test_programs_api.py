"""The programs API: what is accepted, what is refused and how, and what can be read."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from agent_program.errors import StoreUnavailable
from agent_program.ids import ToolKey
from agent_program.tool_events import LatencySample, SampleSource, ToolEventKind, ToolOutcome
from deployments.memory_clients import ScriptedEngine, ScriptedTools, answer, tool_calls
from deployments.memory_journal import MemoryJournal
from deployments.program_loop import ProgramLoop
from deployments.program_settings import ProgramSettings
from support.api import MODEL, ApiBench, error_of
from tool_runtime.registry import BUILTIN_TOOLS

SUBMISSION: dict[str, Any] = {"input": "List the files.", "tools": ["shell"]}


async def run_one(bench: ApiBench, engine: ScriptedEngine, tools: ScriptedTools | None = None) -> None:
    """What a runner does: take the next program and run it to its end."""
    claim = await bench.journal.claim("runner", lease_s=60.0)
    assert claim is not None
    loop = ProgramLoop(
        claim,
        await bench.journal.load(claim.program_id),
        runner="runner",
        journal=bench.journal,
        engine=engine,
        tools=tools or ScriptedTools(),
        tool_specs=BUILTIN_TOOLS,
        clock=bench.clock,
        settings=ProgramSettings(),
    )
    await loop.run()


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
        await run_one(bench, engine, ScriptedTools({"shell": ["a.txt b.txt"]}))
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
        await run_one(bench, ScriptedEngine([answer("done")]))
        response = await client.post("/v1/programs/a/cancel")
    assert response.status_code == 409
    assert error_of(response)["code"] == "illegal_state"


# Events


async def test_events_are_the_steps_in_order_and_end_with_the_program() -> None:
    bench = ApiBench()
    async with bench.client() as client:
        await client.post("/v1/programs", json={**SUBMISSION, "program_id": "a"})
        await run_one(bench, ScriptedEngine([answer("done")]))
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


async def test_events_go_on_behind_the_last_one_that_was_seen() -> None:
    bench = ApiBench()
    async with bench.client() as client:
        await client.post("/v1/programs", json={**SUBMISSION, "program_id": "a"})
        await run_one(bench, ScriptedEngine([answer("done")]))
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
        await run_one(bench, ScriptedEngine([answer("done")]))
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


# Client-run tools, explanations


async def test_a_client_reports_its_tools_to_the_replica_of_its_program() -> None:
    bench = ApiBench()
    async with bench.client() as client:
        body = {"kind": "finished", "tool": "bash", "arguments": {"command": "cd x && pytest"}, "elapsed_s": 2.5}
        assert (await client.post("/v1/programs/mine/tool_events", json=body)).status_code == 202
    (event,) = bench.engine.events
    assert (event.program_id, event.kind, event.tool) == ("mine", ToolEventKind.FINISHED, "pytest")
    assert (event.elapsed_s, event.outcome) == (2.5, ToolOutcome.OK)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"kind": "begun", "tool": "x"}, "kind"),
        ({"kind": "started"}, "tool"),
        ({"kind": "started", "tool": ""}, "tool"),
        ({"kind": "finished", "tool": "x", "elapsed_s": -1}, "elapsed_s"),
        ({"kind": "finished", "tool": "x", "outcome": "splendid"}, "outcome"),
        ({"kind": "finished", "tool": "x", "when": 1}, "when"),
    ],
)
async def test_a_bad_tool_event_is_refused_and_not_passed_on(body: dict[str, Any], param: str) -> None:
    bench = ApiBench()
    async with bench.client() as client:
        response = await client.post("/v1/programs/mine/tool_events", json=body)
    assert response.status_code == 400
    assert error_of(response)["param"] == param
    assert bench.engine.events == []


async def test_an_explanation_joins_the_program_and_the_scheduler() -> None:
    bench = ApiBench()
    bench.engine.explanations["theirs"] = {"is_known": True, "leases": []}
    async with bench.client() as client:
        await client.post("/v1/programs", json={**SUBMISSION, "program_id": "ours"})
        ours = (await client.get("/v1/programs/ours/explain")).json()
        theirs = (await client.get("/v1/programs/theirs/explain")).json()
    assert ours["program"]["id"] == "ours"
    assert theirs["program"] is None
    assert theirs["scheduler"]["is_known"]


async def test_deleting_a_client_run_program_releases_its_kv() -> None:
    bench = ApiBench()
    bench.engine.explanations["theirs"] = {"is_known": True}
    async with bench.client() as client:
        assert (await client.delete("/v1/programs/theirs")).json()["deleted"]
    assert bench.engine.released == ["theirs"]


# Tools, health


async def test_tools_are_listed_in_openais_shape() -> None:
    async with ApiBench().client() as client:
        listed = (await client.get("/v1/tools")).json()
    assert [entry["function"]["name"] for entry in listed["data"]] == list(BUILTIN_TOOLS)
    assert {entry["type"] for entry in listed["data"]} == {"function"}


async def test_latency_is_told_of_tools_and_of_measured_programs() -> None:
    bench = ApiBench()
    sample = LatencySample(
        tool=ToolKey("pytest"),
        duration_s=3.0,
        outcome=ToolOutcome.OK,
        source=SampleSource.TOOL_RUNTIME,
        at_wall_s=bench.clock.wall_s(),
    )
    await bench.history.add([sample])
    async with bench.client() as client:
        measured = (await client.get("/v1/tools/pytest/latency")).json()
        unmeasured = (await client.get("/v1/tools/shell/latency")).json()
        unknown = await client.get("/v1/tools/hammer/latency")
    assert (measured["count"], measured["p50_s"]) == (1, 3.0)
    assert (unmeasured["count"], unmeasured["p50_s"]) == (0, None)
    assert unknown.status_code == 404
    assert error_of(unknown)["code"] == "tool_not_found"


async def test_ready_names_the_part_that_is_not() -> None:
    from deployments.fleet import PartAnswer

    bench = ApiBench()
    async with bench.client() as client:
        assert (await client.get("/healthz")).status_code == 200
        ready = await client.get("/readyz")
        assert (ready.status_code, ready.json()["status"]) == (200, "ready")
        bench.fleet.answers["tools", "probe"] = PartAnswer(answers=(), faults=("no sandbox holds here",))
        unready = await client.get("/readyz")
    assert unready.status_code == 503
    assert unready.json()["parts"]["tools"] == {
        "ready": False,
        "reason": "no sandbox holds here",
        "replicas_ready": 0,
    }
    assert unready.json()["parts"]["engine"]["ready"]


async def test_metrics_join_replicas_under_one_family_and_count_programs() -> None:
    bench = ApiBench()
    async with bench.client() as client:
        await client.post("/v1/programs", json={**SUBMISSION, "program_id": "a"})
        await run_one(bench, ScriptedEngine([answer("done", prompt_tokens=100, cached_tokens=64)]))
        page = (await client.get("/metrics")).text
    assert page.count("# TYPE vllm:running gauge") == 1
    assert 'vllm:running{engine="0",part="engine",replica="r1"} 3.0' in page
    assert 'vllm:running{engine="0",part="engine",replica="r2"} 4.0' in page
    assert 'continuum_replicas_silent{part="engine"} 1.0' in page
    assert 'continuum_programs{state="completed"} 1.0' in page
    assert 'continuum_programs_ended_total{reason="answer",state="completed"} 1.0' in page
    assert "continuum_program_reused_tokens_total 64.0" in page
    assert "continuum_store_up 1.0" in page


async def test_a_store_that_is_away_is_a_503_that_says_when_to_come_back() -> None:
    class Away(MemoryJournal):
        async def create(self, *_: Any, **__: Any) -> Any:
            raise StoreUnavailable(retry_after_s=2)

        async def check(self) -> None:
            raise StoreUnavailable

    bench = ApiBench()
    bench = ApiBench(journal=Away(bench.clock))
    async with bench.client() as client:
        response = await client.post("/v1/programs", json=SUBMISSION)
        assert (response.status_code, error_of(response)["code"]) == (503, "store_unavailable")
        assert response.headers["retry-after"] == "2"
        assert not (await client.get("/readyz")).json()["parts"]["store"]["ready"]
        assert (await client.get("/healthz")).status_code == 200


async def test_wrong_routes_and_methods_have_openais_shape_too() -> None:
    async with ApiBench().client() as client:
        assert error_of(await client.get("/v1/nothing"))["code"] == "route_not_found"
        wrong = await client.put("/v1/programs")
    assert wrong.status_code == 405
    assert error_of(wrong)["code"] == "method_not_allowed"


async def test_an_error_of_ours_is_a_500_without_its_details() -> None:
    class Broken(MemoryJournal):
        async def get(self, program_id: str) -> Any:
            raise RuntimeError("secret detail")

    bench = ApiBench(journal=Broken(ApiBench().clock))
    async with bench.client() as client:
        response = await client.get("/v1/programs/a")
    assert response.status_code == 500
    assert error_of(response)["code"] == "internal_error"
    assert "secret" not in response.text
