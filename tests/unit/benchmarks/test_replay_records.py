"""Figures of a run from hand-made records."""

import pytest

from benchmarks.replay.records import Cause, ProgramRecord, TurnRecord, spread


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
