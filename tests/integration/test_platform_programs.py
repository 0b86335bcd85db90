"""Programs on the running platform: real engine, real sandboxes, real store."""

from __future__ import annotations

import io
import json
import tarfile
from typing import Any

import psutil
import pytest

from support.platform import Json, Platform
from support.waiting import wait_for

pytestmark = pytest.mark.integration

#: The small model copies a command out of its prompt; what it answers beyond that is its own affair.
SLEEP: Json = {"tools": ["shell"], "tool_choice": "required", "sampling": {"temperature": 0}}
#: One turn of about this many seconds, whatever the model wants to say.
LONG_TURN: Json = {
    "input": "Tell a story.",
    "limits": {"max_turns": 1, "max_tokens_per_turn": 1500},
    "sampling": {"ignore_eos": True, "min_tokens": 1500},
}


def run_command(command: str, **limits: Any) -> Json:
    return {**SLEEP, "input": f"Run this command: {command}", "limits": {"max_tokens_per_turn": 60, **limits}}


def test_programs_run_side_by_side_to_their_turn_limit_with_real_tools(platform: Platform) -> None:
    tasks = ["ls -l", "pwd", "echo hello", "uname -a", "date", "whoami"]
    ids = [platform.submit(**run_command(task, max_turns=3)) for task in tasks]
    for program_id in ids:
        program = platform.wait_for_end(program_id)
        assert (program["state"], program["end_reason"], program["turns"]) == ("completed", "max_turns", 3), program
        calls = platform.steps(program_id, "tool.finished")
        assert program["tool_calls"] == len(calls) >= 1
        assert {call["tool"] for call in calls} == {"shell"}
    # Every later turn repeats a context that nobody else pushed out, so most of it is found in the cache.
    usage = [platform.program(program_id)["usage"] for program_id in ids]
    assert sum(one["cached_tokens"] for one in usage) > sum(one["recomputed_tokens"] for one in usage)


def test_events_are_the_journal_in_order_and_resume_anywhere(platform: Platform) -> None:
    program_id = platform.submit(**run_command("echo hi", max_turns=2))
    with platform.client.stream("GET", f"/v1/programs/{program_id}/events", timeout=240) as stream:
        live = read_events("".join(stream.iter_text()))
    assert [event["seq"] for event in live] == [step["seq"] for step in platform.journal(program_id)]
    assert live[-1]["type"] == "program.ended"
    headers = {"Last-Event-ID": "4"}
    rest = read_events(platform.client.get(f"/v1/programs/{program_id}/events", headers=headers).text)
    assert rest == live[4:]


def read_events(text: str) -> list[Json]:
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]


def test_a_program_is_cancelled_in_the_middle_of_a_turn(platform: Platform) -> None:
    program_id = platform.submit(**LONG_TURN)
    platform.wait_for_step(program_id, "turn.started")
    wait_for(lambda: platform.metric("continuum_engine_turns_open") > 0, what="the turn to be in the engine")
    assert platform.client.post(f"/v1/programs/{program_id}/cancel").status_code == 200
    assert platform.wait_for_end(program_id)["state"] == "cancelled"
    wait_for(lambda: platform.metric("continuum_engine_turns_open") == 0, what="the engine to drop the turn")


def test_a_program_is_cancelled_in_the_middle_of_a_tool_and_nothing_of_it_lives_on(platform: Platform) -> None:
    program_id = platform.submit(**run_command("sleep 471", max_turns=3, tool_timeout_s=300))
    platform.wait_for_step(program_id, "tool.started")
    wait_for(sleepers, what="the command to run")
    platform.client.post(f"/v1/programs/{program_id}/cancel")
    assert platform.wait_for_end(program_id)["state"] == "cancelled"
    wait_for(lambda: not sleepers(), what="the command to be gone")


def sleepers() -> list[int]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if process.info["cmdline"] == ["sleep", "471"]:
            found.append(process.pid)
    return found


def test_a_tool_that_takes_too_long_is_stopped_and_the_program_goes_on(platform: Platform) -> None:
    program_id = platform.submit(**run_command("sleep 100", max_turns=2, tool_timeout_s=1))
    program = platform.wait_for_end(program_id)
    assert program["end_reason"] == "max_turns"
    assert platform.steps(program_id, "tool.finished")[0]["outcome"] == "timeout"
    latency = platform.client.get("/v1/tools/sleep/latency").json()
    assert latency["censored_count"] >= 1


def test_a_conversation_that_outgrows_the_model_ends_and_says_so(platform: Platform) -> None:
    program_id = platform.submit(input="word " * 4000)
    program = platform.wait_for_end(program_id)
    assert (program["state"], program["end_reason"]) == ("failed", "context_overflow")
    assert program["error"]["code"] == "context_length_exceeded"


