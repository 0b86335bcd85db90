"""The plots of a replay report, each a small panel: what a phone shows one below the other, a screen shows side by side."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.replay.comparison import Row, load_name
from benchmarks.svg import colours, new_figure, styled, to_svg

Result = Mapping[str, Any]

CAUSES = {
    "queue": "#d4526e",
    "load": "#b06bd6",
    "prefill": "#e08a1e",
    "decode": "#3b82d9",
    "preempted": "#8d6e3f",
    "lost": "#5c5f66",
    "tool": "#9fb0bd",
}
STATES = {
    "blocks_running": ("running", "#3b82d9"),
    "blocks_retained": ("retained", "#2f9e6e"),
    "blocks_cached": ("cached, not held", "#e3b341"),
}
#: Waits and time to live below this are drawn here: a logarithmic axis has no zero.
_SHORTEST_S = 0.01


def completion_panels(results: Sequence[Result]) -> list[str]:
    """Completion times, a panel a load: which share of the programs ended within so many seconds."""
    return [_completion(load, group) for load, group in _by_load(results).items()]


def _completion(load: str, results: Sequence[Result]) -> str:
    with styled():
        figure, (axes,) = new_figure()
        for policy, group in _by_policy(results).items():
            times = sorted(row["completion_s"] for result in group for row in _roots(result))
            shares = [(index + 1) / len(times) for index in range(len(times))]
            axes.step(times, shares, where="post", color=colours(_policies(results))[policy], label=policy)
        axes.set(title=_at(load), xlabel="completion time, s", ylabel="share of programs", ylim=(0, 1))
        axes.legend(loc="lower right")
        return to_svg(figure, title=f"Completion times, {_at(load)}")


def cause_panels(results: Sequence[Result]) -> list[str]:
    """Where a program's time goes, on average, a panel a load."""
    return [_causes(load, group) for load, group in _by_load(results).items()]


def _causes(load: str, results: Sequence[Result]) -> str:
    groups = _by_policy(results)
    with styled():
        figure, (axes,) = new_figure(height_in=1.5 + 0.34 * len(groups))
        names = list(groups)[::-1]
        left = [0.0] * len(names)
        for cause, colour in CAUSES.items():
            seconds = [_mean(r["seconds_by_cause"].get(cause, 0.0) for r in groups[name]) for name in names]
            if any(seconds):
                axes.barh(names, seconds, left=left, color=colour, label=cause, height=0.7)
                left = [start + value for start, value in zip(left, seconds, strict=True)]
        axes.grid(visible=False, axis="y")
        axes.set(title=_at(load), xlabel="seconds a program")
        figure.legend(loc="outside lower center", ncols=4)
        return to_svg(figure, title=f"Time by cause, {_at(load)}")


def program_panels(results: Sequence[Result]) -> list[str]:
    """Time by cause of each program, shortest first, a panel a policy; at the highest load, first seed."""
    return [_programs(result) for result in _heaviest(results)]


def _programs(result: Result) -> str:
    rows = sorted(_roots(result), key=lambda row: row["completion_s"])
    with styled():
        figure, (axes,) = new_figure()
        bottom = [0.0] * len(rows)
        for cause, colour in CAUSES.items():
            seconds = [row.get(f"{cause}_s", 0.0) for row in rows]
            if any(seconds):
                axes.bar(range(len(rows)), seconds, bottom=bottom, width=1.02, color=colour, label=cause, linewidth=0)
                bottom = [start + value for start, value in zip(bottom, seconds, strict=True)]
        axes.grid(visible=False, axis="x")
        axes.set(title=f"{result['policy']}, {_at(load_name(result))}", xlabel="programs, shortest first", ylabel="s")
        axes.set_xticks([])
        axes.legend(loc="upper left")
        return to_svg(figure, title=f"Time by cause of each program, {result['policy']}")


def occupancy_panels(results: Sequence[Result]) -> list[str]:
    """The KV cache over time by state, a panel a policy; at the highest load, first seed."""
    return [_occupancy(result) for result in _heaviest(results) if result.get("occupancy")]


