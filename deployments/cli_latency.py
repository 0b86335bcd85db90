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
_DECISIONS = {
    "cold_start": "too few calls of any tool are known yet",
    "global_history": "by the times of all tools, since too few of this one are known",
    "tool_history": "by this tool's own times",
}


def latency_lines(found: Json) -> Iterator[Text]:
    """The curve, then one line for each engine."""
    points: Sequence[float] = found.get("quantiles_s") or []
    censored = found["censored_count"]
    yield Text.assemble(
        (found["tool"], "bold"), f"  {found['count']} calls" + (f", {censored} cut off" if censored else "")
    )
    if points:
        yield from cdf(points, marks=[entry["ttl_s"] for entry in found.get("ttl_now") or []])
    for entry in found.get("ttl_now") or []:
        yield _ttl_line(entry)


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


def _ttl_line(entry: Json) -> Text:
    inputs = entry["inputs"]
    return Text.assemble(
        (f"{entry['replica']}: ", "dim"),
        "after this tool a context of ",
        f"{inputs['context_tokens']:,} tokens would be kept ",
        (seconds(entry["ttl_s"]), "bold"),
        f" ({_DECISIONS.get(entry['decision'], entry['decision'])}; recompute {seconds(inputs['prefill_reload_s'])}, "
        f"queueing {seconds(inputs['queueing_delay_s'])}, eta {inputs['eta']:.2f})",
    )
