"""`continuum replay`: what the presets would change for your programs, on a GPU that need not be there.

    continuum replay swebench                                   a generator, with the defaults: under a minute
    continuum replay my_trace.jsonl --gpu a100 --load 0.5,1,3   a trace of your own

Only what the options need is imported before a run starts: help and wrong arguments cost no engine.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from agent_program.errors import PlatformError
from benchmarks.replay.comparison import BASELINE, Row, points_under_pressure, rows_of, summarize_ratios
from benchmarks.replay.hardware import GPUS, MODELS
from benchmarks.replay.hardware import gpu as find_gpu

if TYPE_CHECKING:
    from benchmarks.replay.sweep import Task
    from benchmarks.replay.vllm_config import EngineShape

out = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 160)
err = Console(stderr=True, highlight=False, soft_wrap=True)


def replay_command(
    trace: Annotated[str, typer.Argument(help="A trace file or directory of any known format, or a generator's name.")],
    gpu: Annotated[str, typer.Option(help=f"One of {', '.join(GPUS)}.")] = "h100",
    model: Annotated[str, typer.Option(help=f"One of {', '.join(MODELS)}.")] = "llama-3.1-8b",
    tensor_parallel: Annotated[int, typer.Option("--tp", min=1, help="GPUs a replica.")] = 1,
    replicas: Annotated[int, typer.Option(min=1, help="Engine replicas.")] = 1,
    presets: Annotated[
        str,
        typer.Option(help="Comma-separated: presets, program_fcfs, static:SECONDS, stock (vLLM's class), clairvoyant."),
    ] = "vllm,continuum",
    load: Annotated[str, typer.Option(help="Comma-separated arrival rates; 1 keeps the GPU just busy.")] = "0.5,1,3",
    rate: Annotated[float | None, typer.Option(help="Programs per second, instead of --load.")] = None,
    concurrency: Annotated[
        int | None, typer.Option(help="A closed loop of this many programs, instead of --load.")
    ] = None,
    recorded: Annotated[
        bool, typer.Option("--recorded", help="The trace's own arrival times, instead of --load.")
    ] = False,
    bursty: Annotated[bool, typer.Option("--bursty", help="Arrivals in bursts instead of Poisson.")] = False,
    programs: Annotated[int, typer.Option(min=1, help="Programs a run.")] = 100,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each, with seeds 1, 2, …; paired across presets.")] = 1,
    kv_tokens: Annotated[
        int | None, typer.Option(min=1024, help="Size of the KV cache, if not all of the GPU's.")
    ] = None,
    dram_gb: Annotated[float | None, typer.Option("--dram-gb", help="Host memory that KV is offloaded to.")] = None,
    dram_gbps: Annotated[
        float | None, typer.Option("--dram-gbps", help="Its rate in GB/s; the GPU's host link by default.")
    ] = None,
    scale: Annotated[float, typer.Option(min=0.001, help="Multiply every token count.")] = 1.0,
    tool_scale: Annotated[float, typer.Option(min=0.0, help="Multiply every tool time.")] = 1.0,
    durations: Annotated[
        Path | None, typer.Option(help="JSON of measured seconds by tool: tool times are drawn from it.")
    ] = None,
    trace_format: Annotated[
        str | None, typer.Option("--format", help="The trace's format; found out by itself.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = 1,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Run everything anew.")] = False,
    output: Annotated[Path | None, typer.Option("--out", help="Directory for JSON and CSV.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Replay programs in virtual time on vLLM's real scheduler, and compare presets."""
    try:
        tasks = _tasks(
            trace=trace,
            trace_format=trace_format,
            scale=scale,
            presets=presets.split(","),
            loads=_arrivals(load, rate=rate, concurrency=concurrency, is_recorded=recorded, is_bursty=bursty),
            seeds=seeds,
            durations=_read_durations(durations),
            cell={
                "gpu": gpu,
                "model": model,
                "tensor_parallel": tensor_parallel,
                "replicas": replicas,
                "programs": programs,
                "shape": _shape(gpu, tensor_parallel, kv_tokens=kv_tokens, dram_gb=dram_gb, dram_gbps=dram_gbps),
                "tool_time_scale": tool_scale,
            },
        )
        results = _run(tasks, jobs=jobs, use_cache=not no_cache, quiet=as_json)
    except PlatformError as error:
        err.print("error:", style="bold red", end=" ")
        err.print(error.message, markup=False)
        raise typer.Exit(2) from error
    rows = rows_of(results)
    if output is not None:
        write_results(output, results, rows)
    if as_json:
        out.file.write(json.dumps(_document(results, rows), sort_keys=True) + "\n")
    else:
        _print(results, rows, tasks[0].cell.policy.name)


