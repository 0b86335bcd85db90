"""Where retention helps, where it does nothing, and where it hurts: one picture over load and the length of tools.

    python -m benchmarks.regimes --jobs 2 --out FILE        run the grid (resumable) and write its data
    python -m benchmarks.regimes --draw FILE                the picture, as SVG, from data written before

Two things decide. The *load* decides whether anybody else wants the memory: without pressure the prefix cache keeps everything
by itself. And the tool's time over the time of the prefill that it saves decides what holding the memory costs: a tool that
takes as long as a hundred prefills makes the cache stand idle for longer than it takes to fill it again.

Each cell is the mean completion time of one policy over another's on the same programs. The left map is retention alone: every
turn kept until it comes back or the memory is needed (`static:3600`) over the same order without any (`program_fcfs`). The
others are presets over stock vLLM.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from agent_program.errors import PlatformError
from benchmarks.replay.alone import prefill_s
from benchmarks.replay.experiment import Cell, Policy
from benchmarks.replay.generators import generate
from benchmarks.replay.progress import follow
from benchmarks.replay.step_time import RooflineStepTime
from benchmarks.replay.sweep import ResultCache, Source, Task
from benchmarks.replay.trace import Turn
from benchmarks.replay.workload import Arrivals
from benchmarks.svg import new_figure, styled, to_svg
from engine_replicas.config import SchedulingPreset

#: Programs whose length says nothing (eta 0), so that the order of programs gains little and retention is seen by itself.
WORKLOAD = "memoryless"
LOADS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.5)
#: Mean tool time over the mean time to compute the context that the tool's turn leaves behind.
TOOL_OVER_PREFILL = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
PROGRAMS = 60
KEEP_ALL = "static:3600"
ORDER_ONLY = "program_fcfs"
#: Changes below this are noise.
_NOISE = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class GridRun:
    """One run of the grid."""

    load: float
    tool_over_prefill: float
    policy: str
    task: Task


def policies() -> tuple[str, ...]:
    """What the maps need: retention with and without, stock, the paper's preset, and ours."""
    presets = (SchedulingPreset.VLLM, SchedulingPreset.CONTINUUM, SchedulingPreset.ADAPTIVE)
    return (ORDER_ONLY, KEEP_ALL, *(preset.value for preset in presets))


def maps(names: Sequence[str]) -> list[tuple[str, str, str]]:
    """(policy, over which, title) of each map."""
    presets = [name for name in names if name not in (ORDER_ONLY, KEEP_ALL, "vllm")]
    return [(KEEP_ALL, ORDER_ONLY, "keeping everything, over keeping nothing")] + [
        (name, "vllm", f"{name}, over vllm") for name in presets
    ]


def grid(seeds: Sequence[int], names: Sequence[str]) -> list[GridRun]:
    """Every run of the grid."""
    seconds = _seconds_per_unit()
    return [
        GridRun(
            load=load,
            tool_over_prefill=ratio,
            policy=name,
            task=Task(
                source=Source(name=WORKLOAD),
                cell=Cell(
                    policy=Policy.named(name),
                    seed=seed,
                    programs=PROGRAMS,
                    load=load,
                    arrivals=Arrivals(rate_per_s=1.0),
                    tool_time_scale=ratio * seconds,
                ),
                with_rows=False,
            ),
        )
        for load in LOADS
        for ratio in TOOL_OVER_PREFILL
        for seed in seeds
        for name in names
    ]


def _seconds_per_unit() -> float:
    """The scale of tool times at which the mean tool takes as long as the mean prefill of a paused context."""
    cell = Cell(policy=Policy.named("vllm"))
    times = RooflineStepTime(cell.deployment)
    paused = [
        turn for p in generate(WORKLOAD, programs=200, seed=1).programs for turn in p.turns if turn.tool is not None
    ]
    whole = [
        Turn(input_tokens=t.input_tokens + t.output_tokens, prefix_tokens=0, output_tokens=1, tool=None, tool_s=None)
        for t in paused
    ]
    prefill = mean(prefill_s(turn, times, cell.shape.max_batched_tokens) for turn in whole)
    return prefill / mean(turn.tool_s for turn in paused if turn.tool_s is not None)


