"""Figures of a run from hand-made records."""

import pytest

from benchmarks.replay.figures import TTL_ROWS_MAX, kv_share, spread, ttl_calibration, ttl_rows
from benchmarks.replay.records import Cause, OccupancySample, ProgramRecord, TurnRecord


def test_a_spread_of_nothing_is_zero():
    assert set(spread([]).values()) == {0.0}
    assert spread([1.0, 2.0, 6.0]) | {"p95": 0, "p99": 0} == {"mean": 3.0, "p50": 2.0, "max": 6.0, "p95": 0, "p99": 0}


def record(**turn: float) -> ProgramRecord:
    program = ProgramRecord(program_id="p", kind="task", index=0, arrival_s=10.0, is_root=True, alone_s=2.0)
    program.close_turn(TurnRecord(turn=0, ready_s=10.0, **turn), 20.0)  # type: ignore[arg-type]
    return program


def test_a_turns_time_is_cut_into_queue_prefill_and_decode():
    seconds = record(first_scheduled_s=12.0, first_token_s=13.0).seconds
    assert (seconds[Cause.QUEUE], seconds[Cause.PREFILL], seconds[Cause.DECODE]) == (2.0, 1.0, 7.0)


def test_a_preemption_during_decode_is_taken_from_decode():
    seconds = record(first_scheduled_s=12.0, first_token_s=13.0, preempted_s=3.0).seconds
    assert (seconds[Cause.PREFILL], seconds[Cause.DECODE], seconds[Cause.PREEMPTED]) == (1.0, 4.0, 3.0)


def test_a_preemption_during_prefill_is_taken_from_prefill():
    seconds = record(first_scheduled_s=12.0, first_token_s=18.0, preempted_s=4.0, preempted_in_prefill_s=4.0).seconds
    assert (seconds[Cause.PREFILL], seconds[Cause.DECODE], seconds[Cause.PREEMPTED]) == (2.0, 2.0, 4.0)


def test_time_spent_loading_is_not_queueing():
    seconds = record(first_scheduled_s=14.0, first_token_s=15.0, load_s=3.0).seconds
    assert (seconds[Cause.QUEUE], seconds[Cause.LOAD]) == (1.0, 3.0)


def test_the_causes_add_up_to_the_completion_time():
    program = record(first_scheduled_s=12.0, first_token_s=15.0, preempted_s=3.0, preempted_in_prefill_s=1.0)
    program.end_s = 20.0
    assert sum(program.seconds.values()) == pytest.approx(program.completion_s)
    assert program.slowdown == 5.0


# --- a replica that died -----------------------------------------------------------------------------------------------


def test_an_attempt_that_died_with_its_replica_is_lost_time_and_nothing_else():
    turn = TurnRecord(turn=0, ready_s=10.0, first_scheduled_s=11.0, first_token_s=12.0, preempted_s=1.0, load_s=0.5)
    turn.start_over(14.0)
    turn.first_scheduled_s, turn.first_token_s = 15.0, 17.0
    program = ProgramRecord(program_id="p", kind="task", index=0, arrival_s=10.0, is_root=True, alone_s=2.0)
    program.close_turn(turn, 20.0)
    assert {cause: seconds for cause, seconds in program.seconds.items() if seconds} == {
        Cause.LOST: 4.0,
        Cause.QUEUE: 1.0,
        Cause.PREFILL: 2.0,
        Cause.DECODE: 3.0,
    }
    assert turn.replays == 1


# --- the KV cache over time --------------------------------------------------------------------------------------------


def sample(at_s, running, retained, cached, free):
    return OccupancySample(
        at_s=at_s,
        blocks_total=100,
        blocks_running=running,
        blocks_retained=retained,
        blocks_cached=cached,
        blocks_free=free,
        turns_running=1,
        turns_waiting=0,
    )


def test_the_share_of_a_state_is_weighted_with_time():
    samples = [sample(0.0, 100, 0, 0, 0), sample(1.0, 0, 50, 30, 20), sample(4.0, 0, 0, 0, 100)]
    shares = kv_share(samples)
    assert shares == pytest.approx({"running": 0.25, "retained": 0.375, "cached": 0.225, "free": 0.15})
    assert kv_share(samples[:1]) == dict.fromkeys(("running", "retained", "cached", "free"), 0.0)


# --- times to live against what tools really took ----------------------------------------------------------------------


def waited(ttl_s, waited_s, reason="tool_history"):
    return TurnRecord(turn=0, ready_s=0.0, tool="bash", ttl_s=ttl_s, ttl_reason=reason, waited_s=waited_s)


def test_a_wait_within_its_deadline_and_one_beyond_it():
    told = ttl_calibration([waited(2.0, 1.0), waited(2.0, 5.0), waited(0.0, 1.0, "cold_start"), waited(None, 9.0)])
    assert told["waits"] == 4
    # The first, and the one without a deadline.
    assert told["within"] == 0.5
    # 2 s of the second; letting go at once holds for nothing.
    assert told["held_for_nothing_s"] == 0.5
    assert told["by_reason"]["cold_start"] == {"waits": 1, "within": 0.0, "ttl_s_mean": 0.0, "waited_s_mean": 1.0}


def test_without_decisions_there_is_nothing_to_calibrate():
    assert ttl_calibration([TurnRecord(turn=0, ready_s=0.0, waited_s=1.0)]) == {}


def test_decisions_are_listed_with_what_the_next_turn_found_and_thinned_beyond_a_bound():
    program = ProgramRecord(program_id="p", kind="task", index=0, arrival_s=0.0, is_root=True, alone_s=1.0)
    program.turns = [waited(2.0, 1.0), TurnRecord(turn=1, ready_s=1.0, reused_tokens=80, recomputed_tokens=3)]
    (row,) = ttl_rows([program])
    assert row == {
        "tool": "bash",
        "reason": "tool_history",
        "ttl_s": 2.0,
        "waited_s": 1.0,
        "reused_tokens": 80,
        "recomputed_tokens": 3,
    }
    program.turns = [waited(2.0, 1.0) for _ in range(3 * TTL_ROWS_MAX)]
    assert TTL_ROWS_MAX / 2 < len(ttl_rows([program])) <= TTL_ROWS_MAX