def _arrivals(
    load: str, *, rate: float | None, concurrency: int | None, is_recorded: bool, is_bursty: bool
) -> list[tuple[float | None, Any]]:
    from benchmarks.replay.workload import ArrivalKind, Arrivals

    if sum((rate is not None, concurrency is not None, is_recorded)) > 1:
        raise typer.BadParameter("--rate, --concurrency and --recorded exclude each other")
    kind = ArrivalKind.BURSTY if is_bursty else ArrivalKind.POISSON
    if rate is not None:
        return [(None, Arrivals(kind=kind, rate_per_s=rate))]
    if concurrency is not None:
        return [(None, Arrivals(kind=ArrivalKind.CLOSED, concurrency=concurrency))]
    if is_recorded:
        return [(None, Arrivals(kind=ArrivalKind.RECORDED))]
    try:
        loads = [float(part) for part in load.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"{load!r} is not a list of numbers", param_hint="--load") from error
    if min(loads) <= 0:
        raise typer.BadParameter("a load is above 0", param_hint="--load")
    return [(value, Arrivals(kind=kind, rate_per_s=1.0)) for value in loads]


def _shape(
    gpu_name: str, degree: int, *, kv_tokens: int | None, dram_gb: float | None, dram_gbps: float | None
) -> EngineShape:
    from benchmarks.replay.offload import Tier
    from benchmarks.replay.vllm_config import EngineShape

    rate = degree * find_gpu(gpu_name).host_link_bytes_per_s if dram_gbps is None else 1e9 * dram_gbps
    tiers = () if dram_gb is None else (Tier(name="dram", capacity_bytes=1e9 * dram_gb, bytes_per_s=rate),)
    return EngineShape(kv_tokens=kv_tokens, offload=tiers)


def _read_durations(path: Path | None) -> tuple[tuple[str, tuple[float, ...]], ...]:
    if path is None:
        return ()
    try:
        table = json.loads(path.read_text())
        return tuple((str(tool), tuple(sorted(float(value) for value in values))) for tool, values in table.items())
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise typer.BadParameter(
            f"{path} is not a JSON object of tool: [seconds, …]", param_hint="--durations"
        ) from error


def _tasks(
    *,
    trace: str,
    trace_format: str | None,
    scale: float,
    presets: Sequence[str],
    loads: Sequence[tuple[float | None, Any]],
    seeds: int,
    durations: tuple[tuple[str, tuple[float, ...]], ...],
    cell: Mapping[str, Any],
) -> list[Task]:
    from benchmarks.replay.experiment import Cell, Policy
    from benchmarks.replay.sweep import Source, Task
    from benchmarks.replay.workload import ToolTimes

    return [
        Task(
            source=Source(name=trace, format_name=trace_format, scale=scale),
            cell=Cell(
                **cell,
                policy=Policy.named(preset.strip()),
                seed=seed,
                load=load,
                arrivals=arrivals,
                tool_times=ToolTimes.RESAMPLED if durations else ToolTimes.RECORDED,
            ),
            durations=durations,
        )
        for load, arrivals in loads
        for seed in range(1, seeds + 1)
        for preset in presets
    ]


