"""The time that the paper's policy would retain KV for a tool if a turn called it now. Pure.

The same three stages and the same formula as the engine's own policy (`engine_replicas/retention/policy.py`, `Continuum`), over the
shared history and one engine's estimates as its statistics tell them. Two things are approximate, and said to be: the statistics
have the cost of a recompute for 1,000 tokens, which is scaled here, and an engine may have seen samples that the store lacks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agent_program.ids import ToolKey
from engine_replicas.retention.policy import DecisionReason
from engine_replicas.retention.tool_latency import ToolLatencyView
from engine_replicas.retention.ttl_argmax import cold_start_ttl
from tool_runtime.latency import LatencySnapshot

CONTEXT_TOKENS_DEFAULT = 8192
_ESTIMATES = ("queueing_delay_s", "eta", "prefill_reload_s_per_1k")


def ttl_now(
    tool: str, snapshot: LatencySnapshot, stats: Mapping[str, Any], *, context_tokens: int, k_cold_start: int
) -> dict[str, Any] | None:
    """The TTL and its inputs, as plain values; None where the engine estimates nothing (nothing is retained there)."""
    if any(stats.get(name) is None for name in _ESTIMATES):
        return None
    # As the engine reads a snapshot: none of its own samples, and room for every tool.
    view = ToolLatencyView(window=8, tools_max=len(snapshot.tools) + 1)
    view.take_snapshot(snapshot.to_dict())
    everything, of_tool = view.all_tools(), view.of_tool(ToolKey(tool))
    delay_s = float(stats["queueing_delay_s"])
    reload_s = float(stats["prefill_reload_s_per_1k"]) * context_tokens / 1000
    is_cold, is_tool_known = everything.count <= k_cold_start, of_tool.count > k_cold_start
    durations = of_tool if is_tool_known and not is_cold else everything
    eta = 1.0 if is_cold else float(stats["eta"])
    inputs: dict[str, Any] = {
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
    return {
        "policy": "continuum",
        "engine_policy": stats.get("retention"),
        "ttl_s": ttl_s,
        "decision": reason.value,
        "inputs": inputs,
    }
