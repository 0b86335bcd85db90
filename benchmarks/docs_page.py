"""`docs/benchmarks.md` and its pictures, made from the results that are committed as data.

    python -m benchmarks.docs_page              write them
    python -m benchmarks.docs_page --check      fail where what is committed is not what the data give

The words are in `results/benchmarks.md.in`; a line `<!-- table: NAME -->` there becomes the table or the picture of that name.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import regimes
from benchmarks.paper.figures import load_figures
from benchmarks.svg import colours, new_figure, styled, to_svg

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).with_name("results")
TEMPLATE = "benchmarks.md.in"
PAGE = Path("docs/benchmarks.md")

#: The summaries that have a target, and the largest value that meets it.
TARGETS: Mapping[str, float] = {
    "adaptive_over_continuum_median": 0.72,
    "adaptive_over_continuum_max": 1.02,
    "adaptive_over_vllm_max": 1.02,
    "adaptive_over_best_fixed_ttl_median": 0.95,
    "adaptive_over_best_fixed_ttl_max": 1.02,
    "adaptive_p95_over_continuum_max": 1.0,
    "adaptive_first_token_p99_over_vllm_median": 1.5,
    "adaptive_over_clairvoyant_median": 1.08,
    "adaptive_over_best_other_preset_with_tier_max": 1.02,
    "adaptive_over_program_fcfs_with_tier_declared_median": 0.9,
    "adaptive_first_token_mean_over_program_fcfs_with_tier_median": 0.1,
}
_GROUPS = {
    "summary": "all",
    "summary_tuned_on": "tuned on",
    "summary_held_out_seeds": "held-out seeds",
    "summary_held_out_workloads": "held-out workloads",
}

Data = Mapping[str, Any]


def pages(results: Path = RESULTS) -> dict[Path, str]:
    """Every generated document by its path in the checkout, with its text."""
    files = {PAGE: _page(results)}
    matrix, grid = read(results, "matrix.json"), read(results, "regimes.json")
    if matrix is not None:
        files[Path("docs/benchmarks-cells.svg")] = draw_cells(matrix) + "\n"
    if grid is not None:
        files[Path("docs/benchmarks-regimes.svg")] = regimes.draw(grid) + "\n"
    return files


def read(results: Path, name: str) -> Data | None:
    """One file of results; None where it has not been made yet."""
    path = results / name
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def _page(results: Path) -> str:
    template = (results / TEMPLATE).read_text(encoding="utf-8")
    text = re.sub(r"<!-- table: (\w+) -->", lambda match: _table_named(match.group(1), results), template)
    note = "<!-- Made by `python -m benchmarks.docs_page` from benchmarks/results; edit the template there. -->\n\n"
    return note + text


def _table_named(name: str, results: Path) -> str:
    file, make, command = _TABLES[name]
    data = read(results, file)
    return make(data) if data is not None else f"*Not run yet: `{command}`.*"


def targets_table(data: Data) -> str:
    """Each summary with a target, over all runs and over those that are held out."""
    groups = {name: data[name] for name in _GROUPS}
    rows = [
        [
            f"`{name}`",
            f"≤ {limit:g}",
            *(_marked(group.get(name), limit) for group in groups.values()),
        ]
        for name, limit in TARGETS.items()
    ]
    counts = [f"{group.get('points', 0)} ({group.get('points_under_pressure', 0)})" for group in groups.values()]
    return _markdown(["", "target", *_GROUPS.values()], [*rows, ["points (under pressure)", "", *counts]], first_left=1)


def _marked(value: float | None, limit: float) -> str:
    return "–" if value is None else f"{value:.2f}" if value <= limit else f"**{value:.2f}**"


def summary_table(data: Data) -> str:
    """Every summary that has no target."""
    rows = [
        [f"`{name}`", *(_number(data[group].get(name)) for group in _GROUPS)]
        for name in data["summary"]
        if name not in TARGETS and not name.startswith("points")
    ]
    return _markdown(["", *_GROUPS.values()], rows, first_left=1)


def cells_table(data: Data) -> str:
    """A row a cell: the mean completion time of each policy over vllm's, and the ratios that are aimed at."""
    policies = [name for name in data["policies"] if name != "vllm"]
    rows = []
    for cell in data["cells"]:
        means = {name: figures["completion_mean_s"] for name, figures in cell["policies"].items()}
        base = means.get("vllm")
        rows.append(
            [
                cell["workload"] + (" †" if cell["held_out"] else ""),
                cell["load"] + ("*" if cell["under_pressure"] else ""),
                cell["deployment"] + ("" if cell["tier"] == "none" else f", {cell['tier']}"),
                f"{base:.0f}" if base else "–",
                *(f"{means[name] / base:.2f}" if base and name in means else "–" for name in policies),
                *(_number(cell.get(f"adaptive_over_{other}")) for other in ("continuum", "clairvoyant")),
            ]
        )
    head = ["workload", "load", "deployment", "vllm, s", *policies, "adaptive ÷ continuum", "adaptive ÷ clairvoyant"]
    return _markdown(head, rows, first_left=3)


