"""Policies side by side: ratios of paired runs, and which points are under pressure. Pure.

Runs are paired by everything but the policy: same programs, arrivals and tool times. A *point* is one (workload, load,
deployment, offload tier); its figures are means over seeds, and a ratio of two policies is the ratio of those means. A point
is *under pressure* where stock behaviour suffers from the KV cache: `vllm` loses more than a tenth of what its turns could
reuse, or its programs spend more than a tenth of their time in the queue.

What a policy is compared with may be another policy, or one of two choices that nobody can make in advance: the best fixed
time to live in hindsight (`program_fcfs`, which is a fixed time of 0, among them), and the best of all other presets.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import mean, median
from typing import Any

BASELINE = "vllm"
CLAIRVOYANT = "clairvoyant"
PROGRAM_FCFS = "program_fcfs"
FIXED_TTL_PREFIX = "static:"
#: Stand-ins for the policy that is best at a point, by the mean completion time there.
BEST_FIXED_TTL = "best_fixed_ttl"
BEST_OTHER_PRESET = "best_other_preset"
NO_TIER = "none"
NOT_DECLARED = "none"


class Over(StrEnum):
    """Which points a summary looks at."""

    ALL = "all points"
    #: Without an offload tier: with one, an evicted context is loaded and not computed again, which is another regime.
    PRESSED = "points under pressure, without an offload tier"
    TIERED = "points with an offload tier"
    DECLARED = "points with an offload tier where programs declare their remaining turns"


class Statistic(StrEnum):
    """How ratios become one number."""

    MEDIAN = "median"
    MAX = "max"

    def of(self, values: Sequence[float]) -> float:
        return median(values) if self is Statistic.MEDIAN else max(values)


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """One number over many points: a figure of `policy` over the same of `other`."""

    policy: str
    other: str
    over: Over
    statistic: Statistic
    #: The `Row` attribute that is compared.
    figure: str = "completion_mean_s"
    #: What the name says of the figure; empty for the mean completion time.
    figure_name: str = ""

    @property
    def name(self) -> str:
        where = {Over.TIERED: "with_tier", Over.DECLARED: "with_tier_declared"}.get(self.over, "")
        parts = [self.policy, self.figure_name, "over", self.other, where]
        return "_".join([part for part in parts if part] + [self.statistic.value])


_P95 = {"figure": "completion_p95_s", "figure_name": "p95"}
_FIRST_TOKEN = {"figure": "first_token_p99_s", "figure_name": "first_token_p99"}
_FIRST_TOKEN_MEAN = {"figure": "first_token_mean_s", "figure_name": "first_token_mean"}


def _summary(policy: str, other: str, over: Over, statistic: Statistic, **figure: str) -> Summary:
    return Summary(policy=policy, other=other, over=over, statistic=statistic, **figure)


SUMMARIES: tuple[Summary, ...] = (
    _summary("continuum", "vllm", Over.PRESSED, Statistic.MEDIAN),
    _summary("continuum", "vllm", Over.ALL, Statistic.MAX),
    _summary("continuum", "vllm", Over.PRESSED, Statistic.MEDIAN, **_FIRST_TOKEN),
    _summary("adaptive", "continuum", Over.PRESSED, Statistic.MEDIAN),
    _summary("adaptive", "continuum", Over.ALL, Statistic.MAX),
    _summary("adaptive", "continuum", Over.ALL, Statistic.MAX, **_P95),
    _summary("adaptive", "vllm", Over.PRESSED, Statistic.MEDIAN),
    _summary("adaptive", "vllm", Over.ALL, Statistic.MAX),
    _summary("adaptive", "vllm", Over.PRESSED, Statistic.MEDIAN, **_FIRST_TOKEN),
    _summary("adaptive", "vllm", Over.ALL, Statistic.MAX, **_FIRST_TOKEN),
    _summary("adaptive", BEST_FIXED_TTL, Over.PRESSED, Statistic.MEDIAN),
    _summary("adaptive", BEST_FIXED_TTL, Over.ALL, Statistic.MAX),
    _summary("adaptive", CLAIRVOYANT, Over.PRESSED, Statistic.MEDIAN),
    _summary("adaptive", BEST_OTHER_PRESET, Over.TIERED, Statistic.MAX),
    _summary("adaptive", PROGRAM_FCFS, Over.DECLARED, Statistic.MEDIAN),
    _summary("adaptive", PROGRAM_FCFS, Over.TIERED, Statistic.MEDIAN, **_FIRST_TOKEN_MEAN),
)

#: workload, load, deployment, tier
Point = tuple[str, str, str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One policy at one point, averaged over seeds."""

    workload: str
    load: str
    deployment: str
    tier: str
    policy: str
    #: How programs declared their remaining turns.
    declared: str
    seeds: int
    completion_mean_s: float
    completion_p50_s: float
    completion_p95_s: float
    completion_p99_s: float
    #: From a program's arrival to the first token of its first turn.
    first_token_mean_s: float
    first_token_p99_s: float
    programs_per_s: float
    recomputed_tokens: float
    reused_fraction: float
    preemptions: float
    #: Largest completion time over what the program would take alone.
    slowdown_max: float
    #: Share of the programs' time in which they were ready and nothing of theirs was scheduled.
    queue_share: float

    @property
    def point(self) -> Point:
        return self.workload, self.load, self.deployment, self.tier


