"""Series under which each of our alerts fires, and under which it does not: what `promtool test rules` is given.

A case is (series when it fires, series when all is well, labels of the alert besides severity). Values are promtool's notation:
`0+6x60` starts at 0 and grows by 6 a minute.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Series = dict[str, str]
_NAMESPACE = "agents"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One alert."""

    fires: Series
    quiet: Series
    labels: dict[str, str] = field(default_factory=lambda: {"namespace": _NAMESPACE})


def _one(metric: str, fires: str, quiet: str, **labels: str) -> Case:
    shown = {label: value for label, value in labels.items() if label in ("part", "replica", "server")}
    name = metric + _labels(labels)
    return Case(fires={name: fires}, quiet={name: quiet}, labels={"namespace": _NAMESPACE, **shown})


def _labels(labels: dict[str, str]) -> str:
    return "{" + ",".join(f'{name}="{value}"' for name, value in {"namespace": _NAMESPACE, **labels}.items()) + "}"


def _two(metric: str, label: str, values: dict[str, tuple[str, str]], **labels: str) -> Case:
    """Several series of one metric: label value → (when it fires, when all is well)."""
    names = {value: metric + _labels({**labels, label: value}) for value in values}
    return Case(
        fires={names[value]: fires for value, (fires, _) in values.items()},
        quiet={names[value]: quiet for value, (_, quiet) in values.items()},
    )


def _buckets(metric: str, slow: str, *, fast: str, **labels: str) -> Case:
    """A histogram whose values are above `slow` when it fires, and below `fast` when all is well."""

    def series(all_below: str) -> Series:
        bounds = (fast, slow, "+Inf")
        return {
            metric + "_bucket" + _labels({**labels, "le": bound}): "0+60x120"
            if _at_least(bound, all_below)
            else "0x120"
            for bound in bounds
        }

    shown = {"replica": labels["replica"]} if "replica" in labels else {}
    return Case(fires=series("+Inf"), quiet=series(fast), labels={"namespace": _NAMESPACE, **shown})


def _at_least(bound: str, other: str) -> bool:
    return float(bound.replace("+Inf", "inf")) >= float(other.replace("+Inf", "inf"))


def _serve_case(metric: str, fires: str, quiet: str) -> Case:
    case = _one(metric, fires, quiet, application="continuum", deployment="EngineReplica")
    return Case(fires=case.fires, quiet=case.quiet, labels={**case.labels, "deployment": "EngineReplica"})


_GROWS, _STANDS = "0+600x120", "5x120"
CASES: dict[str, Case] = {
    "ContinuumMetricsMissing": Case(fires={"up": "1x120"}, quiet={"continuum_store_up": "1x120"}, labels={}),
    "ContinuumStoreDown": _one("continuum_store_up", "0x120", "1x120"),
    "ContinuumStoreNearlyFull": Case(
        fires={
            "continuum_store_memory_bytes" + _labels({}): "95x120",
            "continuum_store_memory_max_bytes" + _labels({}): "100x120",
        },
        quiet={
            "continuum_store_memory_bytes" + _labels({}): "50x120",
            "continuum_store_memory_max_bytes" + _labels({}): "100x120",
        },
    ),
    "ContinuumPartGone": _one("continuum_replicas_scraped", "0x120", "1x120", part="engine"),
    "ContinuumPartSilent": _one("continuum_replicas_silent", "1x120", "0x120", part="engine"),
    "ContinuumProgramsQueueing": _one("continuum_programs", "60x120", "10x120", state="queued"),
    "ContinuumProgramsFailing": _two(
        "continuum_programs_ended_total",
        "state",
        {"failed": ("0+6x120", "0+0x120"), "completed": ("0+6x120", "0+6x120")},
    ),
    "ContinuumShedding": _one("continuum_ingress_refusals_total", _GROWS, _STANDS, code="overloaded"),
    "ContinuumContextRecomputed": _two(
        "continuum_engine_context_tokens_total",
        "kind",
        {"recomputed": ("0+60000x120", "0+600x120"), "reused": ("0+600x120", "0+60000x120")},
    ),
    "ContinuumPreemptions": _one("vllm:num_preemptions_total", _GROWS, _STANDS),
    "ContinuumDeadlinesWrong": Case(
        fires={
            "continuum_engine_ttl_squared_errors_total" + _labels({}): "0+30x120",
            "continuum_engine_ttl_predictions_total" + _labels({}): "0+60x120",
        },
        quiet={
            "continuum_engine_ttl_squared_errors_total" + _labels({}): "0+6x120",
            "continuum_engine_ttl_predictions_total" + _labels({}): "0+60x120",
        },
    ),
    "ContinuumToolTimesOld": _one("continuum_engine_latency_snapshot_age_seconds", "0+60x120", "2x120", replica="r1"),
    "ContinuumSchedulingSlow": _buckets("continuum_engine_schedule_seconds", "0.1", fast="0.001", replica="r1"),
    "ContinuumNoSandbox": _one("continuum_tools_ready", "0x120", "1x120"),
    "ContinuumToolsNotIsolated": _one("continuum_tools_isolates", "0x120", "1x120"),
    "ContinuumToolCallsWaiting": _buckets("continuum_tools_call_queue_seconds", "30.0", fast="0.1"),
    "ContinuumToolTimesDropped": _one("continuum_tools_samples_dropped_total", _GROWS, _STANDS),
    "ContinuumMcpServerAway": _one("continuum_tools_mcp_faults", "1x120", "0x120", server="files"),
    "ContinuumProgramsMoving": _two(
        "continuum_router_placements_total",
        "reason",
        {"bound": ("0+60x120", "0+600x120"), "replica_lost": ("0+60x120", "0+0x120")},
        target="engine",
    ),
    "ContinuumRoutingWithoutStore": _one("continuum_router_unconfirmed_bindings", "3x120", "0x120"),
    "ContinuumDeploymentDown": _serve_case("ray_serve_deployment_replica_healthy", "0x120", "1x120"),
    "ContinuumRequestsFailing": _two(
        "ray_serve_num_http_requests_total",
        "status_code",
        {"503": ("0+60x120", "0+0x120"), "200": ("0+60x120", "0+600x120")},
        application="continuum",
    ),
    "ContinuumRequestsQueueing": _serve_case("ray_serve_deployment_queued_queries", "60x120", "0x120"),
}


def rule_tests(rule_files: list[str], alerts: list[dict[str, Any]]) -> dict[str, Any]:
    """The document that `promtool test rules` takes: each alert fires after 100 minutes of its series, and is quiet under the others."""
    tests = []
    for alert in alerts:
        case = CASES[alert["alert"]]
        fired = {
            "exp_labels": {**alert["labels"], **case.labels},
            "exp_annotations": {name: _filled(text, case.labels) for name, text in alert["annotations"].items()},
        }
        for series, expected in ((case.fires, [fired]), (case.quiet, [])):
            tests.append(
                {
                    "interval": "1m",
                    "input_series": [{"series": name, "values": values} for name, values in series.items()],
                    "alert_rule_test": [{"eval_time": "100m", "alertname": alert["alert"], "exp_alerts": expected}],
                }
            )
    return {"rule_files": rule_files, "evaluation_interval": "1m", "tests": tests}


def _filled(text: str, labels: dict[str, str]) -> str:
    for name, value in labels.items():
        text = text.replace("{{ $labels." + name + " }}", value)
    return text
