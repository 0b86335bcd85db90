"""Ratios of paired runs."""

from benchmarks.replay.comparison import points_under_pressure, ratios, rows_of, summarize_ratios


def result(policy, mean_s, *, load=1.0, seed=1, reused=1.0, queue_s=0.0):
    figures = {"mean": mean_s, "p50": mean_s, "p95": 2 * mean_s, "p99": 3 * mean_s, "max": 4 * mean_s}
    return {
        "workload": "w",
        "deployment": "d",
        "policy": policy,
        "load": load,
        "seed": seed,
        "completion_s": figures,
        "first_token_s": figures,
        "slowdown": figures,
        "programs_per_s": 1.0,
        "recomputed_tokens": 10,
        "reused_fraction": reused,
        "preemptions": 0,
        "seconds_by_cause": {"queue": queue_s},
    }


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


def test_pressure_is_told_by_what_stock_vllm_loses_or_waits():
    queued = [result("vllm", 10.0, load=3.0, queue_s=2.0)]
    assert points_under_pressure(rows_of(LIGHT + HEAVY + queued)) == {("w", "2", "d"), ("w", "3", "d")}


def test_the_summary_takes_medians_under_pressure_and_maxima_over_all():
    summary = summarize_ratios(rows_of(LIGHT + HEAVY))
    assert summary["continuum_over_vllm_median"] == 0.5
    assert summary["continuum_over_vllm_max"] == 1.01
    assert (summary["points"], summary["points_under_pressure"]) == (2, 1)


def test_policies_that_did_not_run_have_no_summary():
    assert not any("adaptive" in name for name in summarize_ratios(rows_of(LIGHT + HEAVY)))
