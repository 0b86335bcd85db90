"""What the oracle knows, and how leases are priced by it."""

import pytest

from agent_program.ids import ProgramId, TenantId
from benchmarks.replay.clairvoyant import KnownReturn, LeastRemaining, Oracle
from benchmarks.replay.hardware import Deployment, gpu, model
from benchmarks.replay.step_time import RooflineStepTime
from benchmarks.replay.trace import Program, Turn
from benchmarks.replay.workload import ReadyProgram, ReadyTurn
from engine_replicas.config import SchedulingSettings
from engine_replicas.ordering import OrderedTurn
from engine_replicas.policies import new_estimates
from engine_replicas.retention.lease import BranchKey, Lease, LeaseState

STEP_TIME = RooflineStepTime(Deployment(model=model("llama-3.1-8b"), gpu=gpu("h100")))


def ready(index, tools_s):
    turns = tuple(
        ReadyTurn(input_tokens=1_000, prefix_tokens=0, output_tokens=50, tool="bash", tool_s=seconds)
        for seconds in tools_s
    )
    last = ReadyTurn(input_tokens=1_000, prefix_tokens=0, output_tokens=50, tool=None, tool_s=0.0)
    empty = Turn(input_tokens=1, prefix_tokens=0, output_tokens=1, tool=None, tool_s=None)
    program = Program(program_id=str(index), turns=(empty,))
    return ReadyProgram(index=index, program=program, turns=(*turns, last), arrival_s=0.0)


def oracle(*programs):
    return Oracle([ready(index, tools) for index, tools in enumerate(programs)], STEP_TIME, 2048)


def lease(program, *, branch="0", started_s=0.0, queued=0):
    return Lease(
        lease_id=1,
        key=BranchKey(ProgramId(program), branch),
        tenant_id=TenantId("t"),
        program_arrival_s=0.0,
        blocks=frozenset(range(10)),
        tokens=160,
        started_s=started_s,
        away_since_s=started_s,
        ttl_s=1800.0,
        deadline_s=started_s + 1800.0,
        state=LeaseState.ARMED,
        queued_turns=queued,
    )


def test_what_is_left_falls_from_turn_to_turn_to_that_of_the_last():
    known = oracle([1.0, 1.0])
    left = [known.remaining_s(f"0.{turn}") for turn in range(3)]
    assert left == pytest.approx([3 * left[2], 2 * left[2], left[2]])
    assert left[2] > 0


def test_the_program_with_the_least_left_goes_first_and_is_preempted_last():
    order = LeastRemaining(oracle=oracle([1.0] * 5, [1.0]))
    facts = {"is_overdue": False, "is_preempted": False, "is_retained": False, "program_arrival_s": 0.0}
    long, short = (OrderedTurn(turn_id=turn_id, **facts) for turn_id in ("0.0", "1.0"))
    assert order.waiting_key(short) < order.waiting_key(long)
    assert order.running_key(short) < order.running_key(long)
    # In its last turn the long one has less left than the short one in its first.
    assert order.waiting_key(OrderedTurn(turn_id="0.5", **facts)) < order.waiting_key(short)


def test_a_lease_is_worth_more_the_sooner_its_tool_returns():
    known = oracle([2.0, 100.0])
    prices = KnownReturn(known, new_estimates(SchedulingSettings(), step_tokens_max=2048, kv_tokens_total=100_000))
    prices._reload.stall_s = lambda tokens: 1.0
    known.turn_over(ProgramId("p0"), "0")
    assert prices.value_rate(lease("p0"), 0.0) == pytest.approx(1.0 / 2.0)
    assert prices.value_rate(lease("p0"), 1.0) == pytest.approx(1.0 / 1.0)
    # Never more than for half a second, however late it is; as much once the turn waits.
    assert prices.value_rate(lease("p0"), 9.0) == pytest.approx(2.0)
    assert prices.value_rate(lease("p0", queued=1), 0.0) == pytest.approx(2.0)
    known.turn_over(ProgramId("p0"), "0")
    assert prices.value_rate(lease("p0", started_s=5.0), 5.0) == pytest.approx(0.01)


def test_a_sub_agent_has_a_future_of_its_own():
    known = oracle([2.0], [7.0])
    known.turn_over(ProgramId("p0"), "1")
    assert known.tool_s(BranchKey(ProgramId("p0"), "1")) == 7.0
    assert known.tool_s(BranchKey(ProgramId("p0"), "0")) == 0.0