def _run(tasks: Sequence[Task], *, jobs: int, use_cache: bool, quiet: bool) -> list[dict[str, Any]]:
    from benchmarks.replay.sweep import ResultCache, run_sweep

    results: dict[int, dict[str, Any]] = {}
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=err, transient=True, disable=quiet or not err.is_terminal) as progress:
        bar = progress.add_task("replaying", total=len(tasks))
        for done in run_sweep(tasks, cache_in=ResultCache.default() if use_cache else None, jobs=jobs):
            results[done.index] = done.result
            progress.update(bar, advance=1, description=f"{done.result['policy']} at load {done.result['load'] or '-'}")
    return [results[index] for index in sorted(results)]


def _document(results: Sequence[Mapping[str, Any]], rows: Sequence[Row]) -> dict[str, Any]:
    pressed = points_under_pressure(rows)
    bulky = {"by_program", "occupancy"}
    return {
        "points": [{**asdict(row), "under_pressure": row.point in pressed} for row in rows],
        "runs": [{key: value for key, value in result.items() if key not in bulky} for result in results],
        "summary": summarize_ratios(rows),
    }


def write_results(directory: Path, results: Sequence[Mapping[str, Any]], rows: Sequence[Row]) -> None:
    """Write `replay.json` (everything), `comparison.csv` and `programs.csv`."""
    directory.mkdir(parents=True, exist_ok=True)
    document = {**_document(results, rows), "runs": list(results)}
    (directory / "replay.json").write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
    _write_csv(directory / "comparison.csv", [asdict(row) for row in rows])
    _write_csv(
        directory / "programs.csv",
        [
            {"policy": result["policy"], "load": result["load"], "seed": result["seed"], **program}
            for result in results
            for program in result["by_program"]
        ],
    )


def _write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]) if rows else [])
        writer.writeheader()
        writer.writerows(rows)


def _print(results: Sequence[Mapping[str, Any]], rows: Sequence[Row], first_policy: str) -> None:
    first = results[0]
    left_out = ", ".join(f"{count} {reason}" for reason, count in first["left_out"].items())
    out.print(
        f"{first['workload']}: {first['programs']} programs, {first['turns']} turns on {first['deployment']}"
        + (f"; left out: {left_out}" if left_out else ""),
        markup=False,
    )
    for reason in first["uncalibrated_because"]:
        out.print(f"  uncalibrated: {reason}", style="yellow", markup=False)
    baseline = BASELINE if any(row.policy == BASELINE for row in rows) else first_policy
    means = {row.point: row.completion_mean_s for row in rows if row.policy == baseline}
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("load", "preset"):
        table.add_column(name, no_wrap=True)
    for name in ("mean s", f"vs {baseline}", "P50", "P95", "P99", "1st token P99", "KV reused", "slowdown"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        ratio = row.completion_mean_s / means[row.point] if means.get(row.point) else 1.0
        table.add_row(
            row.load,
            row.policy,
            f"{row.completion_mean_s:.1f}",
            f"{ratio:.2f}x",
            f"{row.completion_p50_s:.1f}",
            f"{row.completion_p95_s:.1f}",
            f"{row.completion_p99_s:.1f}",
            f"{row.first_token_p99_s:.2f}",
            f"{row.reused_fraction:.0%}",
            f"{row.slowdown_max:.1f}x",
        )
    out.print(table)
    out.print(_verdict(rows, baseline), markup=False)


def _verdict(rows: Sequence[Row], baseline: str) -> str:
    """One sentence on what changes, at the load where it changes most."""
    means = {row.point: row.completion_mean_s for row in rows if row.policy == baseline}
    others = [
        (row.completion_mean_s / means[row.point], row)
        for row in rows
        if row.policy != baseline and means.get(row.point)
    ]
    if not others:
        return "One policy only: nothing to compare."
    ratio, row = min(others, key=lambda pair: pair[0])
    if ratio > 0.98:
        return f"No preset ends programs noticeably earlier than {baseline} here."
    return (
        f"{row.policy} ends programs {1 / ratio:.2f} times as fast as {baseline} at load {row.load}: "
        f"{row.reused_fraction:.0%} of the KV is reused."
    )


def main() -> None:
    """`python -m benchmarks.replay.cli`, without the platform's command line."""
    typer.run(replay_command)


if __name__ == "__main__":
    main()
