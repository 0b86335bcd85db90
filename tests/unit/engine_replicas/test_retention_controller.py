"""A turn's way through the engine, and what follows for its KV."""

import math
from collections.abc import Callable
from typing import Any

import pytest

from agent_program.errors import InvalidRequest
from agent_program.ids import ProgramId, ToolKey
from agent_program.tool_events import ToolEventKind, ToolOutcome
from agent_program.turn import TurnHints
from engine_replicas.config import SchedulingSettings
from engine_replicas.retention.controller import RetentionController
from engine_replicas.retention.decode_cost import DecodeCost
from engine_replicas.retention.eta import EtaEstimator
from engine_replicas.retention.events import Armed, Changes, FinishedTurn, HeldKv, TurnEnding
from engine_replicas.retention.lease import LeaseEndReason, LeaseState
from engine_replicas.retention.policy import (
    DecisionReason,
    EndedTurn,
    EndOfTurn,
    Estimates,
    RetentionDecision,
    RetentionPolicy,
    StaticTtl,
)
from engine_replicas.retention.prefill_cost import PrefillCost
from engine_replicas.retention.queueing_delay import QueueingDelay
from engine_replicas.retention.reload_cost import ReloadCost
from engine_replicas.retention.tool_latency import ToolLatencyView

A = ProgramId("a")
PYTEST, GIT = ToolKey("pytest"), ToolKey("git")


class ByTool:
    """A policy that knows what each tool is worth."""

    depends_on_tool = True

    def __init__(self, **ttl_s: float) -> None:
        self._ttl_s = ttl_s

    def decide(self, turn: EndedTurn) -> RetentionDecision:
        return RetentionDecision(ttl_s=self._ttl_s.get(turn.tool or "", 0.0), reason=DecisionReason.TOOL_HISTORY)


