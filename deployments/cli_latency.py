"""`continuum tools latency NAME`: how long one tool takes, as a curve in the terminal, and what the scheduler makes of it."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.text import Text

from deployments.cli_output import seconds

Json = Mapping[str, Any]

_ROWS, _BAR_COLUMNS = 12, 40
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_STAGES = {
    "cold_start": "too few calls of any tool are known yet",
    "global_history": "by the times of all tools, since too few of this one are known",
    "tool_history": "by this tool's own times",
}
_WITHOUT_A_TIME = {
    "priced": "kept until a waiting turn brings more",
    "reload_is_cheap": "not held, since a tier below brings it back at next to no cost",
    "end_of_turn": "not kept",
    "static": "kept for the same time after every turn (scheduling.ttl_s)",
    "least_waste": "kept while that wastes less memory than a recompute would",
}


def latency_lines(found: Json) -> Iterator[Text]:
    """The curve, then two lines for each engine: what it would do now, and what the paper's formula comes to."""
    points: Sequence[float] = found.get("quantiles_s") or []
    censored = found["censored_count"]
    yield Text.assemble(
        (found["tool"], "bold"), f"  {found['count']} calls" + (f", {censored} cut off" if censored else "")
    )
    if points:
        yield from cdf(points, marks=[entry["ttl_s"] or 0.0 for entry in found.get("ttl_now") or []])
    for entry in found.get("ttl_now") or []:
        yield _running_line(entry)
        yield _paper_line(entry)


def cdf(points: Sequence[float], *, marks: Sequence[float] = (), rows: int = _ROWS) -> Iterator[Text]:
    """The share of calls that ended within each of some times: one row a time, evenly spaced on a logarithmic scale.

    `points` are equally probable durations, ascending; rows at which a time of `marks` has passed for the first time are
    marked with ◂.
    """
    times = _times(points, rows)
    previous = -1.0
    for time_s in times:
        share = bisect_right(points, time_s) / len(points)
        is_marked = any(previous < mark <= time_s for mark in marks if mark > 0)
        line = Text(f"{seconds(time_s):>9} ")
        line.append(_bar(share), style="cyan")
        line.append(f" {share:4.0%}")
        line.append(" ◂ kept until here" if is_marked else "", style="bold")
        yield line
        previous = time_s


def _times(points: Sequence[float], rows: int) -> list[float]:
    low, high = max(points[0], 1e-3), max(points[-1], 1e-3)
    if high <= low * 1.01:
        return [high]
    step = (math.log(high) - math.log(low)) / (rows - 1)
    # The last is the longest itself, which a rounded power might miss.
    return [*(low * math.exp(step * row) for row in range(rows - 1)), high]


def _bar(share: float) -> str:
    eighths = round(share * _BAR_COLUMNS * 8)
    whole, rest = divmod(eighths, 8)
    bar = "█" * whole + (_EIGHTHS[rest] if rest else "")
    return f"{bar:<{_BAR_COLUMNS}}"


def _running_line(entry: Json) -> Text:
    line = Text.assemble(
        (f"{entry['replica']} ({entry['policy'] or 'policy unknown'}): ", "dim"),
        f"after this tool a context of {entry['context_tokens']:,} tokens would be ",
    )
    if entry["decision"] in _STAGES:
        return line.append("kept ").append(seconds(entry["ttl_s"]), style="bold")
    line.append(_WITHOUT_A_TIME.get(entry["decision"], "treated as that policy has it"), style="bold")
    if entry["decision"] == "priced":
        line.append(_price(entry))
    return line


def _price(entry: Json) -> str:
    price, ttl_max_s = entry.get("price"), entry.get("ttl_max_s")
    longest = f", {seconds(ttl_max_s)} at most" if ttl_max_s is not None else ""
    if price is None:
        return f"{longest}; price not known yet"
    return (
        f"{longest}; price now {price['at_start']:.3g} s saved a second ({seconds(price['benefit_s'])} of everybody's time if it is "
        "gone), falling with the time that it is away"
    )


def _paper_line(entry: Json) -> Text:
    paper, is_running = entry["paper"], entry["decision"] in _STAGES
    inputs = paper["inputs"]
    return Text.assemble(
        ("  by " if is_running else "  for comparison, ", "dim"),
        f"the paper's formula{': ' if is_running else ' would keep it '}{seconds(paper['ttl_s'])}",
        f" ({_STAGES.get(paper['decision'], paper['decision'])}; recompute {seconds(inputs['prefill_reload_s'])}, "
        f"queueing {seconds(inputs['queueing_delay_s'])}, eta {inputs['eta']:.2f})",
    )
