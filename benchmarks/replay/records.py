"""What a replay measures, by turn and by program. Pure.

A program's completion time is cut into causes that add up to it:

    queue      ready, and nothing of the turn was scheduled yet
    load       its KV came from an offload tier
    prefill    from the first schedule of a turn to its first token
    decode     from the first token to the last
    preempted  from a preemption to the next token after it, waiting and recomputing included
    tool       between the end of a turn and the readiness of the next
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from benchmarks import summary


class Cause(StrEnum):
    """Where a program's time goes."""

    QUEUE = "queue"
    LOAD = "load"
    PREFILL = "prefill"
    DECODE = "decode"
    PREEMPTED = "preempted"
    TOOL = "tool"


@dataclass(kw_only=True, slots=True)
class TurnRecord:
    """One turn of one program."""

    turn: int
    ready_s: float
    replica: int = 0
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    end_s: float | None = None
    #: Tokens of the previous turns found in the cache, and those that had to be computed (or loaded) again.
    reused_tokens: int = 0
    recomputed_tokens: int = 0
    loaded_tokens: int = 0
    #: Prompt tokens that only other programs' turns could have left behind (shared system prompts).
    shared_tokens: int = 0
    preemptions: int = 0
    preempted_s: float = 0.0
    #: The part of `preempted_s` before the turn's first token.
    preempted_in_prefill_s: float = 0.0
    load_s: float = 0.0


@dataclass(kw_only=True, slots=True)
class ProgramRecord:
    """One program from arrival to end."""

    program_id: str
    kind: str
    index: int
    arrival_s: float
    is_root: bool
    #: Completion time with the engine to itself and every token reused: what slowdown is measured against.
    alone_s: float
    end_s: float | None = None
    turns: list[TurnRecord] = field(default_factory=list)
    seconds: dict[Cause, float] = field(default_factory=lambda: dict.fromkeys(Cause, 0.0))

    @property
    def completion_s(self) -> float:
        return (self.end_s or self.arrival_s) - self.arrival_s

    @property
    def first_token_wait_s(self) -> float:
        """From arrival to the first token of the first turn."""
        first = self.turns[0].first_token_s if self.turns else None
        return (first if first is not None else self.arrival_s) - self.arrival_s

    @property
    def slowdown(self) -> float:
        return self.completion_s / self.alone_s if self.alone_s > 0 else 1.0

    def close_turn(self, record: TurnRecord, end_s: float) -> None:
        """Book a finished turn's time."""
        record.end_s = end_s
        scheduled = record.first_scheduled_s if record.first_scheduled_s is not None else record.ready_s
        token = record.first_token_s if record.first_token_s is not None else end_s
        self.seconds[Cause.QUEUE] += scheduled - record.ready_s - record.load_s
        self.seconds[Cause.LOAD] += record.load_s
        self.seconds[Cause.PREFILL] += token - scheduled - record.preempted_in_prefill_s
        self.seconds[Cause.DECODE] += end_s - token - (record.preempted_s - record.preempted_in_prefill_s)
        self.seconds[Cause.PREEMPTED] += record.preempted_s


@dataclass(frozen=True, kw_only=True, slots=True)
class OccupancySample:
    """The KV cache at one moment, in blocks over all replicas."""

    at_s: float
    total: int
    #: Referenced by turns that run or load.
    active: int
    #: Held by leases of paused programs.
    retained: int
    running: int
    waiting: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """All that one replay measured."""

    programs: tuple[ProgramRecord, ...]
    occupancy: tuple[OccupancySample, ...]
    makespan_s: float
    #: Time the replicas' GPUs computed, in seconds over all replicas.
    busy_s: float
    replicas: int
    steps: int
    scheduler_calls: int
    #: The scheduler's own counters at the end, one dict a replica.
    scheduler_stats: tuple[dict[str, Any], ...] = ()


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
        "gpu_busy_fraction": run.busy_s / (run.makespan_s * run.replicas) if run.makespan_s > 0 else 0.0,
        "reused_tokens": reused,
        "recomputed_tokens": recomputed,
        "loaded_tokens": loaded,
        "reused_fraction": reused / (reused + recomputed + loaded) if reused + recomputed + loaded else 1.0,
        "preemptions": sum(turn.preemptions for turn in turns),
        "seconds_by_cause": {
            cause.value: sum(program.seconds[cause] for program in roots) / max(1, len(roots)) for cause in Cause
        },
        "leases": _sum_counts([stats.get("leases", {}) for stats in run.scheduler_stats]),
        "steps": run.steps,
        "scheduler_calls": run.scheduler_calls,
    }


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
        "reused_tokens": sum(turn.reused_tokens for turn in program.turns),
        "recomputed_tokens": sum(turn.recomputed_tokens for turn in program.turns),
        "preemptions": sum(turn.preemptions for turn in program.turns),
        **{f"{cause.value}_s": program.seconds[cause] for cause in Cause},
    }


def occupancy_row(sample: OccupancySample) -> dict[str, Any]:
    """One occupancy sample as a flat row."""
    return asdict(sample)