def _occupancy(result: Result) -> str:
    samples = result["occupancy"]
    times = [sample["at_s"] for sample in samples]
    with styled():
        figure, (axes,) = new_figure()
        axes.stackplot(
            times,
            *([100 * sample[key] / max(1, sample["blocks_total"]) for sample in samples] for key in STATES),
            colors=[colour for _, colour in STATES.values()],
            labels=[name for name, _ in STATES.values()],
            linewidth=0,
        )
        axes.set(
            title=f"{result['policy']}, {_at(load_name(result))}",
            xlabel="time, s",
            ylabel="% of KV blocks",
            ylim=(0, 100),
        )
        axes.set_xlim(times[0], max(times[-1], times[0] + 1e-6))
        figure.legend(loc="outside lower center", ncols=3)
        return to_svg(figure, title=f"KV cache over time, {result['policy']}")


def ttl_panels(results: Sequence[Result]) -> list[str]:
    """How long KV was to be kept against how long the program was away, a panel a policy that set deadlines."""
    return [_ttl(result) for result in _heaviest(results) if any(row["ttl_s"] for row in result.get("ttl_rows", ()))]


def _ttl(result: Result) -> str:
    rows = [row for row in result["ttl_rows"] if row["ttl_s"] is not None]
    open_ended = [row for row in result["ttl_rows"] if row["ttl_s"] is None]
    with styled():
        figure, (axes,) = new_figure()
        for label, colour, chosen in (
            ("back in time", "#2f9e6e", [row for row in rows if row["waited_s"] <= row["ttl_s"]]),
            ("let go before", "#d4526e", [row for row in rows if row["waited_s"] > row["ttl_s"]]),
        ):
            axes.scatter(
                [max(_SHORTEST_S, row["waited_s"]) for row in chosen],
                [max(_SHORTEST_S, row["ttl_s"]) for row in chosen],
                s=7,
                color=colour,
                alpha=0.6,
                linewidths=0,
                label=f"{label}: {len(chosen)}",
            )
        far_s = max([1.0, *(max(row["waited_s"], row["ttl_s"]) for row in rows)])
        axes.plot([_SHORTEST_S, far_s], [_SHORTEST_S, far_s], color="#8b949e", linewidth=0.8)
        note = f"; {len(open_ended)} without a deadline" if open_ended else ""
        axes.set(
            xscale="log",
            yscale="log",
            title=f"{result['policy']}, {_at(load_name(result))}{note}",
            xlabel="program was away, s",
            ylabel="time to live, s",
        )
        axes.legend(loc="lower right")
        return to_svg(figure, title=f"Time to live against the wait, {result['policy']}")


def load_panels(rows: Sequence[Row]) -> list[str]:
    """Throughput and mean completion time against load, where there are several loads with a value."""
    numbers = {row.load: _number(row.load) for row in rows}
    if len(numbers) < 2 or None in numbers.values():
        return []
    return [
        _against_load(rows, "programs_per_s", "programs/s", "Throughput"),
        _against_load(rows, "completion_mean_s", "s", "Mean completion time"),
        _against_load(rows, "first_token_p99_s", "s", "P99 wait of new programs for their first token"),
    ]


def _against_load(rows: Sequence[Row], figure_name: str, unit: str, title: str) -> str:
    policies = list(dict.fromkeys(row.policy for row in rows))
    with styled():
        figure, (axes,) = new_figure()
        for policy in policies:
            points = sorted((float(row.load), getattr(row, figure_name)) for row in rows if row.policy == policy)
            axes.plot(
                *zip(*points, strict=True), marker="o", markersize=4, color=colours(policies)[policy], label=policy
            )
        axes.set(title=title, xlabel="load (1 keeps the GPU just busy)", ylabel=unit)
        axes.set_ylim(bottom=0)
        axes.legend()
        return to_svg(figure, title=f"{title} against load")


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _at(load: str) -> str:
    return "recorded or fixed arrivals" if load == "-" else f"load {load}"


def _roots(result: Result) -> list[Mapping[str, Any]]:
    return [row for row in result["by_program"] if row["is_root"]]


def _by_load(results: Sequence[Result]) -> dict[str, list[Result]]:
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(load_name(result), []).append(result)
    return groups


def _by_policy(results: Sequence[Result]) -> dict[str, list[Result]]:
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(result["policy"], []).append(result)
    return groups


def _policies(results: Sequence[Result]) -> list[str]:
    return list(_by_policy(results))


def _heaviest(results: Sequence[Result]) -> list[Result]:
    """One run a policy: the first seed of the highest load."""
    if not results:
        return []
    highest = max(_by_load(results), key=lambda load: _number(load) or 0.0)
    seed = min(result["seed"] for result in results)
    return [result for result in results if load_name(result) == highest and result["seed"] == seed]


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)
