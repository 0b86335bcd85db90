"""From the records of a run to its figures and rows: plain data for JSON, tables and plots. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from benchmarks import summary
from benchmarks.replay.records import Cause, OccupancySample, ProgramRecord, ReplicaRecord, RunRecord, TurnRecord

#: Decisions about time to live that a result lists one by one; beyond it they are thinned evenly.
TTL_ROWS_MAX = 2000


def spread(values: list[float]) -> dict[str, float]:
    """Mean, percentiles and maximum, in the values' own unit; zeros where there is nothing to measure."""
    if not values:
        return dict.fromkeys(("mean", "p50", "p95", "p99", "max"), 0.0)
    return {**summary.spread(values), "max": max(values)}


def summarize(run: RunRecord) -> dict[str, Any]:
    """The figures of a run; programs are root programs, sub-agents count inside their parent's tool time."""
    roots = [program for program in run.programs if program.is_root]
    turns = [turn for program in run.programs for turn in program.turns]
    reused = sum(turn.reused_tokens for turn in turns)
    recomputed = sum(turn.recomputed_tokens for turn in turns)
    loaded = sum(turn.loaded_tokens for turn in turns)
    return {
        "programs": len(roots),
        "turns": len(turns),
        "completion_s": spread([program.completion_s for program in roots]),
        "first_token_s": spread([program.first_token_wait_s for program in roots]),
        "later_turn_wait_s": spread(
            [
                (turn.first_token_s or turn.ready_s) - turn.ready_s
                for program in run.programs
                for turn in program.turns[1:]
            ]
        ),
        "slowdown": spread([program.slowdown for program in roots]),
        "programs_per_s": len(roots) / run.makespan_s if run.makespan_s > 0 else 0.0,
        "makespan_s": run.makespan_s,
        "gpu_busy_fraction": _busy_fraction(run),
        "reused_tokens": reused,
        "recomputed_tokens": recomputed,
        "loaded_tokens": loaded,
        "reused_fraction": reused / (reused + recomputed + loaded) if reused + recomputed + loaded else 1.0,
        "preemptions": sum(turn.preemptions for turn in turns),
        "seconds_by_cause": {
            cause.value: sum(program.seconds[cause] for program in roots) / max(1, len(roots)) for cause in Cause
        },
        "kv_share": kv_share(run.occupancy),
        "ttl_calibration": ttl_calibration(turns),
        "replays": sum(turn.replays for turn in turns),
        "moves": sum(_moves(program) for program in run.programs),
        "placements": dict(sorted(run.placements.items())),
        "by_replica": [_replica_row(replica, run.makespan_s) for replica in run.replicas],
        "leases": _sum_counts([replica.scheduler_stats.get("leases", {}) for replica in run.replicas]),
        "steps": run.steps,
        "scheduler_calls": run.scheduler_calls,
    }


def _busy_fraction(run: RunRecord) -> float:
    """Share of the replicas' lives in which their GPUs computed."""
    alive_s = sum(_alive_s(replica, run.makespan_s) for replica in run.replicas)
    return sum(replica.busy_s for replica in run.replicas) / alive_s if alive_s > 0 else 0.0


def _alive_s(replica: ReplicaRecord, makespan_s: float) -> float:
    return makespan_s if replica.lost_at_s is None else min(makespan_s, replica.lost_at_s)


def _replica_row(replica: ReplicaRecord, makespan_s: float) -> dict[str, Any]:
    alive_s = _alive_s(replica, makespan_s)
    return {
        "replica": replica.replica,
        "turns": replica.turns,
        "busy_s": replica.busy_s,
        "gpu_busy_fraction": replica.busy_s / alive_s if alive_s > 0 else 0.0,
        "steps": replica.steps,
        "lost_at_s": replica.lost_at_s,
        "slow_factor": replica.slow_factor,
    }


def _moves(program: ProgramRecord) -> int:
    homes = [turn.replica for turn in program.turns]
    return sum(before != after for before, after in pairwise(homes))


