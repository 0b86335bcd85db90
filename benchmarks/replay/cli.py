"""`continuum replay`: what the presets would change for your programs, on a GPU that need not be there.

    continuum replay                                            a generated workload, with the defaults: under a minute
    continuum replay my_trace.jsonl --gpu a100 --load 0.5,1,3   a trace of your own

Only what the options need is imported before a run starts: help and wrong arguments cost no engine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from agent_program.errors import PlatformError
from benchmarks.replay import cli_values
from benchmarks.replay.comparison import Row, paired_ratios, ratios, rows_of
from benchmarks.replay.hardware import GPUS, MODELS
from benchmarks.replay.output import baseline_of, document, uncalibrated, verdict, write_results
from deployments.cli_support import ExitCode, err, fail, out
from engine_replicas.config import SchedulingPreset

if TYPE_CHECKING:
    from benchmarks.replay.sweep import Done, Task
    from benchmarks.replay.vllm_config import EngineShape

#: What is replayed without a trace: the paper's SWE-Bench programs.
DEFAULT_WORKLOAD = "swebench"


def replay_command(
    trace: Annotated[
        str, typer.Argument(help="A trace file or directory of any known format, or a generator's name.")
    ] = DEFAULT_WORKLOAD,
    gpu: Annotated[str, typer.Option(help=f"One of {', '.join(GPUS)}.")] = "h100",
    model: Annotated[str, typer.Option(help=f"One of {', '.join(MODELS)}.")] = "llama-3.1-8b",
    tensor_parallel: Annotated[int, typer.Option("--tp", min=1, help="GPUs a replica.")] = 1,
    replicas: Annotated[int, typer.Option(min=1, help="Engine replicas.")] = 1,
    presets: Annotated[
        str,
        typer.Option(
            help=f"Comma-separated: {', '.join(SchedulingPreset)}, program_fcfs, static:SECONDS, stock (vLLM's class), "
            "clairvoyant, or any of them with settings: continuum+ordering=fcfs."
        ),
    ] = ",".join(SchedulingPreset),
    load: Annotated[str, typer.Option(help="Comma-separated arrival rates; 1 keeps the GPU just busy.")] = "0.5,1,2",
    rate: Annotated[float | None, typer.Option(help="Programs per second, instead of --load.")] = None,
    concurrency: Annotated[
        int | None, typer.Option(help="A closed loop of this many programs, instead of --load.")
    ] = None,
    recorded: Annotated[
        bool, typer.Option("--recorded", help="The trace's own arrival times, instead of --load.")
    ] = False,
    bursty: Annotated[bool, typer.Option("--bursty", help="Arrivals in bursts instead of Poisson.")] = False,
    programs: Annotated[int, typer.Option(min=1, help="Programs a run.")] = 24,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each, with seeds 1, 2, …; paired across presets.")] = 1,
    kv_tokens: Annotated[
        int | None, typer.Option(min=1024, help="Size of the KV cache, if not all of the GPU's.")
    ] = None,
    offload: Annotated[
        list[str] | None,
        typer.Option(
            help=f"A tier that KV is offloaded to: {cli_values.OFFLOAD_FORM}, the GPU's host link's by default (200, dram:200@45). "
            "Repeat for the tier below."
        ),
    ] = None,
    declared: Annotated[
        str, typer.Option(help="How programs declare their remaining turns: none, exact, within_30_percent, …")
    ] = "none",
    lose: Annotated[
        list[str] | None, typer.Option(help=f"A replica that dies, {cli_values.LOSS_FORM}. Repeat for several.")
    ] = None,
    slow: Annotated[
        list[str] | None, typer.Option(help=f"A replica that is slower, {cli_values.SLOW_FORM}. Repeat for several.")
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
    csv_directory: Annotated[Path | None, typer.Option("--csv", help="Directory for CSV and JSON files.")] = None,
    html: Annotated[Path | None, typer.Option(help="File for a report with plots, that needs no other file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Replay programs in virtual time on vLLM's real scheduler, and compare presets. Needs no GPU."""
    try:
        tasks = _tasks(
            trace=trace,
            trace_format=trace_format,
            scale=scale,
            presets=[preset.strip() for preset in presets.split(",")],
            loads=cli_values.arrivals(load, rate=rate, concurrency=concurrency, is_recorded=recorded, is_bursty=bursty),
            seeds=seeds,
            durations=cli_values.read_durations(durations),
            cell={
                "gpu": gpu,
                "model": model,
                "tensor_parallel": tensor_parallel,
                "replicas": replicas,
                "programs": programs,
                "tool_time_scale": tool_scale,
                "shape": _shape(kv_tokens, offload or (), tensor_parallel, gpu),
                "declared": cli_values.declared_turns(declared),
                "losses": cli_values.losses(lose or ()),
                "slow": cli_values.slow_replicas(slow or ()),
            },
        )
        finished = _run(tasks, jobs=jobs, use_cache=not no_cache, quiet=as_json)
    except PlatformError as error:
        raise fail(ExitCode.USAGE, error.message, as_json=as_json) from error
    results = [done.result for done in finished]
    rows = rows_of(results)
    if csv_directory is not None:
        write_results(csv_directory, results, rows)
    if html is not None:
        _write_report(html, results, rows)
    if as_json:
        out.file.write(json.dumps(document(results, rows), sort_keys=True) + "\n")
    else:
        _print(finished, rows)


