"""What the router knows about a replica: a frozen snapshot of its last report.

A report is the mapping that a replica's `record_routing_stats` returned. It is up to a period old, may be absent (a
replica that has just started, or reports nothing), and comes from another process: whatever is missing or malformed
reads as "unknown", never as an error. An engine reports `waiting`, `running`, `queued_tokens`, `free_blocks`,
`retained_blocks`, `total_blocks`, and what it has measured of itself: `turns_per_s`, `context_tokens_per_s`,
`recent_prefixes`; a tool actor `queued_calls` and `live_sessions`. Either may report `is_draining`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from agent_program.ids import ReplicaId

#: A report with more beginnings than this is malformed.
_PREFIXES_MAX = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class KvReport:
    """A replica's KV blocks. What is neither free nor retained is in use by running turns."""

    total_blocks: int
    free_blocks: int
    #: Kept for paused programs; can be reclaimed.
    retained_blocks: int

    def pressure(self, retained_fraction: float) -> float:
        """The share of the pool that is taken, 0 to 1, where a retained block counts as `retained_fraction` of one."""
        in_use = self.total_blocks - self.free_blocks - self.retained_blocks
        return max(0.0, min(1.0, (in_use + retained_fraction * self.retained_blocks) / self.total_blocks))


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaView:
    """One live replica as last reported."""

    replica_id: ReplicaId
    #: Most requests that Serve lets it work on at once.
    turns_max: int
    #: Turns (or tool calls) that it has accepted and not started.
    waiting: int = 0
    #: Turns (or tool sessions) that are running.
    running: int = 0
    #: Prompt tokens of the waiting turns that are still to be computed.
    queued_tokens: int = 0
    #: None where the replica holds no KV or has not reported it.
    kv: KvReport | None = None
    #: It will leave: no new programs, and bound ones move at their next turn.
    is_draining: bool = False
    #: Turns that it ends in a second while turns wait; None where it has not measured that.
    turns_per_s: float | None = None
    #: Tokens of context a second that it computes, or reloads where it keeps copies; None where it has not measured that.
    context_tokens_per_s: float | None = None
    #: Fingerprints of the beginnings of prompts that it computed last.
    recent_prefixes: frozenset[int] = frozenset()

    @classmethod
    def from_report(cls, replica_id: ReplicaId, turns_max: int, report: Mapping[str, object] | None) -> ReplicaView:
        """Read a report; what it does not say, or says wrongly, is unknown."""
        said = report or {}
        return cls(
            replica_id=replica_id,
            turns_max=turns_max,
            waiting=_count(said, "waiting", "queued_calls") or 0,
            running=_count(said, "running", "live_sessions") or 0,
            queued_tokens=_count(said, "queued_tokens") or 0,
            kv=_kv(said),
            is_draining=said.get("is_draining") is True,
            turns_per_s=_rate(said, "turns_per_s"),
            context_tokens_per_s=_rate(said, "context_tokens_per_s"),
            recent_prefixes=_fingerprints(said.get("recent_prefixes")),
        )


def _count(report: Mapping[str, object], *names: str) -> int | None:
    for name in names:
        value = report.get(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 2**53:
            return int(value)
    return None


def _rate(report: Mapping[str, object], name: str) -> float | None:
    value = report.get(name)
    is_rate = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 2**53
    return float(value) if is_rate else None  # type: ignore[arg-type]


def _fingerprints(said: object) -> frozenset[int]:
    if not isinstance(said, (list, tuple, set, frozenset)) or len(said) > _PREFIXES_MAX:
        return frozenset()
    return frozenset(value for value in said if isinstance(value, int) and not isinstance(value, bool))


def _kv(report: Mapping[str, object]) -> KvReport | None:
    total, free = _count(report, "total_blocks"), _count(report, "free_blocks")
    if not total or free is None or free > total:
        return None
    retained = min(_count(report, "retained_blocks") or 0, total - free)
    return KvReport(total_blocks=total, free_blocks=free, retained_blocks=retained)
