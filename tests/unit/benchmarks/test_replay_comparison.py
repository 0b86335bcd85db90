"""Ratios of paired runs."""

import pytest

from benchmarks.replay.comparison import (
    BEST_FIXED_TTL,
    BEST_OTHER_PRESET,
    paired_ratios,
    points_under_pressure,
    ratios,
    rows_of,
    summarize_ratios,
)
from support.replay_results import result

LIGHT = [result("vllm", 10.0, load=0.5), result("continuum", 10.1, load=0.5)]
HEAVY = [
    result("vllm", 100.0, load=2.0, reused=0.3),
    result("vllm", 140.0, load=2.0, reused=0.3, seed=2),
    result("continuum", 50.0, load=2.0),
    result("continuum", 70.0, load=2.0, seed=2),
]


def test_seeds_are_averaged_before_ratios_are_taken():
    rows = rows_of(HEAVY)
    assert [(row.policy, row.seeds, row.completion_mean_s) for row in rows] == [
        ("vllm", 2, 120.0),
        ("continuum", 2, 60.0),
    ]
    assert list(ratios(rows, "continuum", "vllm").values()) == [0.5]


def test_the_spread_over_seeds_pairs_each_run_with_its_own():
    row = rows_of(HEAVY)[1]
    assert paired_ratios(HEAVY + LIGHT, row, "vllm") == [0.5, 0.5]


def test_pressure_is_told_by_what_stock_vllm_loses_or_waits():
    queued = [result("vllm", 10.0, load=3.0, queue_s=2.0)]
    pressed = points_under_pressure(rows_of(LIGHT + HEAVY + queued))
    assert {load for _, load, _, _ in pressed} == {"2", "3"}


def test_the_summary_takes_medians_under_pressure_and_maxima_over_all():
    summary = summarize_ratios(rows_of(LIGHT + HEAVY))
    assert summary["continuum_over_vllm_median"] == 0.5
    assert summary["continuum_over_vllm_max"] == 1.01
    assert (summary["points"], summary["points_under_pressure"]) == (2, 1)


def test_policies_that_did_not_run_have_no_summary():
    assert not any("adaptive" in name for name in summarize_ratios(rows_of(LIGHT + HEAVY)))


def test_the_best_fixed_time_is_chosen_at_each_point_with_hindsight():
    runs = [
        result("adaptive", 30.0),
        result("program_fcfs", 60.0),
        result("static:2", 40.0),
        result("static:10", 50.0),
        result("continuum", 20.0),
        result("adaptive", 30.0, load=2.0),
        result("program_fcfs", 20.0, load=2.0),
    ]
    assert list(ratios(rows_of(runs), "adaptive", BEST_FIXED_TTL).values()) == [0.75, 1.5]


def test_the_best_other_preset_is_neither_itself_nor_a_fixed_time_nor_the_bound():
    runs = [
        result("adaptive", 30.0),
        result("vllm", 60.0),
        result("continuum", 40.0),
        result("static:10", 1.0),
        result("clairvoyant", 2.0),
    ]
    assert list(ratios(rows_of(runs), "adaptive", BEST_OTHER_PRESET).values()) == [0.75]


def test_points_with_an_offload_tier_are_summed_up_apart():
    pressed = {"reused": 0.5}
    tier = {"tier": "dram 100 GB at 45 GB/s"}
    runs = [
        result("vllm", 100.0, **pressed),
        result("continuum", 80.0),
        result("adaptive", 40.0),
        result("vllm", 50.0, **pressed, **tier),
        result("continuum", 40.0, **tier),
        result("adaptive", 44.0, first_token_s=0.1, **tier),
        result("program_fcfs", 44.0, first_token_s=2.0, **tier),
    ]
    summary = summarize_ratios(rows_of(runs))
    assert summary["adaptive_over_continuum_median"] == 0.5
    assert summary["adaptive_over_continuum_max"] == 1.1
    assert summary["adaptive_over_best_other_preset_with_tier_max"] == 1.1
    # Nothing was declared here: the ratio that is about declared turns has no point.
    assert "adaptive_over_program_fcfs_with_tier_declared_median" not in summary
    declared = summarize_ratios(rows_of([run | {"declared": "exact"} for run in runs]))
    assert declared["adaptive_over_program_fcfs_with_tier_declared_median"] == 1.0
    assert summary["adaptive_first_token_mean_over_program_fcfs_with_tier_median"] == pytest.approx(0.05)