def matrix_table(data: Data) -> str:
    """What was run."""
    matrix, speed = data["matrix"], data["speed"]
    workloads = _markdown(
        ["workload", "what it is", "turns declared", "held out"],
        [
            [name, spec["about"], spec["declared"], "yes" if spec["held_out"] else ""]
            for name, spec in matrix["workloads"].items()
        ],
        first_left=2,
    )
    loads = ", ".join(
        f"{name} {spec['load']:g}" + (f" in bursts (cv {spec['burstiness']:g})" if spec["burstiness"] != 1 else "")
        for name, spec in matrix["loads"].items()
    )
    seeds = sorted({seed for block in matrix["blocks"] for seed in block["seeds"]})
    held_out = sorted({seed for block in matrix["blocks"] for seed in block["held_out_seeds"]})
    return (
        f"{speed['runs']} runs of {_programs(matrix)} programs. Loads, as multiples of the saturation rate: {loads}. "
        f"Seeds {_listed(seeds)}; held out: {_listed(held_out)}. Speed: {speed['steps_per_s']:,} engine steps and "
        f"{speed['simulated_s_per_s']:g} simulated seconds a second of one core; {speed['cpu_s'] / 3600:.1f} core-hours.\n\n"
        f"{workloads}"
    )


def _programs(matrix: Data) -> str:
    counts = sorted({spec["programs"] or matrix["programs"] for spec in matrix["workloads"].values()})
    return f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"


def draw_cells(data: Data) -> str:
    """Mean completion time over vllm's at each point under pressure, a dot a preset."""
    fixed = [name for name in data["policies"] if name.startswith("static:") or name == "program_fcfs"]
    policies = [name for name in data["policies"] if name != "vllm" and name not in fixed]
    cells = [cell for cell in data["cells"] if cell["under_pressure"] and "vllm" in cell["policies"]]
    with styled():
        figure, (axes,) = new_figure(width_in=7.5, height_in=1.4 + 0.24 * max(1, len(cells)))
        for policy in policies:
            points = [
                (cell["policies"][policy]["completion_mean_s"] / cell["policies"]["vllm"]["completion_mean_s"], place)
                for place, cell in enumerate(reversed(cells))
                if policy in cell["policies"]
            ]
            if points:
                axes.scatter(*zip(*points, strict=True), s=22, color=colours(policies)[policy], label=policy, zorder=3)
        axes.axvline(1.0, color="#8b949e", linewidth=1)
        names = [", ".join(part for part in (c["workload"], c["load"], _short(c)) if part) for c in reversed(cells)]
        axes.set_yticks(range(len(cells)), names)
        axes.set_ylim(-0.7, max(0.7, len(cells) - 0.3))
        axes.set_xscale("log", base=2)
        ticks = [0.25, 0.5, 0.7, 1.0, 1.4, 2.0]
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.set_xlabel("mean completion time ÷ vllm's")
        figure.legend(loc="outside lower center", ncols=5)
        return to_svg(figure, title="Mean completion time over vllm's at each point under pressure", stand_alone=True)


def _short(cell: Data) -> str:
    model = cell["deployment"].split(" on ")[0].rsplit("-", 1)[-1]
    return model if cell["tier"] == "none" else f"{model}, {cell['tier']}"


