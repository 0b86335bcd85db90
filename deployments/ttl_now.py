"""What an engine's running policy would do with a program's KV if a turn called a tool now. Pure.

The policies are the engine's (`engine_replicas/retention/policy.py`); here they are told from the engine's statistics and the shared
history. Only the paper's (`continuum`) computes a time from them. `adaptive` keeps everything until a waiting turn brings more than
it is worth, so it has a price and no time; what the paper would do goes beside it under `paper`, as a comparison.

Two things are approximate: the statistics have costs for 1,000 tokens, which are scaled here, and an engine may have seen samples
that the store lacks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agent_program.ids import ToolKey
from engine_replicas.config import RetentionName
from engine_replicas.retention.policy import DecisionReason
from engine_replicas.retention.reclaim import HAZARD_AGE_S_MIN
from engine_replicas.retention.tool_latency import ToolLatencyView
from engine_replicas.retention.ttl_argmax import cold_start_ttl
from tool_runtime.latency import LatencySnapshot

#: Tokens that a context is taken to have where nobody says, unless the engine's model takes fewer.
CONTEXT_TOKENS_USUAL = 8192
_ESTIMATES = ("queueing_delay_s", "eta", "prefill_reload_s_per_1k")
Plain = dict[str, Any]


def ttl_now(
    tool: str, snapshot: LatencySnapshot, stats: Mapping[str, Any], *, context_tokens: int | None, k_cold_start: int
) -> Plain | None:
    """What the running policy would do, as plain values; None where the engine estimates nothing.

    `policy` is the running one, `decision` its reason. `ttl_s` is how long KV would be kept, in seconds: None where that is no fixed
    time. `price` is there where leases have one (see `_price`), and `ttl_max_s` is the longest that any lease lasts. `paper` has what
    the paper's formula says, whichever policy runs.
    """
    if any(stats.get(name) is None for name in _ESTIMATES):
        return None
    tokens = context_tokens or min(CONTEXT_TOKENS_USUAL, int(stats.get("context_tokens_max") or CONTEXT_TOKENS_USUAL))
    paper = _paper(tool, snapshot, stats, context_tokens=tokens, k_cold_start=k_cold_start)
    return {
        "policy": stats.get("retention"),
        "context_tokens": tokens,
        "ttl_max_s": stats.get("ttl_max_s"),
        **_running(stats, paper, tokens),
        "paper": paper,
    }


def _running(stats: Mapping[str, Any], paper: Mapping[str, Any], context_tokens: int) -> Plain:
    """What the policy that the engine runs decides."""
    match stats.get("retention"):
        case RetentionName.CONTINUUM:
            ttl_s, ttl_max_s = paper["ttl_s"], stats.get("ttl_max_s")
            kept_s = ttl_s if ttl_max_s is None else min(ttl_s, ttl_max_s)
            return {"decision": paper["decision"], "ttl_s": kept_s}
        case RetentionName.ADAPTIVE if stats.get("is_reload_cheap"):
            return {"decision": DecisionReason.RELOAD_IS_CHEAP.value, "ttl_s": 0.0}
        case RetentionName.ADAPTIVE:
            return {"decision": DecisionReason.PRICED.value, "ttl_s": None, "price": _price(stats, context_tokens)}
        case RetentionName.END_OF_TURN:
            return {"decision": DecisionReason.END_OF_TURN.value, "ttl_s": 0.0}
        case RetentionName.STATIC_TTL:
            return {"decision": DecisionReason.STATIC.value, "ttl_s": None}
        case RetentionName.INFERCEPT:
            return {"decision": DecisionReason.LEAST_WASTE.value, "ttl_s": None}
        case _:
            return {"decision": None, "ttl_s": None}


def _price(stats: Mapping[str, Any], context_tokens: int) -> Plain | None:
    """What a waiting turn has to bring more than (`CheapestFirst`); None before the engine knows what a recompute costs.

    `benefit_s` is what everybody would wait if the KV were gone. The price is that times the chance that the program is back within
    the next second, 1 / (seconds away): `at_start` when the tool has just begun, in seconds saved a second, and falling since.
    """
    benefit_s = float(stats.get("stall_s_per_1k") or 0.0) * context_tokens / 1000
    return {"benefit_s": benefit_s, "at_start": benefit_s / HAZARD_AGE_S_MIN} if benefit_s > 0 else None


def _paper(
    tool: str, snapshot: LatencySnapshot, stats: Mapping[str, Any], *, context_tokens: int, k_cold_start: int
) -> Plain:
    """The paper's TTL in its three stages, as `Continuum` decides, without the engine's longest time."""
    # As the engine reads a snapshot: none of its own samples, and room for every tool.
    view = ToolLatencyView(window=8, tools_max=len(snapshot.tools) + 1)
    view.take_snapshot(snapshot.to_dict())
    everything, of_tool = view.all_tools(), view.of_tool(ToolKey(tool))
    delay_s = float(stats["queueing_delay_s"])
    reload_s = float(stats["prefill_reload_s_per_1k"]) * context_tokens / 1000
    is_cold, is_tool_known = everything.count <= k_cold_start, of_tool.count > k_cold_start
    durations = of_tool if is_tool_known and not is_cold else everything
    eta = 1.0 if is_cold else float(stats["eta"])
    inputs: Plain = {
        "context_tokens": context_tokens,
        "queueing_delay_s": delay_s,
        "eta": eta,
        "prefill_reload_s": reload_s,
        "benefit_s": delay_s * eta + reload_s,
        "samples": durations.count,
    }
    if is_cold:
        reason, ttl_s = DecisionReason.COLD_START, cold_start_ttl(inputs["benefit_s"])
    else:
        reason = DecisionReason.TOOL_HISTORY if is_tool_known else DecisionReason.GLOBAL_HISTORY
        best = durations.best_ttl(inputs["benefit_s"])
        ttl_s, inputs["return_probability"] = best.ttl_s, best.return_probability
    return {"ttl_s": ttl_s, "decision": reason.value, "inputs": inputs}
