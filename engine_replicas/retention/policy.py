"""How long to retain a turn's KV: one small class per policy.

A policy answers one question, when a turn has ended and again when its tool is known: for how many seconds from the end of
the turn is its KV worth keeping? It never acts; the ledger holds what it answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from agent_program.ids import ToolKey
from engine_replicas.retention.eta import ETA_PRIOR, EtaEstimator
from engine_replicas.retention.prefill_cost import PrefillCost
from engine_replicas.retention.queueing_delay import QueueingDelay
from engine_replicas.retention.tool_latency import ToolLatencyView
from engine_replicas.retention.ttl_argmax import best_ttl, cold_start_ttl


class DecisionReason(StrEnum):
    """Where a TTL comes from."""

    #: The policy frees KV at the end of every turn.
    END_OF_TURN = "end_of_turn"
    STATIC = "static"
    #: Too few durations are known: the paper's T_default.
    COLD_START = "cold_start"
    #: The durations of all tools; too few of this one are known.
    GLOBAL_HISTORY = "global_history"
    TOOL_HISTORY = "tool_history"


@dataclass(frozen=True, kw_only=True, slots=True)
class EndedTurn:
    """What a policy knows about the turn that ended."""

    #: The tool that the program now waits for; None while unknown, or where the turn called none.
    tool: ToolKey | None
    #: Tokens whose KV exists.
    context_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RetentionDecision:
    """A TTL and what it was computed from; inputs that a policy does not use are None."""

    #: Seconds from the end of the turn; 0 frees now.
    ttl_s: float
    reason: DecisionReason
    #: B: what finding the KV again saves, in seconds.
    benefit_s: float | None = None
    #: T: mean queueing delay of evicted turns, in seconds.
    queueing_delay_s: float | None = None
    eta: float | None = None
    #: Seconds to compute the context again.
    prefill_reload_s: float | None = None
    #: Share of calls expected back within the TTL.
    return_probability: float | None = None
    #: Durations that the distribution stands for.
    samples: int | None = None


class RetentionPolicy(Protocol):
    """How long KV is worth keeping."""

    #: Whether the answer can change once the tool is known: then a turn's lease is provisional until it is.
    depends_on_tool: bool

    def decide(self, turn: EndedTurn) -> RetentionDecision:
        """The TTL for the turn that just ended, or whose tool just became known."""
        ...


class EndOfTurn:
    """Stock vLLM: nothing is retained."""

    depends_on_tool = False

    def decide(self, turn: EndedTurn) -> RetentionDecision:
        return RetentionDecision(ttl_s=0.0, reason=DecisionReason.END_OF_TURN)


class StaticTtl:
    """The same TTL after every turn."""

    depends_on_tool = False

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s

    def decide(self, turn: EndedTurn) -> RetentionDecision:
        return RetentionDecision(ttl_s=self._ttl_s, reason=DecisionReason.STATIC)


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimates:
    """What an engine has learned; shared by the policies and updated by the controller."""

    tools: ToolLatencyView
    #: T
    queueing_delay: QueueingDelay
    eta: EtaEstimator
    prefill: PrefillCost


class Continuum:
    """The paper's TTL (section 4.2), in three stages with K = `k_cold_start`.

    |S| ≤ K            T_default = max(0, ln(T + PrefillReload))      durations ~ Exp(1 s), eta = 1
    |S[f]| ≤ K         argmax of Eq. 2 over all durations S
    otherwise          argmax of Eq. 2 over the tool's durations S[f]
    """

    depends_on_tool = True

    def __init__(self, estimates: Estimates, *, k_cold_start: int) -> None:
        self._estimates = estimates
        self._k = k_cold_start

    def decide(self, turn: EndedTurn) -> RetentionDecision:
        known = self._estimates
        delay_s = known.queueing_delay.mean_s()
        reload_s = known.prefill.reload_s(turn.context_tokens)
        everything = known.tools.all_tools()
        if everything.count <= self._k:
            benefit_s = delay_s + reload_s
            return RetentionDecision(
                ttl_s=cold_start_ttl(benefit_s),
                reason=DecisionReason.COLD_START,
                benefit_s=benefit_s,
                queueing_delay_s=delay_s,
                eta=ETA_PRIOR,
                prefill_reload_s=reload_s,
                samples=everything.count,
            )
        of_tool = known.tools.of_tool(turn.tool)
        is_tool_known = of_tool.count > self._k
        durations = of_tool if is_tool_known else everything
        eta = known.eta.eta()
        benefit_s = delay_s * eta + reload_s
        best = best_ttl(durations.pairs, benefit_s, unreturned=durations.unreturned)
        return RetentionDecision(
            ttl_s=best.ttl_s,
            reason=DecisionReason.TOOL_HISTORY if is_tool_known else DecisionReason.GLOBAL_HISTORY,
            benefit_s=benefit_s,
            queueing_delay_s=delay_s,
            eta=eta,
            prefill_reload_s=reload_s,
            return_probability=best.return_probability,
            samples=durations.count,
        )
