"""For whoever scales replicas: is load balanced, do programs stay where their KV is, what is shed?"""

from __future__ import annotations

from dashboards.boards import SCOPE, Board, Panel, Query, Row, Show, rate, total

_PLACEMENTS = "continuum_router_placements_total"
_ENGINE = 'target="engine"'
_BOUND = ', reason="bound"'
_FREE, _TOTAL = 'state="free"', 'state="total"'
#: Placements that leave a replica behind.
_MOVED = 'target="engine", reason!~"bound|new|parent|previous|shared_prefix|unbound"'

BOARD = Board(
    name="router",
    title="Continuum / Router",
    description="Whether programs stay where their KV is, whether load is balanced, what is shed.",
    rows=(
        Row(
            title="Do programs stay?",
            panels=(
                Panel(
                    title="Turns that went where their program is",
                    description="Of the turns of programs that had a replica already. The rest computes its context again.",
                    unit="percentunit",
                    queries=(
                        Query(
                            expr=(
                                f"{rate(_PLACEMENTS, _ENGINE + _BOUND)} / "
                                f"({rate(_PLACEMENTS, _ENGINE + _BOUND)} + {rate(_PLACEMENTS, _MOVED)})"
                            ),
                            legend="stayed",
                        ),
                    ),
                ),
                Panel(
                    title="Placements by reason",
                    description="`bound` apart: a program's first placement, and every one that moves it.",
                    unit="ops",
                    show=Show.STACK,
                    queries=(
                        Query(expr=rate(_PLACEMENTS, _ENGINE + ', reason!="bound"', by="reason"), legend="{{reason}}"),
                    ),
                ),
                Panel(
                    title="Programs moved",
                    description="Off a replica that is lost, draining or suspect, or because elsewhere is quicker.",
                    unit="ops",
                    show=Show.STACK,
                    queries=(Query(expr=rate(_PLACEMENTS, _MOVED, by="reason"), legend="{{reason}}"),),
                ),
                Panel(
                    title="Turns replayed",
                    description="Turns that ran again because their replica was lost.",
                    unit="ops",
                    queries=(
                        Query(
                            expr=f"max(rate(continuum_program_turns_replayed_total{{{SCOPE}}}[$__rate_interval]))",
                            legend="replayed",
                        ),
                    ),
                ),
            ),
        ),
        Row(
            title="Is load balanced?",
            panels=(
                Panel(
                    title="Turns by replica",
                    description="Running and waiting. One line far above the others is a hot replica.",
                    queries=(Query(expr=total("continuum_engine_turns", by="replica"), legend="{{replica}}"),),
                ),
                Panel(
                    title="KV in use by replica",
                    description="Share of the pool that is not free.",
                    unit="percentunit",
                    queries=(
                        Query(
                            expr=(
                                f"1 - {total('continuum_engine_kv_blocks', _FREE, by='replica')} / "
                                f"{total('continuum_engine_kv_blocks', _TOTAL, by='replica')}"
                            ),
                            legend="{{replica}}",
                        ),
                    ),
                ),
                Panel(
                    title="Queued tokens by replica",
                    description="Prompt tokens of waiting turns.",
                    queries=(Query(expr=total("continuum_engine_queued_tokens", by="replica"), legend="{{replica}}"),),
                ),
                Panel(
                    title="Calls by tool actor",
                    description="Running; a program's calls go where its sandbox is.",
                    queries=(Query(expr=total("continuum_tools_calls_running", by="replica"), legend="{{replica}}"),),
                ),
            ),
        ),
        Row(
            title="Bindings and the store",
            panels=(
                Panel(
                    title="Bindings known",
                    description="By process that routes; the store has them all.",
                    queries=(
                        Query(
                            expr=total("continuum_router_bindings", by="target, replica"),
                            legend="{{target}} in {{replica}}",
                        ),
                    ),
                ),
                Panel(
                    title="Decided without the store",
                    description="Bindings that it has still to confirm, and routers that find it away.",
                    bad_at=1,
                    queries=(
                        Query(expr=total("continuum_router_unconfirmed_bindings"), legend="unconfirmed"),
                        Query(expr=total("continuum_router_store_away"), legend="routers without it"),
                    ),
                ),
            ),
        ),
        Row(
            title="What is shed?",
            panels=(
                Panel(
                    title="Refused as overloaded",
                    description="429 and 503 with Retry-After: the platform is full, or a part is away.",
                    unit="ops",
                    queries=(
                        Query(
                            expr=rate(
                                "continuum_ingress_refusals_total", 'code=~"overloaded|.*_unavailable"', by="code"
                            ),
                            legend="{{code}}",
                        ),
                    ),
                ),
                Panel(
                    title="Places in runners",
                    description="Programs that runners run, and may run at once; at the limit, programs queue.",
                    queries=(
                        Query(expr=total("continuum_runner_running"), legend="running"),
                        Query(expr=total("continuum_runner_running_max"), legend="limit"),
                    ),
                ),
            ),
        ),
    ),
)
