"""A paired comparison of scheduling presets on the real engine: same programs, same seeds, one preset after the other.

    python -m benchmarks.end_to_end --json

Each (seed, preset) pair runs on a fresh engine whose KV pool is about half of what the programs want to hold, so that an
idle program's KV is evicted unless the scheduler retains it. Machines are noisy, so what is reported is the ratio of two
runs of the same seed, taken next to each other; the order of the presets alternates from seed to seed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from agent_program.clock import SystemClock
from benchmarks.scripted_programs import ProgramRun, WorkloadShape, draw_programs, play, working_set_tokens
from benchmarks.summary import percentile, spread

WORKLOADS: dict[str, WorkloadShape] = {
    "heavy-tail": WorkloadShape(),
    "short-tools": WorkloadShape(tool_s_median=0.2, tool_s_sigma=0.5, tool_s_max=2.0),
    "light-load": WorkloadShape(programs=6, arrivals_per_s=0.08),
}
_BLOCK_TOKENS = 32


async def run_once(
    shape: WorkloadShape, *, seed: int, preset: str, pool_share: float
) -> tuple[list[ProgramRun], dict[str, Any]]:
    """Play one seed's programs on a fresh engine under one preset; returns their runs and the scheduler's counters."""
    from engine_replicas.config import SchedulingSettings
    from engine_replicas.engine_config import EngineSettings
    from engine_replicas.replica import EngineReplica
    from tool_runtime.history import MemoryHistory

    programs = draw_programs(shape, seed=seed)
    blocks = max(160, int(working_set_tokens(programs) * pool_share) // _BLOCK_TOKENS)
    engine = EngineSettings(num_gpu_blocks_override=blocks, max_model_len=4096, engine_log_level="ERROR")
    # The programs' clients report exact tool times to the replica; nothing else needs a store.
    replica = EngineReplica(engine, SchedulingSettings(preset=preset), "", history=MemoryHistory())
    try:
        done = 0

        def progress(run: ProgramRun) -> None:
            nonlocal done
            done += 1
            print(
                f"  seed {seed} {preset:>9}: {done}/{len(programs)} programs, last took {run.completion_s:.1f} s",
                file=sys.stderr,
            )

        runs = await play(programs, replica, model=engine.model_name, clock=SystemClock(), on_done=progress)
        return runs, await replica.stats()
    finally:
        await replica.aclose()


def report(shape_name: str, cells: dict[str, dict[int, list[ProgramRun]]], stats: dict[str, Any]) -> dict[str, Any]:
    """One workload's numbers: per preset pooled over seeds, and the ratio of every preset to the first, pair by pair."""
    presets = {
        name: _preset_numbers([run for runs in by_seed.values() for run in runs]) for name, by_seed in cells.items()
    }
    base, *others = cells
    return {
        "workload": shape_name,
        "presets": presets,
        "ratio": {f"{other}_over_{base}": _ratios(cells[other], cells[base]) for other in others},
        "scheduler_stats": stats,
    }


def _preset_numbers(runs: Sequence[ProgramRun]) -> dict[str, Any]:
    first = [run.first_token_s for run in runs]
    return {
        "programs": len(runs),
        "completion_s": spread([run.completion_s for run in runs]),
        "first_token_s": {"mean": sum(first) / len(first), "p99": percentile(first, 0.99)},
        "recomputed_tokens": sum(run.recomputed_tokens for run in runs),
        "reused_tokens": sum(run.reused_tokens for run in runs),
    }


def _ratios(ours: dict[int, list[ProgramRun]], base: dict[int, list[ProgramRun]]) -> dict[str, Any]:
    """Mean and P95 completion time of one preset over another, per seed, and the median over seeds."""
    pairs = []
    for seed, runs in ours.items():
        mine, theirs = ([run.completion_s for run in side] for side in (runs, base[seed]))
        pairs.append(
            {
                "seed": seed,
                "completion_s_mean": sum(mine) / sum(theirs),
                "completion_s_p95": percentile(mine, 0.95) / percentile(theirs, 0.95),
            }
        )
    median = {key: percentile([pair[key] for pair in pairs], 0.5) for key in ("completion_s_mean", "completion_s_p95")}
    return {"pairs": pairs, "median": median}


