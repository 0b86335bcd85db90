"""The policies against each other, over workloads, loads, deployments and offload tiers, in virtual time.

    python -m benchmarks.compare --json --quick        a small matrix in minutes, for CI
    python -m benchmarks.compare --jobs 2              the whole matrix, resumable
    python -m benchmarks.compare --estimate            how many runs are left, and about how long they take

What is compared is data: `matrices.toml`. Every run is cached under all that it depends on, so an interrupted matrix goes on
where it stopped. Numbers from held-out seeds and workloads, on which nothing was tuned, are also given apart.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console
from rich.table import Table

from agent_program.errors import PlatformError
from benchmarks.matrix import MATRICES, Matrix, MatrixRun, load_matrix
from benchmarks.replay.comparison import (
    CLAIRVOYANT,
    NO_TIER,
    Row,
    by_point,
    point_of,
    points_under_pressure,
    ratios,
    rows_of,
    summarize_ratios,
)
from benchmarks.replay.progress import follow
from benchmarks.replay.sweep import ResultCache

#: Where results that the documents are made from are kept.
RESULTS = Path(__file__).with_name("results")
#: Ratios that are printed beside every cell.
_BESIDE = (("adaptive", "continuum"), ("adaptive", "vllm"), ("adaptive", CLAIRVOYANT))
#: Seconds of a run that nothing like it has been run for.
_UNKNOWN_RUN_S = 5.0

Results = list[dict[str, Any]]


def run_matrix(
    matrix: Matrix, policies: Sequence[str], *, cache_in: ResultCache | None, jobs: int, quiet: bool
) -> dict[str, Any]:
    """Run a matrix and summarise it."""
    runs = list(matrix.runs(policies))
    finished = follow([run.task for run in runs], cache_in=cache_in, jobs=jobs, quiet=quiet)
    results = [_named(run, finished[index].result) for index, run in enumerate(runs)]
    wall_s = sum(done.wall_s for done in finished.values())
    return {
        **document(results, runs),
        "matrix": matrix.to_dict(),
        "policies": list(policies),
        "speed": {
            "runs": len(runs),
            "cpu_s": round(wall_s, 1),
            "steps_per_s": round(sum(result["steps"] for result in results) / max(1e-9, wall_s)),
            "simulated_s_per_s": round(sum(result["makespan_s"] for result in results) / max(1e-9, wall_s), 1),
        },
    }


def _named(run: MatrixRun, result: dict[str, Any]) -> dict[str, Any]:
    return {**result, "workload": run.workload, "load_name": run.load}


def document(results: Results, runs: Sequence[MatrixRun]) -> dict[str, Any]:
    """Everything that is told of a matrix's results: each cell, and the summaries, of all runs and of those held out."""
    rows = rows_of(results)
    pressed = points_under_pressure(rows)
    held_out_workloads = {run.workload for run in runs if run.is_held_out_workload}
    beside = {f"{one}_over_{other}": ratios(rows, one, other) for one, other in _BESIDE}
    cells = [
        {
            **dict(zip(("workload", "load", "deployment", "tier"), point, strict=True)),
            "rate_per_s": mean(result["rate_per_s"] for result in results if point_of(result) == point),
            "under_pressure": point in pressed,
            "held_out": point[0] in held_out_workloads,
            **{name: values[point] for name, values in beside.items() if point in values},
            "policies": {name: _figures(row) for name, row in here.items()},
        }
        for point, here in by_point(rows).items()
    ]

    def summary(choice: Iterable[bool]) -> dict[str, float | int]:
        return summarize_ratios(rows_of(result for result, chosen in zip(results, choice, strict=True) if chosen))

    tuned = [not (run.is_held_out_seed or run.is_held_out_workload) for run in runs]
    return {
        "cells": cells,
        "uncalibrated": {r["deployment"]: r["uncalibrated_because"] for r in results if r["uncalibrated_because"]},
        "summary": summarize_ratios(rows),
        "summary_tuned_on": summary(tuned),
        "summary_held_out_seeds": summary(run.is_held_out_seed and not run.is_held_out_workload for run in runs),
        "summary_held_out_workloads": summary(run.is_held_out_workload for run in runs),
    }


_OF_THE_POINT = frozenset({"workload", "load", "deployment", "tier", "policy", "declared"})


