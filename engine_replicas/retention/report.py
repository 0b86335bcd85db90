"""Plain values about leases and decisions, for people and metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from engine_replicas.retention.lease import Lease, LeaseEndReason, LeaseOutcome
from engine_replicas.retention.ledger import Ledger
from engine_replicas.retention.policy import Estimates, RetentionDecision
from engine_replicas.retention.programs import Program


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


def explain(program: Program | None, program_id: str, ledger: Ledger, now_s: float) -> dict[str, Any]:
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
        "leases": [_lease(lease, now_s) for lease in ledger.of_program(program.program_id)],
        "decisions": [_with_age(decision, now_s) for decision in program.decisions],
    }


def lease_counts(ends: Mapping[LeaseEndReason, int]) -> dict[str, int]:
    """Ended leases by outcome; every outcome is there."""
    counts = Counter({outcome.value: 0 for outcome in LeaseOutcome})
    for reason, count in ends.items():
        counts[reason.outcome.value] += count
    return dict(counts)


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
        "reload_found_share": known.reload.found_share,
        "reload_loads": known.reload.loads,
        "tool_latency": {"version": known.tools.version, **known.tools.counts()},
    }


def _lease(lease: Lease, now_s: float) -> dict[str, Any]:
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
    }


def _with_age(decision: dict[str, Any], now_s: float) -> dict[str, Any]:
    return {**{key: value for key, value in decision.items() if key != "at_s"}, "age_s": now_s - decision["at_s"]}
