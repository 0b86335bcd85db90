"""For the operator: are programs fast, what holds them back, is memory well used, does everything run?"""

from __future__ import annotations

from dashboards.boards import SCOPE, Board, Panel, Query, Row, Show, journal_rate, mean, quantiles, rate, total

_STATE = 'state="{}"'
_ENDED = "continuum_programs_ended_total"

BOARD = Board(
    name="overview",
    title="Continuum / Overview",
    description="Are programs fast, what holds them back, and is memory well used?",
    rows=(
        Row(
            title="Now",
            panels=(
                Panel(
                    title="Programs running",
                    description="Programs that a runner has and that have not ended.",
                    show=Show.NUMBER,
                    columns=6,
                    queries=(Query(expr=total("continuum_runner_running")),),
                ),
                Panel(
                    title="Programs queued",
                    description="Accepted programs that no runner has taken. They wait for a free place in a runner.",
                    show=Show.NUMBER,
                    columns=6,
                    warn_at=20,
                    bad_at=100,
                    queries=(Query(expr=f'max(continuum_programs{{{SCOPE}, state="queued"}})'),),
                ),
                Panel(
                    title="Parts that do not answer",
                    description="Replicas that did not answer the last scrape, of any part.",
                    show=Show.NUMBER,
                    columns=6,
                    bad_at=1,
                    queries=(Query(expr=total("continuum_replicas_silent")),),
                ),
                Panel(
                    title="Store",
                    description="1: the store answers.",
                    show=Show.NUMBER,
                    columns=6,
                    queries=(Query(expr=f"min(continuum_store_up{{{SCOPE}}})"),),
                ),
            ),
        ),
        Row(
            title="Are programs fast?",
            panels=(
                Panel(
                    title="From submission to the end",
                    description="Whole programs, tool waits included.",
                    unit="s",
                    queries=quantiles("continuum_program_duration_seconds"),
                ),
                Panel(
                    title="Programs that ended, by reason",
                    description="`answer` is what one wants; limits end programs as completed too.",
                    unit="ops",
                    show=Show.STACK,
                    queries=(Query(expr=journal_rate(_ENDED, by="state, reason"), legend="{{state}} / {{reason}}"),),
                ),
                Panel(
                    title="First token of a turn",
                    description="From the arrival of a turn at its engine to its first token.",
                    unit="s",
                    queries=quantiles("vllm:time_to_first_token_seconds"),
                ),
                Panel(
                    title="Turns of a program",
                    description="The mean, of programs that ended.",
                    queries=(Query(expr=mean("continuum_program_length_turns"), legend="turns"),),
                ),
            ),
        ),
        Row(
            title="What holds them back?",
            panels=(
                Panel(
                    title="Where the time of programs goes",
                    description=(
                        "Seconds that programs spend each second, by what they do: the tallest layer is what to work on. Start: "
                        "waiting for a runner. Queue, prefill, decode: in the engines. Tools: waiting for tools."
                    ),
                    show=Show.STACK,
                    queries=(
                        Query(expr=rate("continuum_program_start_delay_seconds_sum"), legend="start"),
                        Query(expr=rate("vllm:request_queue_time_seconds_sum"), legend="queue"),
                        Query(expr=rate("vllm:request_prefill_time_seconds_sum"), legend="prefill"),
                        Query(expr=rate("vllm:request_decode_time_seconds_sum"), legend="decode"),
                        Query(expr=rate("continuum_program_tool_wait_seconds_sum"), legend="tools"),
                    ),
                ),
                Panel(
                    title="Programs by state",
                    description="Everything that has not been forgotten yet; ended programs are forgotten after a time.",
                    show=Show.STACK,
                    queries=(Query(expr=f"max by (state) (continuum_programs{{{SCOPE}}})", legend="{{state}}"),),
                ),
                Panel(
                    title="Refused requests, by code",
                    description="What clients were told: `overloaded` means that the platform sheds load.",
                    unit="ops",
                    show=Show.STACK,
                    queries=(Query(expr=rate("continuum_ingress_refusals_total", by="code"), legend="{{code}}"),),
                ),
                Panel(
                    title="Turns waiting and running",
                    description="In the engines' schedulers.",
                    show=Show.STACK,
                    queries=(Query(expr=total("continuum_engine_turns", by="state"), legend="{{state}}"),),
                ),
            ),
        ),
        Row(
            title="Is memory well used?",
            panels=(
                Panel(
                    title="KV tokens, by what holds them",
                    description="Running: by turns that run. Retained: for paused programs. Free: holds nothing, or what may go.",
                    show=Show.STACK,
                    queries=(
                        Query(
                            expr=(
                                f"{total('continuum_engine_kv_tokens', _STATE.format('total'))} - "
                                f"{total('continuum_engine_kv_tokens', _STATE.format('free'))} - "
                                f"{total('continuum_engine_kv_tokens', _STATE.format('retained'))}"
                            ),
                            legend="running",
                        ),
                        Query(expr=total("continuum_engine_kv_tokens", _STATE.format("retained")), legend="retained"),
                        Query(expr=total("continuum_engine_kv_tokens", _STATE.format("free")), legend="free"),
                    ),
                ),
                Panel(
                    title="Context found again, computed again",
                    description="Tokens a second that returning turns reused, computed again, or had loaded from a tier below.",
                    show=Show.STACK,
                    queries=(
                        Query(expr=rate("continuum_engine_context_tokens_total", by="kind"), legend="{{kind}}"),
                        Query(expr=rate("continuum_engine_loaded_tokens_total"), legend="loaded"),
                    ),
                ),
            ),
        ),
    ),
)