def cells_of(runs: Sequence[GridRun], results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row a cell of the grid, with the mean completion time of each policy."""
    found: dict[tuple[float, float], dict[str, list[float]]] = {}
    for run, result in zip(runs, results, strict=True):
        here = found.setdefault((run.load, run.tool_over_prefill), {})
        here.setdefault(run.policy, []).append(result["completion_s"]["mean"])
    return [
        {
            "load": load,
            "tool_over_prefill": ratio,
            "mean_s": {name: float(f"{mean(values):.5g}") for name, values in here.items()},
        }
        for (load, ratio), here in found.items()
    ]


def draw(data: Mapping[str, Any]) -> str:
    """The picture."""
    cells = data["cells"]
    loads = sorted({cell["load"] for cell in cells})
    ratios = sorted({cell["tool_over_prefill"] for cell in cells})
    shown = maps(list(cells[0]["mean_s"]))
    with styled():
        figure, axes = new_figure(width_in=4.1 * len(shown) + 0.6, height_in=4.0, columns=len(shown))
        for one, (policy, other, title) in zip(axes, shown, strict=True):
            values = {
                (cell["load"], cell["tool_over_prefill"]): cell["mean_s"][policy] / cell["mean_s"][other]
                for cell in cells
            }
            _map(one, [[values[load, ratio] for load in loads] for ratio in ratios])
            one.set_title(title)
            one.set_xticks(range(len(loads)), [f"{load:g}" for load in loads])
            one.set_yticks(range(len(ratios)), [f"{ratio:g}" for ratio in ratios])
            one.set_xlabel("load (1 keeps the GPU just busy)")
        axes[0].set_ylabel("tool time ÷ prefill time of the context")
        return to_svg(figure, title="Mean completion time by load and length of tools", stand_alone=True)


def _map(axes: Any, rows: Sequence[Sequence[float]]) -> None:
    """Green where it helps, red where it hurts, grey where it does nothing; twice or half as long is the full colour."""
    for y, row in enumerate(rows):
        for x, value in enumerate(row):
            strength = min(1.0, abs(math.log2(value)))
            colour = "#8b949e" if abs(value - 1.0) <= _NOISE else "#2f9e6e" if value < 1 else "#d4526e"
            axes.fill_between(
                [x - 0.48, x + 0.48], y - 0.48, y + 0.48, color=colour, alpha=0.15 + 0.75 * strength, linewidth=0
            )
            axes.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=9)
    axes.grid(visible=False)
    axes.set_xlim(-0.5, len(rows[0]) - 0.5)
    axes.set_ylim(-0.5, len(rows) - 0.5)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run or draw the map from the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.regimes", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--draw", type=Path, metavar="DATA", help="print the picture of this data as SVG, and run nothing"
    )
    parser.add_argument("--seeds", type=int, default=1, help="runs of each cell")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--json", action="store_true", help="print the data")
    parser.add_argument("--no-cache", action="store_true", help="run everything anew")
    parser.add_argument("--out", type=Path, help="write the data to this file")
    options = parser.parse_args(arguments)
    if options.draw is not None:
        sys.stdout.write(draw(json.loads(options.draw.read_text(encoding="utf-8"))) + "\n")
        return 0
    try:
        runs = grid(range(1, options.seeds + 1), policies())
        cache_in = None if options.no_cache else ResultCache.default()
        finished = follow([run.task for run in runs], cache_in=cache_in, jobs=options.jobs, quiet=options.json)
    except PlatformError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 2
    results = [finished[index].result for index in range(len(runs))]
    data = {
        "workload": WORKLOAD,
        "deployment": results[0]["deployment"],
        "uncalibrated_because": results[0]["uncalibrated_because"],
        "programs": PROGRAMS,
        "seeds": options.seeds,
        "cells": cells_of(runs, results),
    }
    text = json.dumps(data, indent=1, sort_keys=True) + "\n"
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text, encoding="utf-8")
    if options.json or options.out is None:
        sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
