"""What a replay measures, by turn and by program. Pure.

A program's completion time is cut into causes that add up to it:

    queue      ready, and nothing of the turn was scheduled yet
    load       its KV came from an offload tier
    prefill    from the first schedule of a turn to its first token
    decode     from the first token to the last
    preempted  from a preemption to the next token after it, waiting and recomputing included
    tool       between the end of a turn and the readiness of the next
    lost       from a turn's readiness to the death of the replica that worked on it; the turn then begins anew elsewhere

The KV cache over time is cut by what a block is for: running turns, retained for a paused program, cached (it holds content that
a later turn may find, and is the first to be taken) and free (it holds nothing).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Cause(StrEnum):
    """Where a program's time goes."""

    QUEUE = "queue"
    LOAD = "load"
    PREFILL = "prefill"
    DECODE = "decode"
    PREEMPTED = "preempted"
    TOOL = "tool"
    LOST = "lost"


@dataclass(kw_only=True, slots=True)
class TurnRecord:
    """One turn of one program."""

    turn: int
    ready_s: float
    replica: int = 0
    #: When the attempt that counts began: later than `ready_s` where a replica died with an earlier one.
    attempt_s: float | None = None
    #: Attempts that died with their replica.
    replays: int = 0
    #: First token of the first attempt: what a client saw, since an interrupted stream goes on without repeating itself.
    seen_s: float | None = None
    #: The time to live that the scheduler chose when the turn had ended; None where it chose none or sets no deadline.
    ttl_s: float | None = None
    #: Why, in the scheduler's words; None where nobody decided (the last turn, vLLM's own class).
    ttl_reason: str | None = None
    #: The tool after the turn, and how long it really took until the next turn was ready.
    tool: str | None = None
    waited_s: float | None = None
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

    def start_over(self, now_s: float) -> None:
        """Its replica died: what this attempt did is lost, and counts as such."""
        self.attempt_s = now_s
        self.replays += 1
        self.first_scheduled_s = self.first_token_s = None
        self.reused_tokens = self.recomputed_tokens = self.loaded_tokens = self.shared_tokens = 0
        self.preempted_s = self.preempted_in_prefill_s = self.load_s = 0.0


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
    #: How many turns the program was declared to take when it came; None where nothing was declared.
    declared_turns: int | None = None
    end_s: float | None = None
    turns: list[TurnRecord] = field(default_factory=list)
    seconds: dict[Cause, float] = field(default_factory=lambda: dict.fromkeys(Cause, 0.0))

    @property
    def completion_s(self) -> float:
        return (self.end_s or self.arrival_s) - self.arrival_s

    @property
    def first_token_wait_s(self) -> float:
        """From arrival to the first token of the first turn."""
        first = self.turns[0].seen_s if self.turns else None
        return (first if first is not None else self.arrival_s) - self.arrival_s

    @property
    def slowdown(self) -> float:
        return self.completion_s / self.alone_s if self.alone_s > 0 else 1.0

    def close_turn(self, record: TurnRecord, end_s: float) -> None:
        """Book a finished turn's time."""
        record.end_s = end_s
        began = record.attempt_s if record.attempt_s is not None else record.ready_s
        scheduled = record.first_scheduled_s if record.first_scheduled_s is not None else began
        token = record.first_token_s if record.first_token_s is not None else end_s
        self.seconds[Cause.LOST] += began - record.ready_s
        self.seconds[Cause.QUEUE] += scheduled - began - record.load_s
        self.seconds[Cause.LOAD] += record.load_s
        self.seconds[Cause.PREFILL] += token - scheduled - record.preempted_in_prefill_s
        self.seconds[Cause.DECODE] += end_s - token - (record.preempted_s - record.preempted_in_prefill_s)
        self.seconds[Cause.PREEMPTED] += record.preempted_s


@dataclass(frozen=True, kw_only=True, slots=True)
class OccupancySample:
    """The KV cache at one moment, in blocks over all replicas; the four parts add up to the total."""

    at_s: float
    blocks_total: int
    #: Referenced by turns that run or load.
    blocks_running: int
    #: Held for paused programs.
    blocks_retained: int
    #: Hold content, and are referenced by nobody: found by a later turn, or taken by anyone.
    blocks_cached: int
    #: Hold nothing.
    blocks_free: int
    turns_running: int
    turns_waiting: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaRecord:
    """What one replica did."""

    replica: int
    #: Turns that ended on it.
    turns: int
    #: Seconds in which its GPUs computed.
    busy_s: float
    steps: int
    scheduler_calls: int
    #: When it died; None where it lived.
    lost_at_s: float | None = None
    #: How many times as long as modelled its steps took in the end.
    slow_factor: float = 1.0
    #: The scheduler's own counters at the end (or at its death).
    scheduler_stats: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """All that one replay measured."""

    programs: tuple[ProgramRecord, ...]
    occupancy: tuple[OccupancySample, ...]
    makespan_s: float
    replicas: tuple[ReplicaRecord, ...]
    #: The router's placements by reason.
    placements: dict[str, int] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """Engine steps over all replicas, each step of a jump counted."""
        return sum(replica.steps for replica in self.replicas)

    @property
    def scheduler_calls(self) -> int:
        """Calls of vLLM's `schedule` over all replicas."""
        return sum(replica.scheduler_calls for replica in self.replicas)