class Engine:
    """A controller, and an adapter that remembers which leases it holds references for."""

    def __init__(self, policy: RetentionPolicy | None = None, **settings: Any) -> None:
        is_caching = settings.pop("is_caching", True)
        self.estimates = Estimates(
            tools=ToolLatencyView(window=100, tools_max=100),
            queueing_delay=QueueingDelay(window=10),
            eta=EtaEstimator(window=100, programs_min=2),
            prefill=(prefill := PrefillCost(chunk_tokens_max=512)),
            reload=ReloadCost(prefill, kv_tokens_total=100_000),
            decode=DecodeCost(),
        )
        self.controller = RetentionController(
            settings=SchedulingSettings(**settings),
            policy=policy or StaticTtl(10.0),
            estimates=self.estimates,
            blocks_total=100,
            is_caching=is_caching,
        )
        self.held: set[int] = set()
        self.collected = 0

    def arrive(self, turn: str, now_s: float, *, program: str = "a", stops: bool = False, **hints: Any) -> None:
        known = TurnHints(program_id=ProgramId(program), **hints)
        self.controller.turn_arrived(turn, known, now_s, has_stop_strings=stops)

    def schedule(self, turn: str, now_s: float, *, hits: int = 0) -> list[LeaseEndReason]:
        return self._let_go(self.controller.turn_scheduled(turn, hits, now_s))

    def finish(
        self, turn: str, now_s: float, *, ending: TurnEnding = TurnEnding.ENDED, tokens: int = 160, first_block: int = 0
    ) -> Changes:
        def collect() -> HeldKv:
            self.collected += 1
            blocks = range(first_block, first_block + tokens // 16)
            return HeldKv(blocks=frozenset(blocks), tokens=tokens // 16 * 16)

        changes = self.controller.turn_finished(
            FinishedTurn(turn_id=turn, ending=ending, context_tokens=tokens, collect=collect), now_s
        )
        if changes.begun is not None:
            self.held.add(changes.begun.lease_id)
        self._let_go(changes.ended)
        return changes

    def turn(self, turn: str, now_s: float, **options: Any) -> Changes:
        """A whole turn at one moment."""
        hints = {key: value for key, value in options.items() if key not in ("ending", "tokens", "first_block")}
        self.arrive(turn, now_s, **hints)
        self.schedule(turn, now_s)
        return self.finish(turn, now_s, **{key: value for key, value in options.items() if key not in hints})

    def arm(self, now_s: float, tool: ToolKey | None, *, is_last_turn: bool = False, branch: str = "0") -> Armed:
        armed = self.controller.arm(A, branch, tool, is_last_turn, now_s)
        self._let_go(armed.ended)
        return armed

    def tool(self, kind: ToolEventKind, now_s: float, elapsed_s: float = 0.0, tool: ToolKey = PYTEST) -> None:
        outcome = ToolOutcome.OK if kind is ToolEventKind.FINISHED else None
        self.controller.tool_event(A, kind, tool, elapsed_s, outcome, now_s)

    def expire(self, now_s: float) -> list[LeaseEndReason]:
        return self._let_go(self.controller.expire(now_s))

    def _let_go(self, ended: tuple[Any, ...]) -> list[LeaseEndReason]:
        for end in ended:
            self.held.remove(end.lease.lease_id)
        return [end.reason for end in ended]

    @property
    def leases(self) -> dict[str, int]:
        counts: dict[str, int] = self.controller.stats()["leases"]
        return {outcome: count for outcome, count in counts.items() if count}

    def decisions(self, now_s: float = 0.0) -> list[dict[str, Any]]:
        decisions: list[dict[str, Any]] = self.controller.explain(A, now_s)["decisions"]
        return decisions


# --- one program -------------------------------------------------------------------------------------------------------


def test_a_turns_kv_is_leased_and_its_next_turn_reuses_it() -> None:
    engine = Engine()
    assert engine.turn("t1", 0.0).begun is not None
    engine.arrive("t2", 3.0)
    assert engine.schedule("t2", 4.0, hits=160) == [LeaseEndReason.NEXT_TURN_SCHEDULED]
    assert (engine.leases, engine.held) == ({"reused": 1}, set())


def test_what_the_next_turn_found_and_what_it_computed_again_is_counted() -> None:
    engine = Engine()
    engine.turn("t1", 0.0, tokens=170)
    engine.arrive("t2", 3.0)
    engine.schedule("t2", 4.0, hits=160)
    stats = engine.controller.stats()
    assert (stats["reused_tokens"], stats["recomputed_tokens"]) == (160, 10)


def test_a_hit_beyond_the_programs_own_context_is_no_reuse() -> None:
    engine = Engine()
    engine.turn("t1", 0.0, tokens=160)
    engine.arrive("t2", 3.0)
    engine.schedule("t2", 4.0, hits=500)
    assert engine.controller.stats()["reused_tokens"] == 160


def test_stock_retention_never_asks_for_blocks() -> None:
    engine = Engine(EndOfTurn())
    for ending in (TurnEnding.ENDED, TurnEnding.MAYBE_ENDED):
        assert engine.turn(f"t-{ending}", 0.0, ending=ending).begun is None
    assert engine.arm(0.1, PYTEST).ttl_s == 0.0
    assert (engine.collected, engine.controller.has_leases) == (0, False)


def test_the_last_turn_leaves_nothing_and_the_program_is_finished() -> None:
    engine = Engine()
    engine.turn("t1", 0.0)
    assert engine.turn("t2", 1.0, is_last_turn=True).begun is None
    assert engine.held == set()
    assert engine.controller.stats()["programs"] == 0


def test_a_cut_turn_leaves_nothing() -> None:
    engine = Engine()
    assert engine.turn("t1", 0.0, ending=TurnEnding.CUT).begun is None


def test_a_turn_cut_in_the_queue_leaves_its_lease_for_a_retry() -> None:
    engine = Engine()
    engine.turn("t1", 0.0)
    engine.arrive("t2", 1.0)
    engine.finish("t2", 2.0, ending=TurnEnding.CUT)
    engine.arrive("t3", 3.0)
    assert engine.schedule("t3", 4.0) == [LeaseEndReason.NEXT_TURN_SCHEDULED]


def test_without_prefix_caching_nothing_is_retained() -> None:
    assert Engine(is_caching=False).turn("t1", 0.0).begun is None


def test_while_paused_nothing_is_retained_and_what_was_is_released() -> None:
    engine = Engine()
    engine.turn("t1", 0.0)
    engine._let_go(engine.controller.pause(True, 1.0))
    assert engine.turn("t2", 2.0, first_block=20).begun is None
    engine.controller.pause(False, 3.0)
    assert engine.turn("t3", 4.0, first_block=40).begun is not None
    assert engine.leases == {"released": 1}


def test_no_lease_is_longer_than_the_longest() -> None:
    lease = Engine(StaticTtl(1000.0), ttl_max_s=30.0).turn("t1", 0.0).begun
    assert lease is not None
    assert lease.ttl_s == 30.0


# --- two steps ---------------------------------------------------------------------------------------------------------


def test_until_its_tool_is_known_a_lease_is_provisional() -> None:
    engine = Engine(ByTool(pytest=20.0), provisional_ttl_s=1.5)
    lease = engine.turn("t1", 100.0).begun
    assert lease is not None
    assert (lease.state, lease.deadline_s) == (LeaseState.PROVISIONAL, 101.5)
    armed = engine.arm(100.2, PYTEST)
    assert (armed.ttl_s, armed.blocks) == (20.0, 10)
    assert engine.expire(119.0) == []
    assert engine.expire(121.0) == [LeaseEndReason.DEADLINE_PASSED]


def test_a_lease_that_nobody_arms_dies() -> None:
    engine = Engine(ByTool(pytest=20.0), provisional_ttl_s=1.5)
    engine.turn("t1", 100.0)
    assert engine.expire(101.6) == [LeaseEndReason.NEVER_ARMED]


def test_a_declared_next_tool_arms_at_once() -> None:
    lease = Engine(ByTool(pytest=20.0)).turn("t1", 0.0, next_tool=PYTEST).begun
    assert lease is not None
    assert (lease.state, lease.ttl_s) == (LeaseState.ARMED, 20.0)


def test_a_tool_that_is_not_worth_it_releases_the_lease() -> None:
    engine = Engine(ByTool(pytest=20.0))
    engine.turn("t1", 0.0)
    assert engine.arm(0.1, GIT).ttl_s == 0.0
    assert (engine.leases, engine.held) == ({"released": 1}, set())


def test_the_replica_may_say_that_the_program_ended() -> None:
    engine = Engine(ByTool(pytest=20.0))
    engine.turn("t1", 0.0)
    assert engine.arm(0.1, None, is_last_turn=True).reason == "last_turn"
    assert engine.held == set()


def test_a_lapsed_lease_that_nobody_collected_can_still_be_armed() -> None:
    engine = Engine(ByTool(pytest=20.0), provisional_ttl_s=1.5)
    engine.turn("t1", 0.0)
    assert engine.arm(5.0, PYTEST).ttl_s == 20.0


@pytest.mark.parametrize("is_last_turn", [True, False])
def test_arming_what_is_not_there_changes_nothing(is_last_turn: bool) -> None:
    engine = Engine()
    assert engine.arm(0.0, PYTEST, is_last_turn=is_last_turn).reason == "unknown_program"
    engine.turn("t1", 0.0)
    assert engine.arm(0.0, PYTEST, branch="nowhere").reason == "no_lease"
    assert len(engine.held) == 1


# --- stop strings: the front end ends the turn by an abort ---------------------------------------------------------------


def test_a_turn_that_may_have_ended_is_held_provisionally_whatever_the_policy() -> None:
    lease = Engine(StaticTtl(10.0), provisional_ttl_s=1.5).turn("t1", 0.0, ending=TurnEnding.MAYBE_ENDED).begun
    assert lease is not None
    assert (lease.state, lease.ttl_s) == (LeaseState.PROVISIONAL, 1.5)


def test_arming_says_that_it_did_end() -> None:
    engine = Engine(ByTool(pytest=20.0))
    engine.turn("t1", 0.0, ending=TurnEnding.MAYBE_ENDED)
    assert engine.arm(0.1, PYTEST).ttl_s == 20.0


def test_an_arm_request_that_overtakes_the_abort_waits_for_it() -> None:
    engine = Engine(ByTool(pytest=20.0))
    engine.arrive("t1", 0.0, stops=True)
    engine.schedule("t1", 0.0)
    assert engine.arm(1.0, PYTEST).reason == "turn_not_ended"
    lease = engine.finish("t1", 1.1, ending=TurnEnding.MAYBE_ENDED).begun
    assert lease is not None
    assert (lease.state, lease.ttl_s, lease.tool) == (LeaseState.ARMED, 20.0, PYTEST)


def test_an_arm_request_that_comes_after_the_next_turn_runs_is_not_taken_for_that_turns() -> None:
    engine = Engine(ByTool(pytest=20.0))
    engine.turn("t1", 0.0)
    engine.arrive("t2", 0.1)
    engine.schedule("t2", 0.1)
    assert engine.arm(0.2, PYTEST).reason == "no_lease"
    assert engine.finish("t2", 1.0, ending=TurnEnding.CUT).begun is None


def test_an_end_of_program_that_overtakes_the_abort_waits_for_it_too() -> None:
    engine = Engine(ByTool(pytest=20.0))
    engine.arrive("t1", 0.0, stops=True)
    engine.schedule("t1", 0.0)
    engine.arm(1.0, None, is_last_turn=True)
    assert engine.finish("t1", 1.1, ending=TurnEnding.MAYBE_ENDED).begun is None
    assert engine.controller.stats()["programs"] == 0


# --- branches, repeated and overlapping ids ------------------------------------------------------------------------------


def test_branches_are_leased_apart() -> None:
    engine = Engine()
    engine.turn("l1", 0.0, branch="left")
    engine.turn("r1", 0.0, branch="right", first_block=20)
    engine.arrive("l2", 1.0, branch="left")
    engine.schedule("l2", 1.0)
    assert [lease["branch"] for lease in engine.controller.explain(A, 1.0)["leases"]] == ["right"]


def test_overlapping_turns_of_one_branch_leave_the_lease_of_the_last_to_end() -> None:
    engine = Engine()
    engine.arrive("t1", 0.0)
    engine.arrive("t2", 0.1)
    engine.schedule("t1", 0.2)
    engine.finish("t1", 1.0)
    engine.schedule("t2", 1.1)
    assert len(engine.held) == 1  # t2 came before t1 ended: it is not the turn that the lease waits for
    engine.finish("t2", 2.0, first_block=20)
    assert (engine.leases, len(engine.held)) == ({"released": 1}, 1)


def test_a_repeated_turn_id_changes_nothing() -> None:
    engine = Engine()
    engine.arrive("t1", 0.0)
    engine.arrive("t1", 0.1)
    engine.schedule("t1", 0.2)
    engine.schedule("t1", 0.3)
    engine.finish("t1", 1.0)
    assert engine.finish("t1", 1.1) == Changes()
    assert engine.controller.stats()["live_turns"] == 0


def test_a_program_released_while_a_turn_runs_leaves_nothing_behind() -> None:
    engine = Engine()
    engine.arrive("t1", 0.0)
    engine.schedule("t1", 0.0)
    engine.controller.release_program(A, 0.5)
    assert engine.finish("t1", 1.0).begun is None


def test_a_new_program_under_the_id_of_a_released_one_starts_afresh() -> None:
    engine = Engine()
    engine.arrive("old", 0.0)
    engine.schedule("old", 0.0)
    engine.controller.release_program(A, 0.5)
    engine.arrive("new", 1.0)
    engine.schedule("new", 1.0)
    engine.finish("old", 1.5)
    assert engine.finish("new", 2.0).begun is not None
    assert engine.controller.explain(A, 2.0)["turns_finished"] == 1


def test_releasing_an_unknown_program_changes_nothing() -> None:
    assert Engine().controller.release_program(A, 0.0) == ()


# --- tool events -------------------------------------------------------------------------------------------------------


def test_the_ttl_counts_from_the_tools_own_start() -> None:
    engine = Engine(ByTool(pytest=5.0))
    engine.turn("t1", 100.0, next_tool=PYTEST)
    engine.tool(ToolEventKind.STARTED, 103.0, elapsed_s=0.5)
    assert engine.expire(107.0) == []
    assert engine.expire(107.6) == [LeaseEndReason.DEADLINE_PASSED]


def test_when_the_tool_has_finished_the_lease_waits_a_little_for_the_turn() -> None:
    engine = Engine(ByTool(pytest=5.0), expected_turn_hold_s=2.0)
    engine.turn("t1", 100.0, next_tool=PYTEST)
    engine.tool(ToolEventKind.FINISHED, 104.9, elapsed_s=4.9)
    assert engine.expire(106.0) == []
    assert engine.expire(107.0) == [LeaseEndReason.DEADLINE_PASSED]


def test_tool_events_without_end_do_not_hold_a_lease_beyond_the_longest() -> None:
    engine = Engine(ByTool(pytest=5.0), ttl_max_s=20.0)
    engine.turn("t1", 0.0, next_tool=PYTEST)
    for second in range(20):
        engine.tool(ToolEventKind.STARTED, float(second))
        engine.tool(ToolEventKind.FINISHED, float(second), elapsed_s=0.1)
    assert engine.expire(20.1) == [LeaseEndReason.DEADLINE_PASSED]


def test_progress_neither_prolongs_a_lease_nor_ends_the_wait() -> None:
    engine = Engine(ByTool(pytest=5.0))
    engine.turn("t1", 100.0, next_tool=PYTEST)
    engine.tool(ToolEventKind.PROGRESS, 104.0, elapsed_s=4.0)
    assert engine.estimates.tools.all_tools().count == 0
    assert engine.expire(105.1) == [LeaseEndReason.DEADLINE_PASSED]


@pytest.mark.parametrize("elapsed_s", [-1.0, math.inf, math.nan])
def test_a_time_that_is_none_is_refused(elapsed_s: float) -> None:
    engine = Engine()
    engine.turn("t1", 0.0)
    with pytest.raises(InvalidRequest):
        engine.tool(ToolEventKind.FINISHED, 1.0, elapsed_s=elapsed_s)
    assert engine.estimates.tools.all_tools().count == 0


def test_an_event_for_an_unknown_program_changes_nothing() -> None:
    engine = Engine()
    engine.tool(ToolEventKind.FINISHED, 1.0, elapsed_s=3.0)
    assert engine.estimates.tools.all_tools().count == 0


# --- what is learned ---------------------------------------------------------------------------------------------------


def test_an_evicted_turn_teaches_the_queueing_delay_and_a_retained_one_does_not() -> None:
    engine = Engine()
    engine.turn("t1", 0.0)
    engine.arrive("t2", 1.0)
    engine.schedule("t2", 4.0)
    assert engine.estimates.queueing_delay.samples == 0
    engine.finish("t2", 5.0)
    engine.expire(100.0)
    engine.arrive("t3", 101.0)
    engine.schedule("t3", 107.0)
    assert engine.estimates.queueing_delay.mean_s() == 6.0


def test_a_first_turn_is_not_an_evicted_one() -> None:
    engine = Engine()
    engine.arrive("t1", 0.0)
    engine.schedule("t1", 9.0)
    assert engine.estimates.queueing_delay.samples == 0


@pytest.mark.parametrize(
    "end",
    [
        lambda engine: engine.turn("end", 5.0, is_last_turn=True),
        lambda engine: engine.controller.release_program(A, 5.0),
    ],
    ids=["last turn", "released"],
)
def test_a_finished_program_teaches_eta_once(end: Callable[[Engine], object]) -> None:
    engine = Engine()
    for index in range(3):
        engine.turn(f"t{index}", float(index))
    end(engine)
    engine.controller.release_program(A, 6.0)
    assert engine.estimates.eta.programs == 1


# --- what can be asked -------------------------------------------------------------------------------------------------


def test_every_decision_is_explained_with_its_inputs() -> None:
    engine = Engine(ByTool(pytest=20.0))
    engine.turn("t1", 0.0)
    engine.arm(0.1, PYTEST)
    engine.expire(50.0)
    engine.arrive("t2", 51.0)
    engine.schedule("t2", 53.0)
    events = [decision["event"] for decision in engine.decisions()]
    assert events == ["turn_finished", "armed", "lease_ended", "turn_scheduled"]
    assert engine.decisions()[2]["reason"] == "deadline_passed"
    assert engine.decisions()[3]["waited_s"] == 2.0


def test_why_nothing_was_retained_is_said() -> None:
    engine = Engine(program_retained_fraction_max=0.05)
    engine.turn("t1", 0.0)
    assert engine.decisions()[0]["why_not"] == "over_cap"
    assert engine.controller.stats()["not_retained"] == {"over_cap": 1}


def test_a_program_that_ended_can_still_be_explained() -> None:
    engine = Engine()
    engine.turn("t1", 0.0)
    engine.controller.release_program(A, 1.0)
    explained = engine.controller.explain(A, 2.0)
    assert (explained["is_known"], explained["is_over"]) == (True, True)
    assert engine.decisions()[-1]["reason"] == "program_over"


def test_an_unknown_program_is_said_to_be_unknown() -> None:
    assert Engine().controller.explain(A, 0.0) == {"program_id": "a", "is_known": False}


def test_under_any_stream_of_ids_memory_is_bounded() -> None:
    engine = Engine(programs_max=50)
    for index in range(2000):
        engine.turn(f"t{index}", float(index), program=f"p{index}", branch=f"b{index}", next_tool=ToolKey(f"x{index}"))
        engine.expire(float(index))
    stats = engine.controller.stats()
    assert stats["programs"] <= 50
    assert stats["live_leases"] <= 11
    assert stats["tool_latency"]["tools"] <= 100