async def compare(
    presets: Sequence[str], workloads: Sequence[str], seeds: Sequence[int], *, pool_share: float
) -> dict[str, Any]:
    """Every (workload, seed, preset), with the presets of a seed next to each other."""
    results = []
    for workload in workloads:
        cells: dict[str, dict[int, list[ProgramRun]]] = {preset: {} for preset in presets}
        stats: dict[str, Any] = {preset: {} for preset in presets}
        for position, seed in enumerate(seeds):
            for preset in presets if position % 2 == 0 else reversed(presets):
                print(f"{workload}: seed {seed}, preset {preset}: starting the engine", file=sys.stderr)
                cells[preset][seed], stats[preset][str(seed)] = await run_once(
                    WORKLOADS[workload], seed=seed, preset=preset, pool_share=pool_share
                )
        results.append(report(workload, cells, stats))
    first = results[0]
    summary = {key: first[key] for key in ("presets", "ratio")}
    return {**summary, "seeds": list(seeds), "pool_share": pool_share, "workloads": results}


def _table(result: dict[str, Any]) -> str:
    lines = []
    for one in result["workloads"]:
        lines.append(f"{one['workload']} (seeds {result['seeds']}, pool {result['pool_share']:.2f} of the working set)")
        lines.append(
            f"  {'preset':<10} {'mean s':>8} {'P95 s':>8} {'first tok s':>12} {'recomputed':>11} {'reused':>9}"
        )
        for name, numbers in one["presets"].items():
            done = numbers["completion_s"]
            lines.append(
                f"  {name:<10} {done['mean']:>8.2f} {done['p95']:>8.2f} {numbers['first_token_s']['mean']:>12.2f} "
                f"{numbers['recomputed_tokens']:>11,} {numbers['reused_tokens']:>9,}"
            )
        for name, ratio in one["ratio"].items():
            seeds = ", ".join(f"{pair['completion_s_mean']:.2f}" for pair in ratio["pairs"])
            lines.append(f"  {name}: mean completion × {ratio['median']['completion_s_mean']:.2f} (per seed {seeds})")
    return "\n".join(lines)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.end_to_end", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--presets", default="vllm,continuum", help="comma-separated; ratios are over the first")
    parser.add_argument("--workloads", default="heavy-tail", help=f"comma-separated, of {', '.join(WORKLOADS)}")
    parser.add_argument("--seeds", type=int, default=3, help="how many seeds, from 1 (default 3)")
    parser.add_argument("--pool-share", type=float, default=0.5, help="KV pool over the working set (default 0.5)")
    parser.add_argument("--json", action="store_true", help="print JSON on standard output")
    arguments = parser.parse_args(argv)
    unknown = [name for name in arguments.workloads.split(",") if name not in WORKLOADS]
    if unknown:
        parser.error(f"unknown workload {unknown[0]!r}; choose from {', '.join(WORKLOADS)}")
    if arguments.seeds < 1 or not 0.05 <= arguments.pool_share <= 4:
        parser.error("--seeds must be at least 1 and --pool-share between 0.05 and 4")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison and print it; returns the exit code."""
    arguments = _arguments(argv)
    # vLLM logs to standard output, which is for the results.
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    started_s = time.monotonic()
    result = asyncio.run(
        compare(
            arguments.presets.split(","),
            arguments.workloads.split(","),
            range(1, arguments.seeds + 1),
            pool_share=arguments.pool_share,
        )
    )
    result["wall_s"] = round(time.monotonic() - started_s, 1)
    print(json.dumps(result, indent=2) if arguments.json else _table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
