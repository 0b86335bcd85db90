"""Beside programs: client-run tools, the tool catalog, health, metrics, and errors of every kind."""

from __future__ import annotations

from typing import Any

import pytest

from agent_program.errors import StoreUnavailable
from agent_program.ids import ToolKey
from agent_program.tool_events import LatencySample, SampleSource, ToolEventKind, ToolOutcome
from deployments.fleet import PartAnswer
from deployments.memory_clients import ScriptedEngine, answer
from deployments.memory_journal import MemoryJournal
from support.api import ApiBench, error_of
from tool_runtime.registry import BUILTIN_TOOLS

SUBMISSION: dict[str, Any] = {"input": "List the files.", "tools": ["shell"]}


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
    bench.explained("ours", r1={"is_known": False}, r2={"is_known": False})
    moved = {"is_known": True, "is_over": False}
    bench.explained("theirs", r1={**moved, "age_s": 90.0}, r2={**moved, "age_s": 10.0})
    async with bench.client() as client:
        await client.post("/v1/programs", json={**SUBMISSION, "program_id": "ours"})
        ours = (await client.get("/v1/programs/ours/explain")).json()
        theirs = (await client.get("/v1/programs/theirs/explain")).json()
    assert (ours["program"]["id"], ours["scheduler"]) == ("ours", None)
    assert theirs["program"] is None
    assert theirs["scheduler"]["replica"] == "r2"
    assert [one["replica"] for one in theirs["earlier_replicas"]] == ["r1"]


async def test_deleting_a_client_run_program_releases_its_kv() -> None:
    bench = ApiBench()
    bench.explained("theirs", r1={"is_known": True, "is_over": False, "age_s": 1.0})
    async with bench.client() as client:
        assert (await client.delete("/v1/programs/theirs")).json()["deleted"]
    assert bench.engine.released == ["theirs"]


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
        every = (await client.get("/v1/tools/latency")).json()
    (listed,) = every["data"]
    assert listed.items() <= measured.items()
    assert (measured["count"], measured["p50_s"]) == (1, 3.0)
    assert (unmeasured["count"], unmeasured["p50_s"]) == (0, None)
    assert unknown.status_code == 404
    assert error_of(unknown)["code"] == "tool_not_found"


async def test_ready_names_the_part_that_is_not() -> None:
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
        "reason": "0 of 1 replica answers, for 0 s now: no sandbox holds here",
        "replicas_ready": 0,
        "replicas_wanted": 1,
        "incomplete_for_s": 0.0,
        "remarks": [],
    }
    assert unready.json()["parts"]["engine"]["ready"]
    assert unready.json()["reason"] == "tools: 0 of 1 replica answers, for 0 s now: no sandbox holds here"


async def test_a_part_with_a_replica_missing_is_ready_and_says_how_many_and_since_when() -> None:
    bench = ApiBench()
    both, one = bench.fleet.answers["engine", "probe"], PartAnswer(answers=("r1",), faults=())

    async def engine() -> dict[str, Any]:
        answer = await client.get("/readyz")
        assert answer.status_code == 200
        part: dict[str, Any] = answer.json()["parts"]["engine"]
        return part

    async with bench.client() as client:
        assert (await engine())["reason"] is None
        bench.fleet.answers["engine", "probe"] = one
        await engine()
        bench.clock.advance(42)
        missing = await engine()
        assert missing["reason"] == "1 of 2 replicas answer, for 42 s now: a replica is starting or being replaced"
        assert (missing["ready"], missing["replicas_wanted"], missing["incomplete_for_s"]) == (True, 2, 42.0)
        bench.fleet.answers["engine", "probe"] = both
        assert (await engine())["incomplete_for_s"] is None
        # The next time counts from its own beginning.
        bench.fleet.answers["engine", "probe"] = one
        assert (await engine())["incomplete_for_s"] == 0.0


async def test_ready_tells_once_what_its_replicas_say_of_how_they_work() -> None:
    bench = ApiBench()
    remarks = ("bubblewrap: rlimits and a watchdog", "bubblewrap: rlimits and a watchdog", "landlock: cgroups")
    answers = tuple((f"t{n}", remark) for n, remark in enumerate(remarks))
    bench.fleet.answers["tools", "probe"] = PartAnswer(answers=answers, faults=())
    async with bench.client() as client:
        parts = (await client.get("/readyz")).json()["parts"]
    assert parts["tools"]["remarks"] == ["bubblewrap: rlimits and a watchdog", "landlock: cgroups"]
    assert parts["tools"]["ready"]
    assert parts["engine"]["remarks"] == []


async def test_metrics_join_replicas_under_one_family_and_count_programs() -> None:
    bench = ApiBench()
    async with bench.client() as client:
        await client.post("/v1/programs", json={**SUBMISSION, "program_id": "a"})
        await bench.run_one(ScriptedEngine([answer("done", prompt_tokens=100, cached_tokens=64)]))
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
