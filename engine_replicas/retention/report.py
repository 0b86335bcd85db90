"""Plain values about leases and decisions, for people and metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from engine_replicas.retention.events import NoLease
from engine_replicas.retention.lease import Lease, LeaseEnd, LeaseEndReason, LeaseOutcome
from engine_replicas.retention.ledger import Ledger
from engine_replicas.retention.policy import Estimates, RetentionDecision
from engine_replicas.retention.programs import LiveTurn, Program
from engine_replicas.retention.reclaim import CheapestFirst, Reclaiming, WaitingNeed

#: Of a turn that took more leases than this, the first are named.
_VICTIMS_MAX = 4


def decision_inputs(decision: RetentionDecision | None) -> dict[str, Any]:
    """What a decision was computed from; nothing where none was taken."""
    if decision is None:
        return {}
    inputs = {
        "benefit_s": decision.benefit_s,
        "queueing_delay_s": decision.queueing_delay_s,
        "eta": decision.eta,
        "prefill_reload_s": decision.prefill_reload_s,
        "return_probability": decision.return_probability,
        "samples": decision.samples,
    }
    return {"decision": decision.reason.value, **{key: value for key, value in inputs.items() if value is not None}}


def explain(
    program: Program | None, program_id: str, ledger: Ledger, reclaiming: Reclaiming, now_s: float
) -> dict[str, Any]:
    """A program's leases and last decisions, oldest first."""
    if program is None:
        return {"program_id": program_id, "is_known": False}
    return {
        "program_id": program_id,
        "is_known": True,
        "is_over": program.is_over,
        "age_s": now_s - program.arrived_s,
        "turns_finished": program.turns_finished,
        "live_turns": program.live_turns,
        "lease_outcomes": dict(program.lease_outcomes),
        "leases": [_lease(lease, reclaiming, now_s) for lease in ledger.of_program(program.program_id)],
        "decisions": [_with_age(decision, now_s) for decision in program.decisions],
    }


def leases(ledger: Ledger, ends: Mapping[LeaseEndReason, int], not_retained: Mapping[NoLease, int]) -> dict[str, Any]:
    """Leases held now, and how those before them ended or why they never began."""
    return {
        "live_leases": len(ledger),
        "retained_blocks": ledger.blocks_held,
        "reclaimable_blocks": reclaimable_blocks(ledger),
        "leases": lease_counts(ends),
        "lease_ends": {reason.value: count for reason, count in ends.items()},
        "not_retained": {reason.value: count for reason, count in not_retained.items()},
    }


def lease_counts(ends: Mapping[LeaseEndReason, int]) -> dict[str, int]:
    """Ended leases by outcome; every outcome is there."""
    counts = Counter({outcome.value: 0 for outcome in LeaseOutcome})
    for reason, count in ends.items():
        counts[reason.outcome.value] += count
    return dict(counts)


def reclaimable_blocks(ledger: Ledger) -> int:
    """Blocks that only paused programs hold: nobody who is queued would miss them at once."""
    return len(frozenset().union(*(lease.blocks for lease in ledger.live() if not lease.queued_turns)))


def estimates(known: Estimates) -> dict[str, Any]:
    """What the engine has learned."""
    return {
        "queueing_delay_s": known.queueing_delay.mean_s(),
        "queueing_delay_samples": known.queueing_delay.samples,
        "eta": known.eta.eta(),
        "eta_programs": known.eta.programs,
        "prefill_reload_s_per_1k": known.prefill.reload_s(1000),
        "prefill_samples": known.prefill.samples,
        "reload_s_per_1k": known.reload.reload_s(1000),
        "stall_s_per_1k": known.reload.stall_s(1000),
        "is_reload_cheap": known.reload.is_cheap(1000),
        "reload_found_share": known.reload.found_share,
        "reload_loads": known.reload.loads,
        "tool_latency": {"version": known.tools.version, **known.tools.counts()},
    }


def _lease(lease: Lease, reclaiming: Reclaiming, now_s: float) -> dict[str, Any]:
    return {
        "branch": lease.key.branch,
        "state": lease.state.value,
        "tool": lease.tool,
        "blocks": len(lease.blocks),
        "tokens": lease.tokens,
        "ttl_s": lease.ttl_s,
        "held_s": now_s - lease.started_s,
        "deadline_in_s": lease.deadline_s - now_s,
        "next_turn_queued": lease.queued_turns > 0,
        **price(lease, reclaiming, now_s),
    }


def _with_age(decision: dict[str, Any], now_s: float) -> dict[str, Any]:
    return {**{key: value for key, value in decision.items() if key != "at_s"}, "age_s": now_s - decision["at_s"]}


def lease_ended(program: Program, end: LeaseEnd, reclaiming: Reclaiming, now_s: float) -> None:
    """Note with the program how its lease ended, and what it was worth then."""
    program.lease_ended(end.reason.outcome.value)
    held_s = now_s - end.lease.started_s
    worth = price(end.lease, reclaiming, now_s)
    program.decided("lease_ended", now_s, reason=end.reason.value, held_s=held_s, **worth)


def leases_taken(
    turn: LiveTurn | None, taken: Sequence[Lease], reclaiming: Reclaiming, need: WaitingNeed | None, now_s: float
) -> None:
    """Note with the program whose turn took leases what it took, and what was compared."""
    if turn is None or not taken:
        return
    compared: dict[str, Any] = {}
    if isinstance(reclaiming, CheapestFirst):
        compared["prices"] = [price(lease, reclaiming, now_s) for lease in taken[:_VICTIMS_MAX]]
        if need is not None:
            compared["offered_rate"] = reclaiming.offer(need)
    turn.program.decided(
        "leases_taken",
        now_s,
        victims=[lease.key.program_id for lease in taken[:_VICTIMS_MAX]],
        leases=len(taken),
        blocks=sum(len(lease.blocks) for lease in taken),
        **compared,
    )


def price(lease: Lease, reclaiming: Reclaiming, now_s: float) -> dict[str, float]:
    """What the lease is worth and why; nothing where leases have no price."""
    return asdict(reclaiming.price(lease, now_s)) if isinstance(reclaiming, CheapestFirst) else {}