def load_name(result: Mapping[str, Any]) -> str:
    """What a load is called: the name that a matrix gave it, or its value."""
    if result.get("load_name"):
        return str(result["load_name"])
    return "-" if result["load"] is None else f"{result['load']:g}"


def point_of(result: Mapping[str, Any]) -> Point:
    """The point that a run belongs to."""
    return result["workload"], load_name(result), result["deployment"], result.get("tier", NO_TIER)


def rows_of(results: Iterable[Mapping[str, Any]]) -> list[Row]:
    """Average results over seeds; in the order in which points and policies first appear."""
    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for result in results:
        groups.setdefault((*point_of(result), result["policy"]), []).append(result)
    return [
        Row(
            workload=workload,
            load=load,
            deployment=deployment,
            tier=tier,
            policy=policy,
            declared=str(group[0].get("declared", NOT_DECLARED)),
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
        for (workload, load, deployment, tier, policy), group in groups.items()
    ]


def points_under_pressure(rows: Sequence[Row]) -> set[Point]:
    """The points at which stock behaviour suffers; empty without a baseline to tell."""
    return {
        row.point for row in rows if row.policy == BASELINE and (row.reused_fraction < 0.9 or row.queue_share > 0.1)
    }


def by_point(rows: Sequence[Row]) -> dict[Point, dict[str, Row]]:
    """Rows by point and policy, in the order of their first appearance."""
    points: dict[Point, dict[str, Row]] = {}
    for row in rows:
        points.setdefault(row.point, {})[row.policy] = row
    return points


def ratios(rows: Sequence[Row], policy: str, other: str, figure: str = "completion_mean_s") -> dict[Point, float]:
    """A figure of `policy` over that of `other`, at each point where both ran."""
    found: dict[Point, float] = {}
    for point, here in by_point(rows).items():
        one, two = here.get(policy), resolve(here, other, policy)
        if one is not None and two is not None and getattr(two, figure) > 0:
            found[point] = getattr(one, figure) / getattr(two, figure)
    return found


def paired_ratios(results: Iterable[Mapping[str, Any]], row: Row, other: str) -> list[float]:
    """Mean completion time of a row's policy over that of `other`, seed by seed, at the row's point."""
    means = {
        (result["policy"], result["seed"]): result["completion_s"]["mean"]
        for result in results
        if point_of(result) == row.point
    }
    return [
        value / means[other, seed]
        for (policy, seed), value in means.items()
        if policy == row.policy and means.get((other, seed))
    ]


def resolve(here: Mapping[str, Row], name: str, policy: str) -> Row | None:
    """The row of a policy, or of a stand-in for the best at this point; None where none of them ran."""
    if name == BEST_FIXED_TTL:
        candidates = [row for key, row in here.items() if is_fixed_ttl(key)]
    elif name == BEST_OTHER_PRESET:
        candidates = [row for key, row in here.items() if key not in (policy, CLAIRVOYANT) and not is_fixed_ttl(key)]
    else:
        return here.get(name)
    return min(candidates, key=lambda row: row.completion_mean_s, default=None)


def is_fixed_ttl(policy: str) -> bool:
    """A policy that retains every turn for the same time, 0 included."""
    return policy == PROGRAM_FCFS or policy.startswith(FIXED_TTL_PREFIX)


def summarize_ratios(rows: Sequence[Row]) -> dict[str, float | int]:
    """Those of `SUMMARIES` for which both policies ran, with the number of points behind them."""
    pressed = points_under_pressure(rows)
    points = {row.point for row in rows}
    tiered = {point for point in points if point[3] != NO_TIER}
    chosen = {
        Over.ALL: points,
        Over.PRESSED: pressed - tiered,
        Over.TIERED: tiered,
        Over.DECLARED: {row.point for row in rows if row.point in tiered and row.declared != NOT_DECLARED},
    }
    out: dict[str, float | int] = {"points": len(points), "points_under_pressure": len(pressed)}
    for summary in SUMMARIES:
        values = ratios(rows, summary.policy, summary.other, summary.figure)
        found = [ratio for point, ratio in values.items() if point in chosen[summary.over]]
        if found:
            out[summary.name] = summary.statistic.of(found)
    return out
