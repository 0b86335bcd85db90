"""Results of replays as `CellResult.to_dict` has them, made by hand: what reports are tested with."""

from typing import Any

_CAUSES = ("queue", "load", "prefill", "decode", "preempted", "tool", "lost")


def result(
    policy: str,
    mean_s: float,
    *,
    load: float | None = 1.0,
    seed: int = 1,
    reused: float = 1.0,
    queue_s: float = 0.0,
    first_token_s: float = 1.0,
    **fields: Any,
) -> dict[str, Any]:
    """One run without its rows."""
    figures = {"mean": mean_s, "p50": mean_s, "p95": 2 * mean_s, "p99": 3 * mean_s, "max": 4 * mean_s}
    return {
        "workload": "w",
        "deployment": "d",
        "tier": "none",
        "policy": policy,
        "replicas": 1,
        "uncalibrated_because": [],
        "load": load,
        "rate_per_s": 0.5,
        "seed": seed,
        "kv_tokens": 1000,
        "left_out": {},
        "programs": 2,
        "turns": 4,
        "completion_s": figures,
        "first_token_s": dict.fromkeys(figures, first_token_s),
        "slowdown": figures,
        "programs_per_s": 1.0,
        "makespan_s": 100.0,
        "steps": 10,
        "recomputed_tokens": 10,
        "reused_fraction": reused,
        "preemptions": 0,
        "seconds_by_cause": dict.fromkeys(_CAUSES, 0.0) | {"queue": queue_s, "decode": mean_s - queue_s},
        **fields,
    }


def result_with_rows(policy: str, mean_s: float, **fields: Any) -> dict[str, Any]:
    """One run with two programs, a sub-agent, three samples of the cache and two waits."""
    programs = [
        {"program_id": name, "is_root": is_root, "completion_s": seconds, "first_token_s": 0.1}
        | {f"{cause}_s": 0.0 for cause in _CAUSES}
        | {"decode_s": seconds}
        for name, is_root, seconds in (("a", True, 0.5 * mean_s), ("b", True, 1.5 * mean_s), ("b.0", False, 1.0))
    ]
    occupancy = [
        {
            "at_s": at_s,
            "blocks_total": 100,
            "blocks_running": running,
            "blocks_retained": 20,
            "blocks_cached": 10,
            "blocks_free": 70 - running,
            "turns_running": 1,
            "turns_waiting": 0,
        }
        for at_s, running in ((0.0, 10), (1.0, 60), (2.0, 5))
    ]
    waits = [
        {"tool": "bash", "reason": "tool_history", "ttl_s": 2.0, "waited_s": 1.0},
        {"tool": "bash", "reason": "tool_history", "ttl_s": 2.0, "waited_s": 5.0},
        {"tool": "bash", "reason": "priced", "ttl_s": None, "waited_s": 5.0},
    ]
    part = {"waits": 2, "within": 0.5, "ttl_s_mean": 2.0, "waited_s_mean": 3.0}
    calibration = {**part, "by_reason": {"tool_history": part}}
    return result(
        policy,
        mean_s,
        by_program=programs,
        occupancy=occupancy,
        ttl_rows=waits,
        ttl_calibration=calibration,
        scheduler=[{}],
        **fields,
    )
