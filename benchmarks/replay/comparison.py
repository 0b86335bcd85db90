"""Policies side by side: ratios of paired runs, and which cells are under pressure. Pure.

Runs are paired by everything but the policy: same programs, arrivals and tool times. A *point* is one (workload, load,
deployment); its figures are means over seeds, and a ratio of two policies is the ratio of those means. A point is *under
pressure* where stock behaviour suffers from the KV cache: `vllm` loses more than a tenth of what its turns could reuse, or
its programs spend more than a tenth of their time in the queue.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

BASELINE = "vllm"
#: What `compare` prints: how it is called, (policy, other policy), over which points, by which figure.
SUMMARIES = (
    ("continuum_over_vllm_median", "continuum", "vllm", True, median),
    ("continuum_over_vllm_max", "continuum", "vllm", False, max),
    ("adaptive_over_continuum_median", "adaptive", "continuum", True, median),
    ("adaptive_over_continuum_max", "adaptive", "continuum", False, max),
    ("adaptive_over_vllm_max", "adaptive", "vllm", False, max),
    ("adaptive_over_clairvoyant_median", "adaptive", "clairvoyant", True, median),
)

Point = tuple[str, str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One policy at one point, averaged over seeds."""

    workload: str
    load: str
    deployment: str
    policy: str
    seeds: int
    completion_mean_s: float
    completion_p50_s: float
    completion_p95_s: float
    completion_p99_s: float
    first_token_mean_s: float
    first_token_p99_s: float
    programs_per_s: float
    recomputed_tokens: float
    reused_fraction: float
    preemptions: float
    slowdown_max: float
    queue_share: float

    @property
    def point(self) -> Point:
        return self.workload, self.load, self.deployment


def rows_of(results: Iterable[dict[str, Any]]) -> list[Row]:
    """Average results over seeds; in the order in which points and policies first appear."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for result in results:
        load = result.get("load_name") or (f"{result['load']:g}" if result["load"] is not None else "-")
        groups.setdefault((result["workload"], load, result["deployment"], result["policy"]), []).append(result)
    return [
        Row(
            workload=workload,
            load=load,
            deployment=deployment,
            policy=policy,
            seeds=len(group),
            completion_mean_s=mean(r["completion_s"]["mean"] for r in group),
            completion_p50_s=mean(r["completion_s"]["p50"] for r in group),
            completion_p95_s=mean(r["completion_s"]["p95"] for r in group),
            completion_p99_s=mean(r["completion_s"]["p99"] for r in group),
            first_token_mean_s=mean(r["first_token_s"]["mean"] for r in group),
            first_token_p99_s=mean(r["first_token_s"]["p99"] for r in group),
            programs_per_s=mean(r["programs_per_s"] for r in group),
            recomputed_tokens=mean(r["recomputed_tokens"] for r in group),
            reused_fraction=mean(r["reused_fraction"] for r in group),
            preemptions=mean(r["preemptions"] for r in group),
            slowdown_max=max(r["slowdown"]["max"] for r in group),
            queue_share=mean(r["seconds_by_cause"]["queue"] / max(1e-9, r["completion_s"]["mean"]) for r in group),
        )
        for (workload, load, deployment, policy), group in groups.items()
    ]


def points_under_pressure(rows: Sequence[Row]) -> set[Point]:
    """The points at which stock behaviour suffers; empty without a baseline to tell."""
    return {
        row.point for row in rows if row.policy == BASELINE and (row.reused_fraction < 0.9 or row.queue_share > 0.1)
    }


def ratios(rows: Sequence[Row], policy: str, other: str) -> dict[Point, float]:
    """Mean completion time of `policy` over that of `other`, at each point where both ran."""
    means = {(row.point, row.policy): row.completion_mean_s for row in rows}
    return {
        point: value / means[point, other]
        for (point, name), value in means.items()
        if name == policy and means.get((point, other))
    }


def summarize_ratios(rows: Sequence[Row]) -> dict[str, float | int]:
    """The ratios of `SUMMARIES` for which both policies ran, with the number of points behind them."""
    pressed = points_under_pressure(rows)
    points = {row.point for row in rows}
    out: dict[str, float | int] = {"points": len(points), "points_under_pressure": len(pressed)}
    for name, policy, other, pressed_only, figure in SUMMARIES:
        found = [ratio for point, ratio in ratios(rows, policy, other).items() if point in pressed or not pressed_only]
        if found:
            out[name] = float(figure(found))
    return out
