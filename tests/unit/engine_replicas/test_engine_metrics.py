"""The replica's metrics as Prometheus reads them."""

from __future__ import annotations

from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from engine_replicas.engine_metrics import exposition

SCHEDULER = {
    "total_blocks": 100,
    "free_blocks": 60,
    "retained_blocks": 30,
    "running": 2,
    "waiting": 1,
    "eta": 0.5,
    "queueing_delay_s": None,
    "leases_begun": 7,
    "leases": {"reused": 4, "expired": 1},
    "reused_tokens": 900,
    "recomputed_tokens": 100,
}
TIMES = {"bounds": [1.0], "counts": [2, 1], "sum": 4.0}
METER = {
    "schedule_s": TIMES,
    "loaded_tokens": 64,
    "block_tokens": 16,
    "calibration": {
        "returned": 3,
        "late": 1,
        "predicted": 4,
        "predicted_sum": 3.0,
        "brier_sum": 0.5,
        "ttl_s": TIMES,
        "away_s": TIMES,
    },
}
OWN = {"turns_open": 3, "token_continuity": {"same": 2, "continued": 5}, "latency_store_errors": 0}


def samples(scheduler: dict[str, Any], own: dict[str, Any]) -> dict[tuple[str, str], float]:
    """(name, label value) → value, of our own metrics."""
    return {
        (sample.name.removeprefix("continuum_engine_"), next(iter(sample.labels.values()), "")): sample.value
        for family in text_string_to_metric_families(exposition(scheduler, own))
        for sample in family.samples
        if sample.name.startswith("continuum_engine_")
    }


def test_counters_and_gauges_of_scheduler_and_replica_are_told() -> None:
    told = samples(SCHEDULER, OWN)
    assert told["kv_blocks", "retained"] == 30
    assert told["turns", "waiting"] == 1
    assert told["leases_total", "reused"] == 4
    assert told["leases_begun_total", ""] == 7
    assert told["context_tokens_total", "recomputed"] == 100
    assert told["prompts_total", "continued"] == 5
    assert told["turns_open", ""] == 3


def test_deadlines_steps_and_loads_are_told() -> None:
    told = samples({**SCHEDULER, **METER}, OWN)
    assert told["ttl_outcomes_total", "late"] == 1
    assert told["ttl_squared_errors_total", ""] == 0.5
    assert told["schedule_seconds_count", ""] == 3
    assert told["loaded_tokens_total", ""] == 64


def test_kv_is_told_in_tokens_too() -> None:
    assert samples({**SCHEDULER, **METER}, OWN)["kv_tokens", "retained"] == 30 * 16


def test_what_is_not_known_is_left_out_rather_than_zero() -> None:
    assert ("queueing_delay_seconds", "") not in samples(SCHEDULER, OWN)
    assert not [name for name, _ in samples({}, {}) if name.startswith(("kv_blocks", "leases", "context"))]
