"""The policies against each other, over workloads, loads and deployments, in virtual time.

    python -m benchmarks.compare --json --quick        a small matrix in minutes
    python -m benchmarks.compare --out docs/data       the whole matrix, resumable

Every run is cached under what it depends on, so an interrupted matrix goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.replay.comparison import points_under_pressure, rows_of, summarize_ratios
from benchmarks.replay.experiment import Cell, Policy
from benchmarks.replay.sweep import ResultCache, Source, Task, run_sweep
from benchmarks.replay.vllm_config import EngineShape
from benchmarks.replay.workload import ArrivalKind, Arrivals
from engine_replicas.config import SchedulingPreset


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadPoint:
    """A name for how hard the programs come in."""

    name: str
    #: Relative to saturation.
    load: float
    kind: ArrivalKind = ArrivalKind.POISSON


@dataclass(frozen=True, kw_only=True, slots=True)
class Matrix:
    """What is compared."""

    workloads: tuple[str, ...]
    loads: tuple[LoadPoint, ...]
    #: (model, GPU, tensor-parallel degree, KV tokens or None for all of the GPU's).
    deployments: tuple[tuple[str, str, int, int | None], ...]
    seeds: tuple[int, ...]
    programs: int


LIGHT = LoadPoint(name="light", load=0.5)
NEAR = LoadPoint(name="near", load=1.0)
OVER = LoadPoint(name="over", load=3.0)
BURST = LoadPoint(name="burst", load=1.0, kind=ArrivalKind.BURSTY)

QUICK = Matrix(
    workloads=("swebench", "heavy_tail", "memoryless"),
    loads=(LIGHT, OVER),
    deployments=(("llama-3.1-8b", "h100", 1, None),),
    seeds=(1,),
    programs=50,
)
FULL = Matrix(
    workloads=("swebench", "bfcl", "openhands", "heavy_tail", "memoryless", "subagents", "chat"),
    loads=(LIGHT, NEAR, OVER, BURST),
    deployments=(("llama-3.1-8b", "h100", 1, None), ("llama-3.1-70b", "h100", 4, None)),
    seeds=(1, 2, 3, 4, 5),
    programs=100,
)


def tasks_of(matrix: Matrix, presets: Sequence[str]) -> list[tuple[LoadPoint, Task]]:
    """Every run of a matrix; runs of one point are neighbours."""
    return [
        (
            point,
            Task(
                source=Source(name=workload),
                cell=Cell(
                    model=model,
                    gpu=gpu,
                    tensor_parallel=degree,
                    policy=Policy.named(preset),
                    seed=seed,
                    programs=matrix.programs,
                    load=point.load,
                    arrivals=Arrivals(kind=point.kind, rate_per_s=1.0),
                    shape=EngineShape(kv_tokens=kv_tokens),
                ),
            ),
        )
        for workload in matrix.workloads
        for model, gpu, degree, kv_tokens in matrix.deployments
        for point in matrix.loads
        for seed in matrix.seeds
        for preset in presets
    ]


def compare(
    matrix: Matrix, presets: Sequence[str], *, cache_in: ResultCache | None, jobs: int, quiet: bool
) -> dict[str, Any]:
    """Run a matrix and summarise it."""
    named = tasks_of(matrix, presets)
    results: dict[int, dict[str, Any]] = {}
    began = time.monotonic()
    for done in run_sweep([task for _, task in named], cache_in=cache_in, jobs=jobs):
        results[done.index] = {**done.result, "load_name": named[done.index][0].name}
        if not quiet:
            spent = time.monotonic() - began
            left = spent / len(results) * (len(named) - len(results))
            mean_s = done.result["completion_s"]["mean"]
            print(
                f"{len(results)}/{len(named)} {done.result['workload']} {named[done.index][0].name} "
                f"{done.result['policy']}: {mean_s:.0f} s, about {left:.0f} s left",
                file=sys.stderr,
            )
    rows = rows_of(results[index] for index in sorted(results))
    pressed = points_under_pressure(rows)
    return {
        "presets": list(presets),
        "programs": matrix.programs,
        "seeds": list(matrix.seeds),
        "points": [{**asdict(row), "under_pressure": row.point in pressed} for row in rows],
        "uncalibrated": sorted({r["deployment"] for r in results.values() if r["uncalibrated_because"]}),
        "steps_per_s": sum(r["steps"] for r in results.values()) / max(1e-9, time.monotonic() - began),
        "summary": summarize_ratios(rows),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison from the command line."""
    parser = argparse.ArgumentParser(prog="benchmarks.compare", description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a small matrix, for CI")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--presets", default=",".join(SchedulingPreset), help="comma-separated policies")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--no-cache", action="store_true", help="run everything anew")
    parser.add_argument("--out", type=Path, help="also write the result to this directory as comparison.json")
    options = parser.parse_args(arguments)
    result = compare(
        QUICK if options.quick else FULL,
        options.presets.split(","),
        cache_in=None if options.no_cache else ResultCache.default(),
        jobs=options.jobs,
        quiet=options.json,
    )
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "comparison.json").write_text(json.dumps(result, indent=1, sort_keys=True) + "\n")
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        _print_table(result)
    return 0


def _print_table(result: dict[str, Any]) -> None:
    print(
        f"{'workload':<12}{'load':<8}{'policy':<12}{'mean s':>9}{'P95':>9}{'P99':>9}{'1st token P99':>15}{'reused':>9}"
    )
    for row in result["points"]:
        mark = "*" if row["under_pressure"] else " "
        print(
            f"{row['workload']:<12}{row['load']:<7}{mark}{row['policy']:<12}{row['completion_mean_s']:>9.1f}"
            f"{row['completion_p95_s']:>9.1f}{row['completion_p99_s']:>9.1f}{row['first_token_p99_s']:>15.1f}"
            f"{row['reused_fraction']:>9.1%}"
        )
    print("* under pressure")
    for name, value in result["summary"].items():
        print(f"{name}: {value:.3f}" if isinstance(value, float) else f"{name}: {value}")


if __name__ == "__main__":
    sys.exit(main())
