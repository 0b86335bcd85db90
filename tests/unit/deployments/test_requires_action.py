"""A program that needs its client: it asks once a turn, is held by no runner meanwhile, and goes on with the answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agent_program.clock import SystemClock
from agent_program.states import ProgramState
from agent_program.tool_events import ToolEventKind, ToolOutcome
from deployments.memory_clients import ScriptedEngine, ScriptedTools, answer, tool_calls
from deployments.memory_journal import MemoryJournal
from deployments.ports import ReleasedProgram
from deployments.program_settings import ProgramSettings
from deployments.runner import ProgramRunner
from support.api import ApiBench, error_of
from support.programs import Bench, limits, spec
from support.waiting import wait_for_async

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
GUARDED: dict[str, Any] = {"type": "function", "function": {"name": "shell"}, "require_approval": "always"}
ASKS = tool_calls(("w1", "weather", {"city": "Rome"}), ("s1", "shell", {"command": "date"}))
RM = tool_calls(("s1", "shell", {"command": "rm -r ."}))


def bench(*tools: Any, turns: Any, outputs: Any = None, **changes: Any) -> Bench:
    return Bench(
        spec(id="p", tools=list(tools), **changes),
        engine=ScriptedEngine(turns),
        tools=ScriptedTools({"shell": outputs or []}),
    )


async def test_the_platforms_calls_run_first_and_the_clients_are_asked_for() -> None:
    world = bench(WEATHER, "shell", turns=[ASKS], outputs=["Monday"])
    await world.run()
    record = await world.journal.get("p")
    assert record.state is ProgramState.REQUIRES_ACTION
    assert record.required_action is not None
    (call,) = record.required_action.calls
    assert (call.call_id, call.kind, call.tool) == ("w1", "output", "weather")
    assert json.loads(call.arguments) == {"city": "Rome"}
    assert record.required_action.expires_at == world.clock.wall_s() + 600
    assert (await world.kinds())[-3:] == ["tool.finished", "tools.finished", "action.required"]
    assert [tool.call_id for tool in world.tools.calls] == ["s1"], "the client's tool is not the platform's to run"
    # The scheduler waits for the client's tool as for any other, and keeps the KV by that tool's history.
    assert (world.engine.events[-1].kind, world.engine.events[-1].tool) == (ToolEventKind.STARTED, "weather")
    assert world.engine.released == []


async def test_a_waiting_program_is_nobodys_until_it_is_answered_or_expires() -> None:
    world = bench(WEATHER, turns=[tool_calls(("w1", "weather", {"city": "Rome"}))])
    await world.run()
    assert await world.journal.claim("another", lease_s=10) is None
    world.clock.advance(601)  # type: ignore[attr-defined]
    _, loop = await world.claim("another")
    await loop.run()
    record = await world.journal.get("p")
    assert (record.state, record.end_reason) == (ProgramState.EXPIRED, "action_expired")
    assert record.required_action is None
    assert world.engine.released == ["p"]


async def test_a_runner_that_comes_too_early_puts_the_program_down_again() -> None:
    world = bench(WEATHER, turns=[tool_calls(("w1", "weather", {"city": "Rome"}))])
    await world.submit()
    claim, loop = await world.claim()
    await loop.run()
    await world.journal.hand_back(claim)  # as when its own putting down was lost with it
    _, again = await world.claim("another")
    await again.run()
    assert (await world.journal.get("p")).state is ProgramState.REQUIRES_ACTION
    assert await world.journal.claim("third", lease_s=10) is None


async def test_the_time_limit_ends_a_waiting_program_too() -> None:
    asks = tool_calls(("w1", "weather", {"city": "Rome"}))
    world = bench(WEATHER, turns=[asks], limits=limits(max_seconds=60.0))
    await world.run()
    world.clock.advance(61)  # type: ignore[attr-defined]
    _, loop = await world.claim("another")
    await loop.run()
    assert (await world.journal.get("p")).end_reason == "max_seconds"


async def test_nobody_is_asked_for_an_output_that_no_turn_would_read() -> None:
    asks = tool_calls(("w1", "weather", {"city": "Rome"}), ("s1", "shell", {"command": "date"}))
    world = bench(WEATHER, "shell", turns=[asks], outputs=["Monday"], limits=limits(max_turns=1))
    await world.run()
    record = await world.journal.get("p")
    assert (record.state, record.end_reason) == (ProgramState.COMPLETED, "max_turns")
    assert [tool.call_id for tool in world.tools.calls] == ["s1"], (
        "what the platform runs still runs: it may have an effect"
    )


async def test_consent_is_asked_for_in_the_last_turn_too() -> None:
    world = bench(GUARDED, turns=[RM], limits=limits(max_turns=1))
    await world.run()
    assert (await world.journal.get("p")).state is ProgramState.REQUIRES_ACTION


async def test_arguments_that_do_not_fit_go_back_to_the_model_and_not_to_the_client() -> None:
    world = bench(WEATHER, turns=[tool_calls(("w1", "weather", {"town": "Rome"})), answer("I give up.")])
    await world.run()
    assert (await world.journal.get("p")).state is ProgramState.COMPLETED
    (result,) = await world.data("tool.finished")
    assert result["outcome"] == ToolOutcome.ERROR
    assert "city" in result["output"]


async def test_a_guarded_call_with_wrong_arguments_does_not_run_unseen() -> None:
    world = bench(GUARDED, turns=[tool_calls(("s1", "shell", {"cmd": "rm -r ."})), answer("I give up.")])
    await world.run()
    assert world.tools.calls == []


# Answers, over HTTP


class Served(ApiBench):
    """An API with one program that waits for its client."""

    def __init__(
        self, *tools: Any, turns: Any, outputs: Any = None, released_as: ReleasedProgram | None = None
    ) -> None:
        super().__init__()
        self.runs_on = ScriptedEngine(turns, released_as=released_as)
        self.sandbox = ScriptedTools({"shell": outputs or []})
        self.submission = {"program_id": "p", "input": "Go.", "tools": list(tools)}

    async def run(self) -> None:
        await self.run_one(self.runs_on, self.sandbox)

    async def kinds(self) -> list[str]:
        return [step.kind.value for step in await self.journal.steps("p")]


def outputs(**by_call: str) -> dict[str, Any]:
    return {"tool_outputs": [{"call_id": call_id, "output": text} for call_id, text in by_call.items()]}


async def test_outputs_let_the_program_go_on_with_them() -> None:
    served = Served(WEATHER, "shell", turns=[ASKS, answer("It rains.")], outputs=["Monday"])
    async with served.client() as client:
        assert (await client.post("/v1/programs", json=served.submission)).status_code == 202
        await served.run()
        waiting = (await client.get("/v1/programs/p")).json()
        assert waiting["required_action"]["calls"][0]["call_id"] == "w1"
        assert (await client.get("/v1/programs?state=requires_action")).json()["data"][0]["id"] == "p"
        served.clock.advance(2.5)
        answered = await client.post("/v1/programs/p/tool_outputs", json=outputs(w1="rain"))
        assert (answered.status_code, answered.json()["state"]) == (200, "running")
        assert answered.json()["required_action"] is None
        await served.run()
        program = (await client.get("/v1/programs/p")).json()
    assert (program["state"], program["output"]) == ("completed", "It rains.")
    assert (program["tool_calls"], program["tool_seconds"]) == (2, 2.5)
    # In the order of the calls, whoever ran them.
    assert [message["content"] for message in served.runs_on.bodies[1]["messages"][-2:]] == ["rain", "Monday"]
    # The scheduler hears of the wait as of a tool of the platform's, by the event and by the next turn's hints.
    (event,) = served.engine.events
    assert (event.kind, event.tool, event.elapsed_s) == (ToolEventKind.FINISHED, "weather", 2.5)
    assert (served.runs_on.hints[1].last_tool, served.runs_on.hints[1].last_tool_s) == ("weather", 2.5)


async def test_outputs_may_come_one_by_one_and_more_than_once() -> None:
    both = tool_calls(("w1", "weather", {"city": "Rome"}), ("w2", "weather", {"city": "Oslo"}))
    served = Served(WEATHER, turns=[both, answer("Done.")])
    async with served.client() as client:
        await client.post("/v1/programs", json=served.submission)
        await served.run()
        first = (await client.post("/v1/programs/p/tool_outputs", json=outputs(w2="snow"))).json()
        assert first["state"] == "requires_action"
        assert [call["call_id"] for call in first["required_action"]["calls"]] == ["w1"]
        seen = await served.kinds()
        again = await client.post("/v1/programs/p/tool_outputs", json=outputs(w2="snow"))
        assert (again.status_code, await served.kinds()) == (200, seen)
        other = await client.post("/v1/programs/p/tool_outputs", json=outputs(w2="sun"))
        assert (other.status_code, error_of(other)["code"]) == (409, "action_conflict")
        assert await served.kinds() == seen
        last = await client.post("/v1/programs/p/tool_outputs", json=outputs(w1="rain", w2="snow"))
        assert last.json()["state"] == "running"
        await served.run()
        after = await client.post("/v1/programs/p/tool_outputs", json=outputs(w1="rain"))
        assert (after.status_code, after.json()["state"]) == (200, "completed")


async def test_leases_are_counted_once_over_a_clients_wait() -> None:
    def asks(call_id: str, **outcomes: int) -> Any:
        lease = {"ttl_s": 1.0, "blocks": 3, "reason": "cold_start", "outcomes": outcomes}
        return tool_calls((call_id, "weather", {"city": "Rome"}), lease=lease)

    over = ReleasedProgram(replica="replica-1", lease_outcomes={"released": 1, "reused": 1})
    done = answer("Done.", lease={"outcomes": over.lease_outcomes})
    turns = [asks("w1", released=1), asks("w2", released=1, reused=1), done]
    served = Served(WEATHER, turns=turns, released_as=over)
    async with served.client() as client:
        await client.post("/v1/programs", json=served.submission)
        for call_id in ("w1", "w2"):
            await served.run()
            await client.post("/v1/programs/p/tool_outputs", json=outputs(**{call_id: "rain"}))
        await served.run()
        assert (await client.get("/v1/programs/p")).json()["leases"] == {"released": 1, "reused": 1}


async def test_a_failed_client_tool_is_an_error_for_the_model() -> None:
    served = Served(WEATHER, turns=[tool_calls(("w1", "weather", {"city": "Rome"}))])
    async with served.client() as client:
        await client.post("/v1/programs", json=served.submission)
        await served.run()
        body = {"tool_outputs": [{"tool_call_id": "w1", "output": "no network", "is_error": True, "duration_s": 0.5}]}
        assert (await client.post("/v1/programs/p/tool_outputs", json=body)).status_code == 200
    (result,) = [step.data for step in await served.journal.steps("p") if step.kind == "tool.finished"]
    assert (result["outcome"], result["output"], result["duration_s"]) == ("error", "no network", 0.5)


async def test_consent_lets_the_call_run_and_its_kv_is_not_kept_for_a_person() -> None:
    released = ReleasedProgram(replica="replica-1", lease_outcomes={"released": 1})
    served = Served(GUARDED, turns=[RM, answer("Gone.")], outputs=["ok"], released_as=released)
    async with served.client() as client:
        await client.post("/v1/programs", json=served.submission)
        await served.run()
        assert served.sandbox.calls == []
        assert served.runs_on.released == ["p"]
        waiting = (await client.get("/v1/programs/p")).json()
        assert (waiting["required_action"]["calls"][0]["kind"], waiting["leases"]) == ("approval", {"released": 1})
        body = {"tool_outputs": [{"call_id": "s1", "approve": True}]}
        assert (await client.post("/v1/programs/p/tool_outputs", json=body)).json()["state"] == "running"
        await served.run()
        assert (await client.get("/v1/programs/p")).json()["output"] == "Gone."
    assert [call.call_id for call in served.sandbox.calls] == ["s1"]
    assert served.engine.events == [], "a person's time is no tool's time"


async def test_a_refusal_is_told_to_the_model_with_its_reason() -> None:
    served = Served(GUARDED, turns=[RM, answer("I will not.")])
    async with served.client() as client:
        await client.post("/v1/programs", json=served.submission)
        await served.run()
        body = {"tool_outputs": [{"call_id": "s1", "approve": False, "reason": "too dangerous"}]}
        await client.post("/v1/programs/p/tool_outputs", json=body)
        await served.run()
    assert served.sandbox.calls == []
    assert served.runs_on.bodies[1]["messages"][-1]["content"] == "The call was not allowed to run: too dangerous"


async def test_a_waiting_program_can_be_cancelled() -> None:
    served = Served(WEATHER, turns=[tool_calls(("w1", "weather", {"city": "Rome"}))])
    async with served.client() as client:
        await client.post("/v1/programs", json=served.submission)
        await served.run()
        assert (await client.post("/v1/programs/p/cancel")).json()["cancel_requested"]
        claim = await served.journal.claim("runner", lease_s=10)
        assert claim is not None, "a runner takes it at once"


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        ({}, 400, "invalid_request", "tool_outputs"),
        ({"tool_outputs": []}, 400, "invalid_request", "tool_outputs"),
        ({"tool_outputs": [{"call_id": "w1"}]}, 400, "invalid_request", "tool_outputs.0"),
        ({"tool_outputs": [{"call_id": "w1", "output": "x", "approve": True}]}, 400, "invalid_request", None),
        ({"tool_outputs": [{"call_id": "w1", "output": 7}]}, 400, "invalid_request", "tool_outputs.0.output"),
        ({"tool_outputs": [{"call_id": "w1", "output": "x", "more": 1}]}, 400, "invalid_request", None),
        ({"tool_outputs": [{"call_id": "w1", "output": "x"}] * 2}, 400, "invalid_request", "tool_outputs"),
        ({"tool_outputs": [{"call_id": "w1", "approve": True}]}, 400, "invalid_request", "tool_outputs"),
        ({"tool_outputs": [{"call_id": "zz", "output": "x"}]}, 404, "action_not_found", "call_id"),
    ],
)
async def test_a_bad_answer_is_refused_and_changes_nothing(
    body: Any, status: int, code: str, param: str | None
) -> None:
    served = Served(WEATHER, turns=[tool_calls(("w1", "weather", {"city": "Rome"}))])
    async with served.client() as client:
        await client.post("/v1/programs", json=served.submission)
        await served.run()
        before = await served.kinds()
        response = await client.post("/v1/programs/p/tool_outputs", json=body)
    assert (response.status_code, error_of(response)["code"]) == (status, code)
    assert param is None or error_of(response)["param"] == param
    assert await served.kinds() == before


async def test_answers_to_a_program_that_asked_for_nothing_are_refused() -> None:
    async with (served := Served("shell", turns=[])).client() as client:
        await client.post("/v1/programs", json=served.submission)
        response = await client.post("/v1/programs/p/tool_outputs", json=outputs(w1="x"))
        missing = await client.post("/v1/programs/nobody/tool_outputs", json=outputs(w1="x"))
    assert (response.status_code, missing.status_code) == (404, 404)


async def test_answers_after_the_end_are_refused() -> None:
    served = Served(WEATHER, turns=[tool_calls(("w1", "weather", {"city": "Rome"}))])
    async with served.client() as client:
        await client.post("/v1/programs", json=served.submission)
        await served.run()
        served.clock.advance(3601)
        await served.run()
        late = await client.post("/v1/programs/p/tool_outputs", json=outputs(w1="x"))
    assert (late.status_code, error_of(late)["code"]) == (409, "illegal_state")


# Runners


async def test_a_waiting_program_takes_no_runners_room_and_outlives_its_runner() -> None:
    journal = MemoryJournal(SystemClock())
    engine = ScriptedEngine([tool_calls(("w1", "weather", {"city": "Rome"})), answer("other"), answer("It rains.")])

    def runner() -> ProgramRunner:
        settings = ProgramSettings(lease_s=0.3, poll_s=0.05, retry_s=0.01, running_per_runner_max=1)
        return ProgramRunner(
            journal=journal, engine=engine, tools=ScriptedTools(), clock=SystemClock(), settings=settings
        )

    async def is_in(program_id: str, state: ProgramState) -> bool:
        return (await journal.get(program_id)).state is state

    now = SystemClock().wall_s()
    first = runner()
    first.start()
    await journal.create(spec(id="p", tools=[WEATHER], created_at=now), queued_max=10)
    await wait_for_async(lambda: is_in("p", ProgramState.REQUIRES_ACTION), what="the program to ask")
    await journal.create(spec(id="q", created_at=now), queued_max=10)
    await wait_for_async(lambda: is_in("q", ProgramState.COMPLETED), what="another program to use the room")
    await first.close()

    served = ApiBench(journal=journal)
    second = runner()
    second.start()
    try:
        async with served.client() as client:
            assert (await client.post("/v1/programs/p/tool_outputs", json=outputs(w1="rain"))).status_code == 200
        await wait_for_async(lambda: is_in("p", ProgramState.COMPLETED), what="the program to end")
    finally:
        await second.close()
    assert [step.data["resumed"] for step in await journal.steps("p") if step.kind == "program.claimed"] == [
        False,
        False,
    ]
