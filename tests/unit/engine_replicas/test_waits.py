"""How long programs wait for tools: each wait is counted once, by the best measure there is."""

from agent_program.ids import ProgramId, TenantId, ToolKey
from agent_program.tool_events import ToolOutcome
from agent_program.turn import TurnHints
from engine_replicas.retention.programs import Branch, Program
from engine_replicas.retention.tool_latency import ToolLatencyView
from engine_replicas.retention.waits import GAP_MAX_S, WaitCounter

PYTEST, GIT = ToolKey("pytest"), ToolKey("git")


class Waits:
    """One program that waits for pytest since second 100."""

    def __init__(self) -> None:
        self.view = ToolLatencyView(window=100, tools_max=100)
        self.counter = WaitCounter(self.view)
        self.branch = Branch(finished_s=100.0, context_tokens=10, tool=PYTEST)
        self.program = Program(
            program_id=ProgramId("a"), tenant_id=TenantId("t"), arrived_s=0.0, active_s=0.0, branches={"0": self.branch}
        )

    def turn_arrives(self, now_s: float, **hints: object) -> None:
        known = TurnHints(program_id=ProgramId("a"), **hints)  # type: ignore[arg-type]
        self.counter.next_turn_arrived(self.branch, known, now_s)

    def finish(self, tool: ToolKey, elapsed_s: float, outcome: ToolOutcome = ToolOutcome.OK) -> bool:
        return self.counter.tool_finished(self.program, tool, elapsed_s, outcome)

    def of(self, tool: ToolKey) -> list[float]:
        return [duration_s for duration_s, _ in self.view.of_tool(tool).pairs]

    @property
    def all(self) -> list[float]:
        return [duration_s for duration_s, _ in self.view.all_tools().pairs]


def test_where_nothing_else_is_known_the_gap_between_turns_is_the_wait() -> None:
    waits = Waits()
    waits.turn_arrives(103.5)
    assert (waits.of(PYTEST), waits.all) == ([3.5], [3.5])


def test_the_exact_time_in_the_hints_is_better() -> None:
    waits = Waits()
    waits.turn_arrives(103.5, last_tool=GIT, last_tool_s=3.0)
    assert (waits.of(PYTEST), waits.of(GIT), waits.all) == ([], [3.0], [3.0])


def test_a_tool_event_is_better_still_and_the_gap_is_not_counted_again() -> None:
    waits = Waits()
    waits.counter.tool_started(waits.program)
    assert waits.finish(PYTEST, 3.25)
    waits.turn_arrives(103.5, last_tool=PYTEST, last_tool_s=3.25)
    assert (waits.of(PYTEST), waits.all) == ([3.25], [3.25])


def test_a_second_turn_after_the_same_wait_does_not_count_it_again() -> None:
    waits = Waits()
    waits.turn_arrives(103.5)
    waits.turn_arrives(104.0)
    assert waits.all == [3.5]


def test_a_wait_for_an_unknown_tool_counts_for_all_tools() -> None:
    waits = Waits()
    waits.branch.tool = None
    waits.turn_arrives(101.0)
    assert (waits.all, waits.view.counts()["tools"]) == ([1.0], 0)


def test_parallel_calls_are_one_wait_as_long_as_the_longest() -> None:
    waits = Waits()
    for _ in range(2):
        waits.counter.tool_started(waits.program)
    assert not waits.finish(GIT, 0.5)
    assert waits.finish(PYTEST, 4.0)
    assert (waits.of(GIT), waits.of(PYTEST), waits.of(ToolKey("git+pytest"))) == ([0.5], [4.0], [4.0])
    assert waits.all == [4.0]


def test_parallel_calls_of_one_tool_count_once_as_a_wait() -> None:
    waits = Waits()
    for _ in range(2):
        waits.counter.tool_started(waits.program)
    waits.finish(PYTEST, 1.0)
    waits.finish(PYTEST, 4.0)
    assert (waits.of(PYTEST), waits.all) == ([4.0], [4.0])


def test_a_finish_without_a_start_is_the_last_one() -> None:
    assert Waits().finish(PYTEST, 1.0)


def test_a_timeout_is_a_wait_and_a_cancelled_call_is_none() -> None:
    waits = Waits()
    waits.finish(PYTEST, 30.0, ToolOutcome.TIMEOUT)
    waits.finish(GIT, 2.0, ToolOutcome.CANCELLED)
    assert waits.all == [30.0]


def test_a_client_that_went_away_for_long_is_no_tool() -> None:
    waits = Waits()
    waits.turn_arrives(100.0 + GAP_MAX_S + 1)
    assert waits.all == []


def test_events_without_end_are_bounded() -> None:
    waits = Waits()
    for _ in range(1000):
        waits.counter.tool_started(waits.program)
    assert waits.program.tools.running <= 64