def _figures(row: Row) -> dict[str, float]:
    return {name: float(f"{value:.5g}") for name, value in asdict(row).items() if name not in _OF_THE_POINT}


def estimate(matrix: Matrix, policies: Sequence[str], cache_in: ResultCache) -> dict[str, Any]:
    """How many runs of a matrix are left, and about how many core-seconds they take, by what like runs took."""
    known: dict[tuple[str, ...], list[float]] = {}
    left: list[tuple[str, ...]] = []
    for run in matrix.runs(policies):
        like = (run.workload, run.load, run.task.cell.model)
        stored = cache_in.get(run.task.key)
        if stored is None:
            left.append(like)
        else:
            known.setdefault(like, []).append(stored[1])
    usual_s = mean([mean(values) for values in known.values()]) if known else _UNKNOWN_RUN_S
    seconds = sum(mean(known[like]) if like in known else usual_s for like in left)
    stored_runs = sum(map(len, known.values()))
    return {"runs": len(left) + stored_runs, "stored": stored_runs, "left": len(left), "core_s_left": round(seconds)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison from the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--quick", action="store_true", help="the matrix `quick`")
    which.add_argument("--matrix", default="full", help="a matrix of the file (full)")
    parser.add_argument(
        "--file", type=Path, default=MATRICES, help="where matrices are defined (matrices.toml, beside this)"
    )
    parser.add_argument(
        "--presets", help="comma-separated presets instead of all; what they are measured against runs too"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--estimate", action="store_true", help="say what is left to run, and run nothing")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--no-cache", action="store_true", help="run everything anew")
    parser.add_argument("--out", type=Path, help="also write the result to this file")
    options = parser.parse_args(arguments)
    try:
        matrix = load_matrix("quick" if options.quick else options.matrix, options.file)
        policies = matrix.policies(options.presets.split(",") if options.presets else None)
        if options.estimate:
            print(json.dumps(estimate(matrix, policies, ResultCache.default()), indent=1))
            return 0
        cache_in = None if options.no_cache else ResultCache.default()
        result = run_matrix(matrix, policies, cache_in=cache_in, jobs=options.jobs, quiet=options.json)
    except PlatformError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 2
    if options.out is not None:
        write_document(result, options.out)
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        _print_table(result)
    return 0


def write_document(result: Mapping[str, Any], path: Path) -> None:
    """Write a result as JSON that differs by lines: one line a cell and policy."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _print_table(result: Mapping[str, Any]) -> None:
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 240)
    policies = [name for name in result["policies"] if name != "vllm"]
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("workload", "load", "deployment", "tier"):
        table.add_column(name, no_wrap=True)
    for name in ("", "vllm s", *policies, *(f"{one}\n/ {other}" for one, other in _BESIDE)):
        table.add_column(name, justify="right", no_wrap=True)
    for cell in result["cells"]:
        means = {name: figures["completion_mean_s"] for name, figures in cell["policies"].items()}
        base = means.get("vllm")
        table.add_row(
            cell["workload"] + (" †" if cell["held_out"] else ""),
            cell["load"],
            cell["deployment"],
            "" if cell["tier"] == NO_TIER else cell["tier"],
            "*" if cell["under_pressure"] else "",
            "" if base is None else f"{base:.1f}",
            *(f"{means[name] / base:.2f}" if base and name in means else "" for name in policies),
            *(_ratio(cell, f"{one}_over_{other}") for one, other in _BESIDE),
        )
    console.print(table)
    console.print("Columns of policies: mean completion time over vllm's. * under pressure. † held out.")
    for deployment, reasons in result["uncalibrated"].items():
        console.print(f"uncalibrated: {deployment}: {'; '.join(reasons)}", style="yellow")
    for group in ("summary", "summary_held_out_seeds", "summary_held_out_workloads"):
        for name, value in result[group].items() if result[group]["points"] else ():
            console.print(f"{group}.{name}: {value:.3f}" if isinstance(value, float) else f"{group}.{name}: {value}")
    speed = result["speed"]
    console.print(f"{speed['steps_per_s']} steps/s, {speed['simulated_s_per_s']} simulated seconds/s on one core")


def _ratio(cell: Mapping[str, Any], name: str) -> str:
    return f"{cell[name]:.2f}" if name in cell else ""


if __name__ == "__main__":
    sys.exit(main())
