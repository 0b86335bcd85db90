"""Parts of the running platform are killed while programs run: every program ends, and its journal tells what happened."""

from __future__ import annotations

import json
import signal
import time
from functools import partial

import httpx
import pytest

from support.platform import END_DEADLINE_S, START_DEADLINE_S, Json, Platform
from support.waiting import wait_for

pytestmark = [pytest.mark.integration, pytest.mark.slow]

LONG_TURNS: Json = {
    "input": "Tell a story.",
    "tools": ["shell"],
    "tool_choice": "none",
    "limits": {"max_turns": 1, "max_tokens_per_turn": 700},
    "sampling": {"ignore_eos": True, "min_tokens": 700, "temperature": 0},
}
SLOW_TOOL: Json = {
    "input": "Run this command: sleep 20",
    "tools": ["shell"],
    "tool_choice": "required",
    "limits": {"max_turns": 2, "max_tokens_per_turn": 60},
    "sampling": {"temperature": 0},
}


@pytest.fixture(autouse=True)
def healed(platform: Platform) -> None:
    """Each test begins on a whole platform."""
    wait_for(platform.is_ready, what="the platform to be whole", deadline_s=START_DEADLINE_S)


def test_an_engine_replica_killed_during_a_turn_loses_no_program(platform: Platform) -> None:
    # The router goes by load, so that what ran before this test decides where the first few programs go.
    placed: dict[str, str] = {}
    while len(set(placed.values())) < 2:
        assert len(placed) < 12, "twelve programs at once all went to one of two replicas"
        program_id = platform.submit(**LONG_TURNS)
        placed[program_id] = wait_for(partial(platform.replica_of_turn, program_id), what=f"a turn of {program_id}")
    victim = next(iter(placed.values()))
    platform.kill_replica("EngineReplica", victim)
    programs = [platform.wait_for_end(program_id) for program_id in placed]
    assert {(program["state"], program["turns"]) for program in programs} == {("completed", 1)}
    replayed = {program["id"] for program in programs if program["replayed_turns"]}
    assert replayed == {program_id for program_id, replica in placed.items() if replica == victim}
    for program_id in replayed:
        (step,) = platform.steps(program_id, "turn.replayed")
        assert "lost" in step["reason"]


def test_a_tool_actor_killed_during_a_call_is_told_to_the_model(platform: Platform) -> None:
    program_id = platform.submit(**SLOW_TOOL)
    platform.wait_for_step(program_id, "tool.started")
    wait_for(lambda: platform.metric("continuum_tools_calls_running") == 1, what="the call to run")
    platform.kill_one("ToolActor")
    program = platform.wait_for_end(program_id)
    assert program["state"] == "completed", program
    outcomes = [step["outcome"] for step in platform.steps(program_id, "tool.finished")]
    assert outcomes[0] == "interrupted"
    calls = [step["call_id"] for step in platform.steps(program_id, "tool.started")]
    assert len(calls) == len(set(calls)), "a call ran twice"


def test_a_runner_killed_during_a_turn_is_replaced_and_no_step_runs_twice(platform: Platform) -> None:
    ids = [platform.submit(**LONG_TURNS), platform.submit(**SLOW_TOOL)]
    platform.wait_for_step(ids[0], "turn.started")
    platform.wait_for_step(ids[1], "tool.started")
    platform.kill_one("ProgramRunner")
    for program_id in ids:
        program = platform.wait_for_end(program_id)
        assert program["state"] == "completed", program
        assert [step["resumed"] for step in platform.steps(program_id, "program.claimed")] == [False, True]
        finished = [step["turn"] for step in platform.steps(program_id, "turn.finished")]
        assert finished == sorted(set(finished)), "a turn finished twice"
    # A call that was under way when its runner was lost may have run in part, and is not run again.
    assert platform.steps(ids[1], "tool.finished")[0]["outcome"] == "interrupted"


def test_a_follower_resumes_behind_its_last_event_when_the_ingress_is_killed(platform: Platform) -> None:
    program_id = platform.submit(**LONG_TURNS)
    seen: list[int] = []

    def follow() -> bool:
        """Read until the stream breaks or ends; True once the program has ended."""
        headers = {"Last-Event-ID": str(seen[-1])} if seen else {}
        try:
            with httpx.stream(
                "GET", f"{platform.url}/v1/programs/{program_id}/events", headers=headers, timeout=60, trust_env=False
            ) as stream:
                if stream.status_code != 200:
                    return False
                for line in stream.iter_lines():
                    if line.startswith("data: "):
                        event = json.loads(line.removeprefix("data: "))
                        seen.append(event["seq"])
                        if event["type"] == "program.ended":
                            return True
                        if event["type"] == "turn.started":
                            platform.kill_one("Ingress")
        except httpx.TransportError:
            pass
        return False

    wait_for(follow, what="the last event", deadline_s=END_DEADLINE_S)
    assert seen == [step["seq"] for step in platform.journal(program_id)]


def test_a_store_that_does_not_answer_for_longer_than_a_lease_interrupts_no_program(platform: Platform) -> None:
    ids = [platform.submit(**SLOW_TOOL), platform.submit(**LONG_TURNS)]
    platform.wait_for_step(ids[0], "tool.started")
    (server,) = platform.processes("valkey-server")
    server.send_signal(signal.SIGSTOP)
    try:
        refused = platform.client.post("/v1/programs", json={"input": "x"}, timeout=60)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "store_unavailable"
        assert refused.headers["retry-after"]
        time.sleep(platform.args["programs"]["lease_s"])
    finally:
        server.send_signal(signal.SIGCONT)
    for program_id in ids:
        program = platform.wait_for_end(program_id)
        assert program["state"] == "completed", program
        assert len(platform.steps(program_id, "program.claimed")) == 1
    assert platform.steps(ids[0], "tool.finished")[0]["outcome"] == "ok"


def test_the_store_killed_while_programs_run_comes_back_with_all_of_them(platform: Platform) -> None:
    ids = [platform.submit(**LONG_TURNS) for _ in range(2)]
    for program_id in ids:
        platform.wait_for_step(program_id, "turn.started")
    (server,) = platform.processes("valkey-server")
    server.send_signal(signal.SIGKILL)
    for program_id in ids:
        program = platform.wait_for_end(program_id)
        assert program["state"] == "completed", program
        assert [step["turn"] for step in platform.steps(program_id, "turn.finished")] == [1]
    assert platform.submit(input="Say hello.", limits={"max_tokens_per_turn": 8})
