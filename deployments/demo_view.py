"""What the demo shows: one line a program while they run, one row a program at the end. Pure rendering of program objects.

Without a terminal (a log, a pipe) the same lines are printed, each when it changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from deployments.cli_output import counts, program_duration_s, reused_share, seconds, state_and_why, styled_state

Json = Mapping[str, Any]


def label(program: Json) -> str:
    """The name that the submitter gave it, else its id."""
    return str(program["metadata"].get("name") or program["id"])


def live_table(programs: Sequence[Json]) -> Table:
    """Where every program is now."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("program", "turn", "state", "tool"):
        table.add_column(column, no_wrap=True)
    for column in ("prompt tokens", "output", "KV reused"):
        table.add_column(column, justify="right", no_wrap=True)
    for program in programs:
        usage = program["usage"]
        table.add_row(
            label(program),
            turn_of(program),
            styled_state(program["state"]),
            program["current_tool"] or "",
            str(usage["prompt_tokens"]),
            str(usage["output_tokens"]),
            f"{reused_share(usage):.0%}",
        )
    return table


def summary_table(programs: Sequence[Json]) -> Table:
    """What every program did and what its KV was worth."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("program", no_wrap=True)
    table.add_column("ended")
    for column in ("turns", "tools", "prompt", "reused", "recomputed", "output"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("leases")
    table.add_column("took", justify="right", no_wrap=True)
    for program in programs:
        usage = program["usage"]
        table.add_row(
            label(program),
            state_and_why(program),
            str(program["turns"]),
            seconds(program["tool_seconds"]),
            str(usage["prompt_tokens"]),
            str(usage["cached_tokens"]),
            str(usage["recomputed_tokens"]),
            str(usage["output_tokens"]),
            counts(program["leases"]),
            seconds(program_duration_s(program)),
        )
    return table


def totals(programs: Sequence[Json]) -> str:
    """The demo's point in one sentence."""
    usage = {
        name: sum(program["usage"][name] for program in programs)
        for name in ("prompt_tokens", "cached_tokens", "recomputed_tokens")
    }
    turns = sum(program["turns"] for program in programs)
    return (
        f"{len(programs)} programs took {turns} turns. Of {usage['prompt_tokens']} prompt tokens, "
        f"{usage['cached_tokens']} ({reused_share(usage):.0%}) came from KV that was still there; "
        f"{usage['recomputed_tokens']} had been computed before and were computed again."
    )


def turn_of(program: Json) -> str:
    """`2/4`: the turn that it is in, of its limit."""
    is_between = program["finished_at"] is not None or program["state"] == "queued"
    turn = program["turns"] + (0 if is_between or program["current_tool"] else 1)
    return f"{min(turn, program['limits']['max_turns'])}/{program['limits']['max_turns']}"


class ProgressView:
    """Shows the programs as they change. Use it in a `with`."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._shown: dict[str, str] = {}

    def __enter__(self) -> ProgressView:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, programs: Sequence[Json]) -> None:
        if self._live is not None:
            self._live.update(live_table(programs), refresh=True)
            return
        for program in programs:
            line = progress_line(program)
            if self._shown.get(program["id"]) != line:
                self._shown[program["id"]] = line
                self._console.print(line, markup=False)


def progress_line(program: Json) -> str:
    """`primes        turn 2/4  waiting_tool  python   412 prompt tokens, 38% from cached KV`"""
    usage = program["usage"]
    return (
        f"{label(program):<12} turn {turn_of(program)}  {program['state']:<12}  {program['current_tool'] or '':<10} "
        f"{usage['prompt_tokens']:>6} prompt tokens, {reused_share(usage):.0%} from cached KV"
    )