def test_the_time_limit_ends_a_turn_in_progress(platform: Platform) -> None:
    body = {**LONG_TURN, "limits": {**LONG_TURN["limits"], "max_seconds": 3}}
    program_id = platform.submit(**body)
    program = platform.wait_for_end(program_id)
    assert (program["state"], program["end_reason"]) == ("completed", "max_seconds")
    wait_for(lambda: platform.metric("continuum_engine_turns_open") == 0, what="the engine to drop the turn")


WEATHER: Json = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def test_a_program_waits_for_its_clients_tool_and_keeps_its_kv_meanwhile(platform: Platform) -> None:
    program_id = platform.submit(
        input="What is the weather in Rome?",
        tools=[WEATHER],
        tool_choice="required",
        limits={"max_turns": 2, "max_tokens_per_turn": 60},
        sampling={"temperature": 0},
    )
    platform.wait_for_step(program_id, "action.required")
    waiting = platform.program(program_id)
    assert waiting["state"] == "requires_action"
    calls = waiting["required_action"]["calls"]
    assert {(call["kind"], call["tool"]) for call in calls} == {("output", "weather")}
    assert all(json.loads(call["arguments"])["city"] in ("Rome", "Oslo") for call in calls)
    outputs = [{"call_id": call["call_id"], "output": "rain"} for call in calls]
    for _ in range(2):  # the same answers twice are one
        answered = platform.client.post(f"/v1/programs/{program_id}/tool_outputs", json={"tool_outputs": outputs})
        assert answered.status_code == 200, answered.text
    platform.wait_for_step(program_id, "turn.finished", count=2)
    second = platform.steps(program_id, "turn.finished")[1]
    assert second["cached_tokens"] > 0
    assert platform.client.post(f"/v1/programs/{program_id}/cancel").status_code in (200, 409)
    assert platform.wait_for_end(program_id)["tool_calls"] >= len(calls)


def test_a_call_that_needs_consent_runs_only_once_it_has_it(platform: Platform) -> None:
    guarded = {"type": "function", "function": {"name": "shell"}, "require_approval": "always"}
    program_id = platform.submit(**{**run_command("echo agreed", max_turns=1), "tools": [guarded]})
    platform.wait_for_step(program_id, "action.required")
    assert platform.steps(program_id, "tool.started") == []
    calls = platform.program(program_id)["required_action"]["calls"]
    answers = [{"call_id": call["call_id"], "approve": True} for call in calls]
    answered = platform.client.post(f"/v1/programs/{program_id}/tool_outputs", json={"tool_outputs": answers})
    assert answered.status_code == 200, answered.text
    program = platform.wait_for_end(program_id)
    assert (program["state"], program["end_reason"]) == ("completed", "max_turns")
    assert len(platform.steps(program_id, "tool.started")) == len(calls)


def test_a_programs_files_are_put_there_before_it_starts(platform: Platform) -> None:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        note = tarfile.TarInfo("notes/hello.txt")
        note.size = 5
        tar.addfile(note, io.BytesIO(b"hello"))
    path = "/v1/programs/with-files/workspace"
    put = platform.client.put(path, content=archive.getvalue())
    assert put.status_code == 200, put.text
    assert put.json()["bytes"] == 5
    assert platform.client.put(path, content=b"no tar at all").json()["error"]["code"] == "archive_refused"
    platform.submit(**run_command("cat notes/hello.txt", max_turns=1), program_id="with-files")
    platform.wait_for_step("with-files", "tool.finished")
    (result,) = platform.steps("with-files", "tool.finished")
    platform.wait_for_end("with-files")
    assert "hello" in result["output"]


def test_an_explanation_tells_what_the_scheduler_decided(platform: Platform) -> None:
    program_id = platform.submit(**run_command("echo hi", max_turns=2))
    platform.wait_for_end(program_id)
    explained = platform.client.get(f"/v1/programs/{program_id}/explain").json()
    assert explained["program"]["id"] == program_id
    assert {decision["event"] for decision in explained["scheduler"]["decisions"]} >= {"turn_finished", "armed"}


def test_metrics_cover_every_part(platform: Platform) -> None:
    page = platform.client.get("/metrics").text
    for name in (
        "vllm:num_requests_running",
        "continuum_engine_kv_blocks",
        "continuum_tools_calls_ended_total",
        "continuum_runner_running",
        "continuum_store_memory_bytes",
        "continuum_programs",
        "continuum_program_turns_total",
    ):
        assert f"\n{name}{{" in page or f"\n{name} " in page, name
    types = [line.split()[2] for line in page.splitlines() if line.startswith("# TYPE ")]
    assert len(types) == len(set(types)), "a family has two headers"
