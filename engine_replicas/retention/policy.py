"""How long to retain a turn's KV: one small class per policy.

A policy answers one question, when a turn has ended and again when its tool is known: for how many seconds from the end of
the turn is its KV worth keeping? It never acts; the ledger holds what it answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from agent_program.ids import ToolKey
from engine_replicas.retention.decode_cost import DecodeCost
from engine_replicas.retention.eta import ETA_PRIOR, EtaEstimator
from engine_replicas.retention.prefill_cost import PrefillCost
from engine_replicas.retention.queueing_delay import QueueingDelay
from engine_replicas.retention.reload_cost import ReloadCost
from engine_replicas.retention.tool_latency import ToolLatencyView
from engine_replicas.retention.ttl_argmax import cold_start_ttl


class DecisionReason(StrEnum):
    """Where a TTL comes from."""

    #: The policy frees KV at the end of every turn.
    END_OF_TURN = "end_of_turn"
    STATIC = "static"
    #: Too few durations are known: the paper's T_default.
    COLD_START = "cold_start"
    #: Preserving wastes less than computing again, for a while.
    LEAST_WASTE = "least_waste"
    #: Kept until somebody brings more than it is worth.
    PRICED = "priced"
    #: Nobody offers a price: loading the KV from a tier below costs next to nothing.
    RELOAD_IS_CHEAP = "reload_is_cheap"
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
    #: Tokens that the other turns hold which run now.
    other_tokens: int = 0


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
    #: PrefillReload, from the GPU's own prefill and from tiers below it.
    reload: ReloadCost
    decode: DecodeCost


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
        reload_s = known.reload.reload_s(turn.context_tokens)
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
        best = durations.best_ttl(benefit_s)
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


class InferCept:
    """Preserve, discard or swap, whichever wastes least memory over time (InferCept, section 4).

    For a context of C tokens whose tool takes t, with C_other tokens of others in the batch and F(C) seconds to compute it:

        waste of preserving    t · C                        it lies there unused
        waste of discarding    F(C) · C + F(C) · C_other    its own memory and everybody else's, while it is computed again

    so preserving pays while t < F(C) · (C + C_other) / C. The tool's time is its mean where it has been seen; a tool that is
    expected to take longer is discarded at once, and one that turns out to take longer when the bound is reached. Swapping is
    discarding with a tier below that has a copy, where F is the time of loading it.
    """

    depends_on_tool = True

    def __init__(self, estimates: Estimates) -> None:
        self._estimates = estimates

    def decide(self, turn: EndedTurn) -> RetentionDecision:
        reload_s = self._estimates.reload.reload_s(turn.context_tokens)
        tokens = max(1, turn.context_tokens)
        bound_s = reload_s * (tokens + turn.other_tokens) / tokens
        of_tool = self._estimates.tools.of_tool(turn.tool)
        is_too_long = of_tool.count > 0 and of_tool.mean_s > bound_s
        return RetentionDecision(
            ttl_s=0.0 if is_too_long else bound_s,
            reason=DecisionReason.LEAST_WASTE,
            benefit_s=bound_s,
            prefill_reload_s=reload_s,
            samples=of_tool.count,
        )


class Adaptive:
    """Keep everything, for as long as nobody brings more than it is worth; `reclaim.CheapestFirst` is the auction.

    No timer frees memory that nobody asks for, and no tool history is needed for the price of a lease, which falls by itself
    with the time that the program has been away. Where a tier below brings KV back in next to no time, holding it on the GPU
    buys nothing, and vLLM's own least-recently-used order decides what stays.
    """

    depends_on_tool = False

    def __init__(self, estimates: Estimates, *, ttl_s: float) -> None:
        self._estimates = estimates
        self._ttl_s = ttl_s

    def decide(self, turn: EndedTurn) -> RetentionDecision:
        if self._estimates.reload.is_cheap(turn.context_tokens):
            return RetentionDecision(ttl_s=0.0, reason=DecisionReason.RELOAD_IS_CHEAP)
        return RetentionDecision(ttl_s=self._ttl_s, reason=DecisionReason.PRICED)
