"""For whoever asks why one program was slow. Metrics never carry a program's id, so its own story is its trace; beside it stands
what is usual, to compare with."""

from __future__ import annotations

from dashboards.boards import Board, Panel, Query, Row, Show, mean, quantile

_LINKS = """\
**Program** `${program}` at `${url}`

- [Trace](${url}/v1/programs/${program}/trace): its turns, tools and leases as Chrome trace JSON. Save it and open it in
  [Perfetto](https://ui.perfetto.dev).
- [Explanation](${url}/v1/programs/${program}/explain): why its KV was kept or dropped, and where it is.
- [Journal](${url}/v1/programs/${program}?include=journal): every step.

Without a browser: `continuum programs show ${program} --explain`. Where traces are exported (`telemetry.otlp_endpoint`), search
your tracing system for `gen_ai.conversation.id = ${program}`.
"""

_PHASES = (
    ("queue", "vllm:request_queue_time_seconds"),
    ("prefill", "vllm:request_prefill_time_seconds"),
    ("decode", "vllm:request_decode_time_seconds"),
)

BOARD = Board(
    name="program",
    title="Continuum / One program",
    description="From a program's id to its trace, and what is usual to compare it with.",
    text_boxes={"program": "PROGRAM_ID", "url": "http://127.0.0.1:8000"},
    rows=(
        Row(
            title="Its story",
            panels=(
                Panel(
                    title="Where to look",
                    description="Put the program's id and the platform's address into the boxes above.",
                    show=Show.TEXT,
                    columns=24,
                    content=_LINKS,
                ),
            ),
        ),
        Row(
            title="What is usual",
            panels=(
                Panel(
                    title="Phases of a turn, mean",
                    description="In the engine.",
                    unit="s",
                    show=Show.STACK,
                    queries=tuple(Query(expr=mean(metric), legend=phase) for phase, metric in _PHASES),
                ),
                Panel(
                    title="Phases of a turn, P95",
                    description="In the engine.",
                    unit="s",
                    queries=tuple(Query(expr=quantile(0.95, metric), legend=phase) for phase, metric in _PHASES),
                ),
                Panel(
                    title="Tool wait between two turns",
                    description="Median and P95.",
                    unit="s",
                    queries=(
                        Query(expr=quantile(0.5, "continuum_program_tool_wait_seconds"), legend="P50"),
                        Query(expr=quantile(0.95, "continuum_program_tool_wait_seconds"), legend="P95"),
                    ),
                ),
                Panel(
                    title="Wait for a runner, and a whole turn",
                    description="P95 as the runner sees them.",
                    unit="s",
                    queries=(
                        Query(expr=quantile(0.95, "continuum_program_start_delay_seconds"), legend="start"),
                        Query(expr=quantile(0.95, "continuum_program_turn_seconds"), legend="turn"),
                    ),
                ),
            ),
        ),
    ),
)
