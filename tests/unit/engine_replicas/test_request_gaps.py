"""Tool durations measured from the gap between turns."""

from __future__ import annotations

from agent_program.ids import ProgramId, ToolKey
from agent_program.tool_events import SampleSource, ToolOutcome
from agent_program.turn import TurnHints
from engine_replicas.request_gaps import GAP_MAX_S, RequestGaps

P, Q = ProgramId("p"), ProgramId("q")
PYTEST = ToolKey("pytest")


def turn(program_id: ProgramId = P, branch: str = "0", last_tool_s: float | None = None) -> TurnHints:
    return TurnHints(program_id=program_id, branch=branch, last_tool_s=last_tool_s)


def test_the_gap_after_a_tool_call_is_a_sample_of_that_tool() -> None:
    gaps = RequestGaps()
    gaps.turn_closed(P, "0", PYTEST, now_s=10.0)
    sample = gaps.turn_arrived(turn(), now_s=13.5, now_wall_s=1000.0)
    assert sample is not None
    assert (sample.tool, sample.duration_s, sample.at_wall_s) == (PYTEST, 3.5, 1000.0)
    assert (sample.source, sample.outcome) == (SampleSource.REQUEST_GAP, ToolOutcome.OK)


def test_a_gap_counts_once() -> None:
    gaps = RequestGaps()
    gaps.turn_closed(P, "0", PYTEST, now_s=10.0)
    assert gaps.turn_arrived(turn(), 11.0, 0.0) is not None
    assert gaps.turn_arrived(turn(), 12.0, 0.0) is None


def test_nothing_is_learned_after_an_answer() -> None:
    gaps = RequestGaps()
    gaps.turn_closed(P, "0", PYTEST, now_s=1.0)
    gaps.turn_closed(P, "0", None, now_s=2.0)
    assert gaps.turn_arrived(turn(), 9.0, 0.0) is None


def test_exact_times_win_over_the_gap() -> None:
    gaps = RequestGaps()
    gaps.turn_closed(P, "0", PYTEST, now_s=1.0)
    assert gaps.turn_arrived(turn(last_tool_s=0.5), 9.0, 0.0) is None
    gaps.turn_closed(P, "0", PYTEST, now_s=10.0)
    gaps.forget(P)  # tool events come for this program
    assert gaps.turn_arrived(turn(), 11.0, 0.0) is None


def test_branches_and_programs_wait_apart() -> None:
    gaps = RequestGaps()
    gaps.turn_closed(P, "0", PYTEST, 1.0)
    gaps.turn_closed(P, "1", ToolKey("make"), 2.0)
    gaps.turn_closed(Q, "0", ToolKey("git"), 3.0)
    arrived = [gaps.turn_arrived(turn(p, b), 10.0, 0.0) for p, b in [(P, "1"), (Q, "0"), (P, "0")]]
    assert [(s.tool, s.duration_s) for s in arrived if s] == [("make", 8.0), ("git", 7.0), ("pytest", 9.0)]


def test_a_client_that_was_away_for_long_teaches_nothing() -> None:
    gaps = RequestGaps()
    gaps.turn_closed(P, "0", PYTEST, 0.0)
    assert gaps.turn_arrived(turn(), GAP_MAX_S + 1, 0.0) is None


def test_programs_and_branches_are_bounded_and_the_oldest_go() -> None:
    gaps = RequestGaps(programs_max=10, branches_max=3)
    for number in range(100):
        gaps.turn_closed(ProgramId(f"p{number}"), "0", PYTEST, 0.0)
        gaps.turn_closed(Q, f"b{number}", PYTEST, 0.0)
    known = [number for number in range(100) if gaps.turn_arrived(turn(ProgramId(f"p{number}")), 1.0, 0.0)]
    assert known == list(range(91, 100))  # nine, and q
    assert [b for b in range(100) if gaps.turn_arrived(turn(Q, f"b{b}"), 1.0, 0.0)] == [97, 98, 99]