def _shape(kv_tokens: int | None, offload: Sequence[str], degree: int, gpu_name: str) -> EngineShape:
    tiers = cli_values.tiers(offload, degree, gpu_name)
    # Loads vLLM, which a wrong option above need not wait for.
    from benchmarks.replay.vllm_config import EngineShape

    return EngineShape(kv_tokens=kv_tokens, offload=tiers)


def _tasks(
    *,
    trace: str,
    trace_format: str | None,
    scale: float,
    presets: Sequence[str],
    loads: Sequence[cli_values.LoadedArrivals],
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
                policy=Policy.named(preset),
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


def _run(tasks: Sequence[Task], *, jobs: int, use_cache: bool, quiet: bool) -> list[Done]:
    from benchmarks.replay.progress import follow
    from benchmarks.replay.sweep import ResultCache

    finished = follow(tasks, cache_in=ResultCache.default() if use_cache else None, jobs=jobs, quiet=quiet)
    return [finished[index] for index in sorted(finished)]


def _write_report(path: Path, results: Sequence[Mapping[str, Any]], rows: Sequence[Row]) -> None:
    try:
        from benchmarks.replay.html_report import write_report
    except ModuleNotFoundError as error:
        raise fail(
            ExitCode.FAILED,
            f"a report needs {error.name}, which is not installed: the extra `report` brings it",
            as_json=False,
        ) from error
    write_report(path, results, rows)
    err.print(f"report: {path}", markup=False)


def _print(finished: Sequence[Done], rows: Sequence[Row]) -> None:
    results = [done.result for done in finished]
    first = results[0]
    left_out = ", ".join(f"{count} {reason}" for reason, count in first["left_out"].items())
    tier = "" if first["tier"] == "none" else f", offload to {first['tier']}"
    out.print(
        f"{first['workload']}: {first['programs']} programs, {first['turns']} turns on {first['replicas']} × "
        f"{first['deployment']}{tier}" + (f"; left out: {left_out}" if left_out else ""),
        markup=False,
    )
    for reasons in uncalibrated(results).values():
        out.print(f"  uncalibrated: {'; '.join(reasons)}", style="yellow", markup=False)
    out.print(_table(results, rows))
    out.print(verdict(rows), markup=False)
    out.print(_speed(finished), style="dim", markup=False)


def _table(results: Sequence[Mapping[str, Any]], rows: Sequence[Row]) -> Table:
    baseline = baseline_of(rows)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("load", "preset"):
        table.add_column(name, no_wrap=True)
    over = f"over {baseline}"
    for name in ("mean s", over, "P50", "P95", "P99", "1st token P99", "programs/s", "KV reused", "slowdown"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        ratio = ratios(rows, row.policy, baseline).get(row.point)
        spread = _spread_over_seeds(results, row, baseline)
        table.add_row(
            row.load,
            row.policy,
            f"{row.completion_mean_s:.1f}",
            ("" if ratio is None else f"{ratio:.2f}x") + spread,
            f"{row.completion_p50_s:.1f}",
            f"{row.completion_p95_s:.1f}",
            f"{row.completion_p99_s:.1f}",
            f"{row.first_token_p99_s:.2f}",
            f"{row.programs_per_s:.3f}",
            f"{row.reused_fraction:.0%}",
            f"{row.slowdown_max:.1f}x",
        )
    return table


def _spread_over_seeds(results: Sequence[Mapping[str, Any]], row: Row, baseline: str) -> str:
    """The smallest and largest ratio of paired runs, where there are several."""
    if row.seeds < 2 or row.policy == baseline:
        return ""
    found = paired_ratios(results, row, baseline)
    return f" ({min(found):.2f}–{max(found):.2f})" if found else ""


def _speed(finished: Sequence[Done]) -> str:
    cpu_s = sum(done.wall_s for done in finished)
    steps = sum(done.result["steps"] for done in finished)
    simulated_s = sum(done.result["makespan_s"] for done in finished)
    stored = sum(done.was_cached for done in finished)
    return (
        f"{len(finished)} runs, {stored} of them stored before: {steps / max(1e-9, cpu_s):,.0f} steps and "
        f"{simulated_s / max(1e-9, cpu_s):,.0f} simulated seconds per second of one core."
    )


def main() -> None:
    """`python -m benchmarks.replay.cli`, without the platform's command line."""
    typer.run(replay_command)


if __name__ == "__main__":
    main()
