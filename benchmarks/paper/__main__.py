"""The paper's figures re-run in virtual time: our ratio to vLLM beside the paper's, point by point.

    python -m benchmarks.paper --figure 16              one figure, as a table
    python -m benchmarks.paper --json --out FILE        all of them

Absolute seconds depend on what the paper does not publish; ratios are what a policy is about.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from agent_program.errors import PlatformError
from benchmarks.paper.figures import load_figures, point_runs, rows_of_points
from benchmarks.replay.progress import follow
from benchmarks.replay.sweep import ResultCache

#: A point is reproduced if our ratio is within this of the paper's.
TOLERANCE = 0.25


def run_figures(
    numbers: Sequence[int], seeds: Sequence[int], *, cache_in: ResultCache | None, jobs: int, quiet: bool
) -> dict[str, Any]:
    """Run figures and compare."""
    figures = load_figures()
    runs = list(point_runs(figures, numbers, seeds))
    finished = follow([run.task for run in runs], cache_in=cache_in, jobs=jobs, quiet=quiet)
    rows = rows_of_points(runs, [finished[index].result for index in range(len(runs))])
    uncalibrated = {
        done.result["deployment"]: done.result["uncalibrated_because"]
        for done in finished.values()
        if done.result["uncalibrated_because"]
    }
    return {
        "points": rows,
        "seeds": list(seeds),
        "summary": summary(rows),
        "uncalibrated": uncalibrated,
        "workloads": {name: spec.model_dump(mode="json") for name, spec in figures.workloads.items()},
    }


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How many ratios are within the tolerance, by figure and by policy; `vllm`, which is 1 by definition, left out."""
    compared = [row for row in rows if row["policy"] != "vllm"]

    def share(chosen: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        within = sum(abs(row["off_by"]) <= TOLERANCE for row in chosen)
        return {
            "points": len(chosen),
            "within": within,
            "median_off_by": median(row["off_by"] for row in chosen) if chosen else None,
        }

    return {
        "tolerance": TOLERANCE,
        "all": share(compared),
        **{
            f"figure_{n}": share([r for r in compared if r["figure"] == n]) for n in sorted({r["figure"] for r in rows})
        },
        **{p: share([r for r in compared if r["policy"] == p]) for p in dict.fromkeys(r["policy"] for r in compared)},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison from the command line."""
    known = sorted({panel.figure for panel in load_figures().panels})
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.paper", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--figure", type=int, action="append", choices=known, help="only this figure; repeat for several"
    )
    parser.add_argument("--seeds", type=int, default=1, help="runs of each point")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--no-cache", action="store_true", help="run everything anew")
    parser.add_argument("--out", type=Path, help="also write the result to this file")
    options = parser.parse_args(arguments)
    try:
        result = run_figures(
            options.figure or known,
            range(1, options.seeds + 1),
            cache_in=None if options.no_cache else ResultCache.default(),
            jobs=options.jobs,
            quiet=options.json,
        )
    except PlatformError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 2
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        _print_table(result)
    return 0


def _print_table(result: Mapping[str, Any]) -> None:
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("figure", "panel", "at", "policy"):
        table.add_column(name, no_wrap=True)
    for name in ("ours s", "paper s", "ours/vllm", "paper/vllm", "off by"):
        table.add_column(name, justify="right")
    for row in result["points"]:
        at = f"{row['turns']:g} turns" if "turns" in row else f"{row['rate']:g}/s"
        table.add_row(
            str(row["figure"]),
            row["panel"] + (" (uncalibrated)" if row["uncalibrated"] else ""),
            at,
            row["policy"],
            f"{row['ours_s']:.0f}",
            f"{row['paper_s']:.0f}",
            f"{row['ours_over_vllm']:.2f}",
            f"{row['paper_over_vllm']:.2f}",
            "" if row["policy"] == "vllm" else f"{row['off_by']:+.0%}",
        )
    console.print(table)
    for name, part in result["summary"].items():
        if isinstance(part, Mapping):
            console.print(f"{name}: {part['within']} of {part['points']} ratios within {TOLERANCE:.0%}")


if __name__ == "__main__":
    sys.exit(main())
