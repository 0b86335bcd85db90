"""`programs show --explain` for people: why KV was kept or dropped, with its numbers, and where the program is."""

from __future__ import annotations

from typing import Any

from agent_program.ids import ProgramId, ToolKey
from agent_program.tool_events import ToolEventKind, ToolOutcome
from agent_program.turn import TurnHints
from deployments.cli_explain import explanation
from engine_replicas.config import SchedulingSettings
from engine_replicas.policies import new_estimates
from engine_replicas.retention.controller import RetentionController
from engine_replicas.retention.events import FinishedTurn, HeldKv, TurnEnding
from engine_replicas.retention.policy import StaticTtl
from support.tiny_platform import program_object

PYTEST = ToolKey("pytest")


def told(scheduler: dict[str, Any] | None, **found: Any) -> str:
    answer = {"id": "p", "program": program_object("p", state="waiting_tool"), "scheduler": scheduler, **found}
    return "\n".join(line.plain for line in explanation(answer))


def scheduler_of(*decisions: dict[str, Any], **changes: Any) -> dict[str, Any]:
    known = {"replica": "r2", "is_known": True, "is_over": False, "age_s": 12.0, "turns_finished": 1, "live_turns": 0}
    return {**known, "lease_outcomes": {"reused": 1}, "leases": [], "decisions": list(decisions), **changes}


def real_scheduler() -> RetentionController:
    settings = SchedulingSettings()
    estimates = new_estimates(settings, step_tokens_max=512, kv_tokens_total=1600)
    return RetentionController(settings=settings, policy=StaticTtl(10.0), estimates=estimates, blocks_total=100)


def test_the_account_of_a_real_scheduler_reads_as_what_happened() -> None:
    scheduler = real_scheduler()
    hints = TurnHints(program_id=ProgramId("p"))
    scheduler.turn_arrived("t1", hints, 0.0)
    scheduler.turn_scheduled("t1", 0, 0.5)
    held = HeldKv(blocks=frozenset(range(10)), tokens=160)
    finished = FinishedTurn(turn_id="t1", ending=TurnEnding.ENDED, context_tokens=160, collect=lambda: held)
    scheduler.turn_finished(finished, 1.0)
    scheduler.arm(ProgramId("p"), "0", PYTEST, False, 1.1)
    scheduler.tool_event(ProgramId("p"), ToolEventKind.FINISHED, PYTEST, 2.0, ToolOutcome.OK, 3.1)
    waiting = told({"replica": "r2", **scheduler.explain(ProgramId("p"), 4.0)})
    assert "is on replica r2, first seen there 4.00 s ago" in waiting
    assert "a lease keeps 160 tokens (10 blocks), armed, for pytest" in waiting
    assert "turn ended with 160 tokens: KV kept" in waiting
    assert "lease armed for pytest: kept for up to 10.0 s (a fixed time)" in waiting
    assert "pytest finished after 2.00 s: the next turn is expected" in waiting

    scheduler.turn_arrived("t2", hints, 4.0)
    scheduler.turn_scheduled("t2", 160, 4.5)
    running = told({"replica": "r2", **scheduler.explain(ProgramId("p"), 5.0)})
    assert "turn waited 0.50 s (with a lease): 160 of 160 tokens reused" in running
    assert "lease ended after 3.50 s: reused, the next turn found its KV" in running
    assert "no KV of it is retained" in running


def test_what_was_dropped_says_why_with_the_numbers_of_the_decision() -> None:
    dropped = {
        "event": "turn_finished",
        "age_s": 3.0,
        "lease": None,
        "why_not": "not_worth_it",
        "context_tokens": 2048,
        "decision": "tool_history",
        "benefit_s": 0.4,
        "return_probability": 0.25,
        "samples": 120,
    }
    line = told(scheduler_of(dropped)).splitlines()[-1]
    assert "turn ended with 2048 tokens: KV dropped, keeping it was not worth the memory" in line
    assert "from this tool's times; a hit would save 0.40 s; chance of return in time 0.25; tool times seen 120" in line


def test_words_of_a_newer_server_are_shown_as_they_are() -> None:
    ended = {"event": "lease_ended", "age_s": 1.0, "reason": "moved_away", "held_s": 2.0}
    new = {"event": "migrated", "age_s": 1.0, "gain_s": 1.5}
    text = told(scheduler_of(ended, new))
    assert "lease ended after 2.00 s: moved away" in text
    assert "migrated: gain_s 1.50" in text


def test_replicas_of_the_past_and_of_programs_that_are_over_are_told_apart() -> None:
    text = told(scheduler_of(is_over=True), earlier_replicas=[scheduler_of(replica="r1")])
    assert "was on replica r2" in text
    assert "was on replica r1" in text
    assert "no KV of it is retained" not in text


def test_a_program_that_no_replica_knows_and_one_that_its_client_runs() -> None:
    assert "no replica knows it" in told(None)
    assert "run by its client" in told(scheduler_of(), program=None)
