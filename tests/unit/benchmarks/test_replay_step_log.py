"""A step-time model fitted to an engine's own step log."""

import json
from dataclasses import replace

import pytest

from agent_program.errors import InvalidRequest
from benchmarks.replay.step_log import LoggedStep, fit_step_time, read_step_log
from benchmarks.replay.step_time import StepLoad


def logged(turns: int, tokens: int, pairs: int) -> LoggedStep:
    # A machine with 5 ms a step, 1 ms a sequence, 0.2 ms a token and 1 µs for 10 pairs.
    duration_s = 5e-3 + 1e-3 * turns + 2e-4 * tokens + 1e-7 * pairs
    return LoggedStep(duration_s=duration_s, turns=turns, tokens=tokens, pairs=pairs)


LOG = [logged(b, b, b * 700) for b in (1, 2, 4, 8)] + [
    logged(1, q, q * (k + q // 2)) for q in (64, 256) for k in (0, 2000)
]


def test_the_fit_finds_the_machine_that_wrote_the_log():
    fit = fit_step_time(LOG)
    assert fit.mape < 1e-6
    assert fit.coefficients == pytest.approx((5e-3, 1e-3, 2e-4, 1e-7), rel=1e-4)


def test_the_fit_prices_decodes_and_prefills_alike():
    fit = fit_step_time(LOG)
    load = StepLoad(decode_seqs=3, decode_kv_tokens=900, prefill=[(100, 50)])
    # 4 sequences, 103 tokens, 900 + 100·50 + 100·101/2 = 10,950 pairs.
    assert fit.step_s(load) == pytest.approx(5e-3 + 4e-3 + 103 * 2e-4 + 10_950e-7, rel=1e-4)


def test_a_log_of_one_kind_of_step_gives_no_negative_price():
    fit = fit_step_time([logged(1, 1, pairs) for pairs in range(100, 120)])
    assert min(fit.coefficients) >= 0
    assert fit.step_s(StepLoad(decode_seqs=1, decode_kv_tokens=110)) == pytest.approx(
        logged(1, 1, 110).duration_s, rel=1e-3
    )


def test_the_schedulers_log_is_read_as_it_is_written(tmp_path):
    path = tmp_path / "steps.jsonl"
    rows = [
        {"at_s": 1.0, "tokens": 5, "prefill_tokens": 4, "turns": 2, "pairs": 20, "running": 2, "duration_s": 0.1},
        {"at_s": 1.1, "tokens": 2, "prefill_tokens": 0, "turns": 2, "pairs": 24, "running": 2, "duration_s": 0.05},
    ]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    assert [step.duration_s for step in read_step_log(path)] == [0.1, 0.05]


def test_a_line_that_is_no_step_is_named(tmp_path):
    path = tmp_path / "steps.jsonl"
    path.write_text('{"duration_s": 0.1}\n')
    with pytest.raises(InvalidRequest, match=r"steps\.jsonl line 1"):
        read_step_log(path)


def test_too_few_steps_are_refused():
    with pytest.raises(InvalidRequest, match="at least 4"):
        fit_step_time(LOG[:3])


def test_steps_that_others_held_up_count_in_full():
    # One step in ten takes ten times as long: together they take 1.9 times as long as the machine alone would need.
    disturbed = [
        replace(step, duration_s=step.duration_s * (10 if index % 10 == 0 else 1))
        for index, step in enumerate(LOG * 10)
    ]
    fit = fit_step_time(disturbed)
    predicted = sum(sum(c * x for c, x in zip(fit.coefficients, step.features, strict=True)) for step in disturbed)
    assert predicted == pytest.approx(sum(step.duration_s for step in disturbed))
