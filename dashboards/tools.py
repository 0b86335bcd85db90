"""For whoever runs the tools: how long they take, what fails, are there sandboxes?"""

from __future__ import annotations

from dashboards.boards import Board, Panel, Query, Row, Show, quantile, quantiles, rate, total

_LE = 'le="{}"'
_TIMES = "continuum_tools_call_times_seconds"

BOARD = Board(
    name="tools",
    title="Continuum / Tools",
    description="How long tools take, what fails, and whether sandboxes are there.",
    rows=(
        Row(
            title="How long do they take?",
            panels=(
                Panel(
                    title="Distribution over time",
                    description="All calls. Two bands, one short and one long, are usual, and why a mean says little.",
                    unit="s",
                    show=Show.HEATMAP,
                    queries=(Query(expr=rate(f"{_TIMES}_bucket", by="le"), legend="{{le}}"),),
                ),
                Panel(
                    title="P95 by tool",
                    description="A shell's calls are filed under what it ran; rare ones are `other`.",
                    unit="s",
                    queries=(Query(expr=f"topk(10, {quantile(0.95, _TIMES, by='tool')})", legend="{{tool}}"),),
                ),
                Panel(
                    title="Share of calls done within a time",
                    description="Points of the CDF, over everything that ran.",
                    unit="percentunit",
                    queries=tuple(
                        Query(
                            expr=(f"{rate(f'{_TIMES}_bucket', _LE.format(bound))} / {rate(f'{_TIMES}_count')}"),
                            legend=f"within {bound} s",
                        )
                        for bound in ("0.1", "1.0", "10.0", "60.0")
                    ),
                ),
                Panel(
                    title="Calls by tool",
                    description="The ten that are called most.",
                    unit="ops",
                    show=Show.STACK,
                    queries=(Query(expr=f"topk(10, {rate(f'{_TIMES}_count', by='tool')})", legend="{{tool}}"),),
                ),
            ),
        ),
        Row(
            title="What fails?",
            panels=(
                Panel(
                    title="Calls by outcome",
                    description="`error` is an answer that the model reads; `timeout` and `interrupted` are worth a look.",
                    unit="ops",
                    show=Show.STACK,
                    queries=(
                        Query(expr=rate("continuum_tools_calls_ended_total", by="outcome"), legend="{{outcome}}"),
                    ),
                ),
                Panel(
                    title="MCP servers whose tools are missing",
                    description="By server; the log of the tool actor says why.",
                    bad_at=1,
                    queries=(Query(expr=total("continuum_tools_mcp_faults", by="server"), legend="{{server}}"),),
                ),
            ),
        ),
        Row(
            title="Do calls wait?",
            panels=(
                Panel(
                    title="Wait before a call runs",
                    description="For its session, a slot and a sandbox; no part of the tool's own time.",
                    unit="s",
                    queries=quantiles("continuum_tools_call_queue_seconds"),
                ),
                Panel(
                    title="Calls running and waiting",
                    description="Over all tool actors.",
                    show=Show.STACK,
                    queries=(
                        Query(expr=total("continuum_tools_calls_running"), legend="running"),
                        Query(expr=total("continuum_tools_calls_waiting"), legend="waiting"),
                    ),
                ),
            ),
        ),
        Row(
            title="Sandboxes",
            panels=(
                Panel(
                    title="Tool actors that can run tools",
                    description="An actor whose probes failed stays up and refuses.",
                    show=Show.NUMBER,
                    columns=6,
                    queries=(Query(expr=total("continuum_tools_ready")),),
                ),
                Panel(
                    title="Of them, isolated",
                    description="Actors whose backend isolates; the one that is unsafe by name does not.",
                    show=Show.NUMBER,
                    columns=6,
                    queries=(Query(expr=total("continuum_tools_isolates")),),
                ),
                Panel(
                    title="Sandboxes alive, and warm",
                    description="Warm ones wait for a program.",
                    queries=(
                        Query(expr=total("continuum_tools_live_sandboxes"), legend="alive"),
                        Query(expr=total("continuum_tools_sandboxes_warm"), legend="warm"),
                    ),
                ),
                Panel(
                    title="Started, claimed warm, closed for room",
                    description="Many closed for room: programs lose their shell's state; allow more sandboxes.",
                    unit="ops",
                    queries=(
                        Query(expr=rate("continuum_tools_sandboxes_started_total"), legend="started"),
                        Query(expr=rate("continuum_tools_sandboxes_claimed_warm_total"), legend="claimed warm"),
                        Query(expr=rate("continuum_tools_sandboxes_closed_for_room_total"), legend="closed for room"),
                    ),
                ),
                Panel(
                    title="Latency samples that the store has not got",
                    description="Waiting, and dropped while it was away.",
                    queries=(
                        Query(expr=total("continuum_tools_samples_buffered"), legend="waiting"),
                        Query(expr=rate("continuum_tools_samples_dropped_total"), legend="dropped a second"),
                    ),
                ),
            ),
        ),
    ),
)