def kv_share(samples: Sequence[OccupancySample]) -> dict[str, float]:
    """Mean share of the pool by state, each sample weighted with the time until the next."""
    names = ("running", "retained", "cached", "free")
    weighted, total = dict.fromkeys(names, 0.0), 0.0
    for sample, after in pairwise(samples):
        weight = (after.at_s - sample.at_s) * sample.blocks_total
        total += weight
        for name in names:
            weighted[name] += (after.at_s - sample.at_s) * getattr(sample, f"blocks_{name}")
    return {name: value / total if total > 0 else 0.0 for name, value in weighted.items()}


def ttl_calibration(turns: Sequence[TurnRecord]) -> dict[str, Any]:
    """How the times to live that were chosen compare with the tool waits that followed; empty where none was chosen.

    `within` is the share of waits that ended before the deadline; `held_for_nothing_s` the mean over all waits of the seconds for
    which KV was held and had been let go when the program came back.
    """
    decided = [turn for turn in turns if turn.ttl_reason is not None and turn.waited_s is not None]
    if not decided:
        return {}
    by_reason: dict[str, list[TurnRecord]] = {}
    for turn in decided:
        by_reason.setdefault(turn.ttl_reason or "", []).append(turn)
    return {
        **_calibration(decided),
        "held_for_nothing_s": sum(turn.ttl_s or 0.0 for turn in decided if not _is_within(turn)) / len(decided),
        "by_reason": {reason: _calibration(group) for reason, group in sorted(by_reason.items())},
    }


def _calibration(turns: Sequence[TurnRecord]) -> dict[str, float]:
    deadlines = [turn.ttl_s for turn in turns if turn.ttl_s is not None]
    return {
        "waits": len(turns),
        "within": sum(map(_is_within, turns)) / len(turns),
        "ttl_s_mean": sum(deadlines) / len(deadlines) if deadlines else 0.0,
        "waited_s_mean": sum(turn.waited_s or 0.0 for turn in turns) / len(turns),
    }


def _is_within(turn: TurnRecord) -> bool:
    return turn.ttl_s is None or (turn.waited_s or 0.0) <= turn.ttl_s


def ttl_rows(programs: Sequence[ProgramRecord]) -> list[dict[str, Any]]:
    """One row a decision: what was chosen, how long the tool took, and what the next turn found."""
    rows = [
        {
            "tool": turn.tool,
            "reason": turn.ttl_reason,
            "ttl_s": turn.ttl_s,
            "waited_s": turn.waited_s,
            "reused_tokens": after.reused_tokens,
            "recomputed_tokens": after.recomputed_tokens,
        }
        for program in programs
        for turn, after in pairwise(program.turns)
        if turn.ttl_reason is not None and turn.waited_s is not None
    ]
    every = -(-len(rows) // TTL_ROWS_MAX) or 1
    return rows[::every]


def _sum_counts(rows: list[dict[str, Any]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for row in rows:
        for key, value in row.items():
            if isinstance(value, int):
                total[key] = total.get(key, 0) + value
    return dict(sorted(total.items()))


def program_row(program: ProgramRecord) -> dict[str, Any]:
    """One program as a flat row for CSV."""
    return {
        "program_id": program.program_id,
        "kind": program.kind,
        "is_root": program.is_root,
        "arrival_s": program.arrival_s,
        "completion_s": program.completion_s,
        "first_token_s": program.first_token_wait_s,
        "alone_s": program.alone_s,
        "slowdown": program.slowdown,
        "turns": len(program.turns),
        "declared_turns": program.declared_turns,
        "reused_tokens": sum(turn.reused_tokens for turn in program.turns),
        "recomputed_tokens": sum(turn.recomputed_tokens for turn in program.turns),
        "loaded_tokens": sum(turn.loaded_tokens for turn in program.turns),
        "preemptions": sum(turn.preemptions for turn in program.turns),
        "replays": sum(turn.replays for turn in program.turns),
        "moves": _moves(program),
        "replica": program.turns[-1].replica if program.turns else None,
        **{f"{cause.value}_s": program.seconds[cause] for cause in Cause},
    }


def occupancy_row(sample: OccupancySample) -> dict[str, Any]:
    """One occupancy sample as a flat row."""
    return asdict(sample)
