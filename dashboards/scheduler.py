"""For whoever tunes retention and order: leases, deadlines, prices, the queue."""

from __future__ import annotations

from dashboards.boards import SCOPE, Board, Panel, Query, Row, Show, mean, quantile, quantiles, rate, total

_RETURNED = 'outcome="returned"'
_PREDICTIONS = "continuum_engine_ttl_predictions_total"


def _gauge(metric: str) -> str:
    return f"{metric}{{{SCOPE}}}"


BOARD = Board(
    name="scheduler",
    title="Continuum / Scheduler",
    description="Leases on KV, how good their deadlines are, what memory costs, and who waits.",
    rows=(
        Row(
            title="Leases",
            panels=(
                Panel(
                    title="How leases end",
                    description="Reused is what they are for. Expired: kept in vain. Reclaimed: a turn needed the memory more.",
                    unit="ops",
                    show=Show.STACK,
                    queries=(Query(expr=rate("continuum_engine_leases_total", by="outcome"), legend="{{outcome}}"),),
                ),
                Panel(
                    title="Why",
                    description="The same, by reason. `outbid`: a waiting turn brought more than the lease was worth.",
                    unit="ops",
                    show=Show.STACK,
                    queries=(Query(expr=rate("continuum_engine_lease_ends_total", by="reason"), legend="{{reason}}"),),
                ),
                Panel(
                    title="Leases held",
                    description="By replica.",
                    queries=(Query(expr=total("continuum_engine_live_leases", by="replica"), legend="{{replica}}"),),
                ),
                Panel(
                    title="Turns after which nothing was retained",
                    description="By reason; `not_worth_it` is the policy's own choice.",
                    unit="ops",
                    show=Show.STACK,
                    queries=(
                        Query(expr=rate("continuum_engine_not_retained_total", by="reason"), legend="{{reason}}"),
                    ),
                ),
            ),
        ),
        Row(
            title="Are the deadlines right?",
            panels=(
                Panel(
                    title="Back within the deadline",
                    description=(
                        "The share of armed leases whose program came back in time, and the share that the policy expected. Where the two "
                        "part, its tool times are wrong or old."
                    ),
                    unit="percentunit",
                    queries=(
                        Query(
                            expr=(
                                f"{rate('continuum_engine_ttl_outcomes_total', _RETURNED)} / "
                                f"{rate('continuum_engine_ttl_outcomes_total')}"
                            ),
                            legend="came back",
                        ),
                        Query(
                            expr=f"{rate('continuum_engine_ttl_predicted_returns_total')} / {rate(_PREDICTIONS)}",
                            legend="expected",
                        ),
                    ),
                ),
                Panel(
                    title="Brier score",
                    description="Mean squared error of the expected probability: 0 is perfect, 0.25 a coin.",
                    warn_at=0.2,
                    bad_at=0.25,
                    queries=(
                        Query(
                            expr=f"{rate('continuum_engine_ttl_squared_errors_total')} / {rate(_PREDICTIONS)}",
                            legend="score",
                        ),
                    ),
                ),
                Panel(
                    title="Deadlines chosen, time really away",
                    description="Medians and P95. Programs that never came back in time are in neither of the second pair.",
                    unit="s",
                    queries=(
                        Query(expr=quantile(0.5, "continuum_engine_lease_ttl_seconds"), legend="deadline P50"),
                        Query(expr=quantile(0.95, "continuum_engine_lease_ttl_seconds"), legend="deadline P95"),
                        Query(expr=quantile(0.5, "continuum_engine_lease_away_seconds"), legend="away P50"),
                        Query(expr=quantile(0.95, "continuum_engine_lease_away_seconds"), legend="away P95"),
                    ),
                ),
                Panel(
                    title="Age of the tool times",
                    description="Since the store last confirmed the history that each scheduler has.",
                    unit="s",
                    warn_at=60,
                    bad_at=300,
                    queries=(
                        Query(
                            expr=total("continuum_engine_latency_snapshot_age_seconds", by="replica"),
                            legend="{{replica}}",
                        ),
                    ),
                ),
            ),
        ),
        Row(
            title="What does memory cost?",
            panels=(
                Panel(
                    title="To have 1000 tokens of context back",
                    description="Computed, and with what tiers below the GPU give back. What a lost lease costs.",
                    unit="s",
                    queries=(
                        Query(
                            expr=f"avg({_gauge('continuum_engine_prefill_seconds_per_1k_tokens')})", legend="computed"
                        ),
                        Query(
                            expr=f"avg({_gauge('continuum_engine_reload_seconds_per_1k_tokens')})", legend="with tiers"
                        ),
                    ),
                ),
                Panel(
                    title="T and eta",
                    description="The paper's: mean queueing delay of a turn whose KV was evicted, and how far the past tells the rest.",
                    queries=(
                        Query(expr=f"avg({_gauge('continuum_engine_queueing_delay_seconds')})", legend="T, seconds"),
                        Query(expr=f"avg({_gauge('continuum_engine_eta_ratio')})", legend="eta"),
                    ),
                ),
                Panel(
                    title="Retained, and reclaimable at once",
                    description="The difference is held for turns that are in the queue already.",
                    queries=(
                        Query(expr=total("continuum_engine_kv_tokens", 'state="retained"'), legend="retained"),
                        Query(expr=total("continuum_engine_kv_tokens", 'state="reclaimable"'), legend="reclaimable"),
                    ),
                ),
                Panel(
                    title="Preemptions",
                    description="Running turns that lost their KV. Leases are taken first, so this should be near zero.",
                    unit="ops",
                    queries=(Query(expr=rate("vllm:num_preemptions_total"), legend="preemptions"),),
                ),
            ),
        ),
        Row(
            title="What would the shadow policy do?",
            panels=(
                Panel(
                    title="Context it would save, and lose",
                    description="Only with `scheduling.shadow`. Tokens a second; the second is an upper bound.",
                    queries=(
                        Query(expr=rate("continuum_engine_shadow_saved_tokens_total"), legend="saved"),
                        Query(expr=rate("continuum_engine_shadow_lost_tokens_total"), legend="lost, at most"),
                    ),
                ),
                Panel(
                    title="KV that leases hold",
                    description="Blocks, on average: by the policy that acts and by the one that looks on.",
                    queries=(
                        Query(
                            expr=rate("continuum_engine_shadow_block_seconds_total", by="policy"), legend="{{policy}}"
                        ),
                    ),
                ),
            ),
        ),
        Row(
            title="Who waits?",
            panels=(
                Panel(
                    title="Wait in the engine's queue",
                    description="From a turn's arrival to its first step.",
                    unit="s",
                    queries=quantiles("vllm:request_queue_time_seconds"),
                ),
                Panel(
                    title="Held back, and overdue",
                    description="Waiting turns of programs that admission has not let in, and turns that waited too long and go first.",
                    queries=(
                        Query(expr=total("continuum_engine_unadmitted_turns"), legend="not admitted"),
                        Query(expr=total("continuum_engine_overdue_turns"), legend="overdue"),
                    ),
                ),
                Panel(
                    title="Lane for first turns",
                    description="Tokens of first turns that run ahead of everybody.",
                    queries=(Query(expr=total("continuum_engine_lane_tokens", by="replica"), legend="{{replica}}"),),
                ),
                Panel(
                    title="Time to schedule a step",
                    description="vLLM's part and ours; an engine's step takes milliseconds.",
                    unit="s",
                    queries=(
                        *quantiles("continuum_engine_schedule_seconds"),
                        Query(expr=mean("continuum_engine_schedule_seconds"), legend="mean"),
                    ),
                ),
            ),
        ),
    ),
)