def paper_summary_table(data: Data) -> str:
    """How many of the paper's points are reproduced, by figure and by policy."""
    summary = data["summary"]
    rows = [
        [name.replace("_", " "), str(part["points"]), str(part["within"]), f"{part['median_off_by']:+.0%}"]
        for name, part in summary.items()
        if isinstance(part, Mapping) and part["points"]
    ]
    head = ["", "ratios", f"within {summary['tolerance']:.0%}", "median difference"]
    figures = sorted({row["figure"] for row in data["points"]})
    missing = sorted({panel.figure for panel in load_figures().panels} - set(figures))
    run = f"Run: figure {_listed(figures)}, {len(data['seeds'])} seed(s) a point. Not run yet: {_listed(missing)}."
    labels = [f"Uncalibrated: {name}: {'; '.join(why)}." for name, why in sorted(data["uncalibrated"].items())]
    return " ".join([run, *labels]) + "\n\n" + _markdown(head, rows, first_left=1)


def paper_points_table(data: Data) -> str:
    """Each point of each figure: our ratio to vllm, and the paper's."""
    rows = []
    for row in data["points"]:
        at = f"{row['turns']:g} turns" if "turns" in row else f"{row['rate']:g}/s"
        off = "" if row["policy"] == "vllm" else f"{row['off_by']:+.0%}"
        rows.append(
            [
                str(row["figure"]),
                row["panel"] + (" ‡" if row["uncalibrated"] else ""),
                at,
                row["policy"],
                f"{row['ours_s']:.0f} / {row['paper_s']:.0f}",
                f"{row['ours_over_vllm']:.2f}",
                f"{row['paper_over_vllm']:.2f}",
                off,
            ]
        )
    head = ["figure", "panel", "at", "policy", "ours / paper, s", "ours ÷ vllm", "paper ÷ vllm", "off by"]
    return _markdown(head, rows, first_left=4)


def regimes_picture(data: Data) -> str:
    """The map, and what it is of."""
    ratios = [cell["mean_s"][regimes.KEEP_ALL] / cell["mean_s"][regimes.ORDER_ONLY] for cell in data["cells"]]
    helped, hurt = sum(ratio < 0.98 for ratio in ratios), sum(ratio > 1.02 for ratio in ratios)
    label = "".join(f" Uncalibrated: {why}." for why in data["uncalibrated_because"])
    return (
        "![Mean completion time by load and length of tools](benchmarks-regimes.svg)\n\n"
        f"`{data['workload']}` programs, {data['programs']} a run, {data['deployment']}.{label} Keeping everything changes the "
        f"mean completion time by {median(ratios) - 1:+.0%} in the median cell; it helps in {helped} of {len(ratios)} cells and "
        f"hurts in {hurt}."
    )


def _listed(values: Sequence[object]) -> str:
    return ", ".join(map(str, values)) if values else "none"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]], *, first_left: int) -> str:
    rule = ["---" if index < first_left else "---:" for index in range(len(head))]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *rows))


_MATRIX = ("matrix.json", "make compare")
_PAPER = ("paper.json", "python -m benchmarks.paper --out benchmarks/results/paper.json")
_TABLES: Mapping[str, tuple[str, Callable[[Data], str], str]] = {
    "matrix": (_MATRIX[0], matrix_table, _MATRIX[1]),
    "targets": (_MATRIX[0], targets_table, _MATRIX[1]),
    "summary": (_MATRIX[0], summary_table, _MATRIX[1]),
    "cells": (_MATRIX[0], cells_table, _MATRIX[1]),
    "cells_picture": (
        _MATRIX[0],
        lambda _: "![Mean completion time over vllm's at each point under pressure](benchmarks-cells.svg)",
        _MATRIX[1],
    ),
    "paper_summary": (_PAPER[0], paper_summary_table, _PAPER[1]),
    "paper_points": (_PAPER[0], paper_points_table, _PAPER[1]),
    "regimes": ("regimes.json", regimes_picture, "python -m benchmarks.regimes --out benchmarks/results/regimes.json"),
}


def drift(root: Path = ROOT) -> list[str]:
    """The generated files that are not what the committed data give."""
    return [
        str(path)
        for path, text in pages().items()
        if not (root / path).exists() or (root / path).read_text(encoding="utf-8") != text
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check the documents."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.docs_page", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; fail if something would change")
    options = parser.parse_args(arguments)
    if options.check:
        stale = drift()
        for name in stale:
            print(f"{name} is not what benchmarks/results gives: run python -m benchmarks.docs_page", file=sys.stderr)
        return 1 if stale else 0
    for path, text in pages().items():
        (ROOT / path).write_text(text, encoding="utf-8")
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
