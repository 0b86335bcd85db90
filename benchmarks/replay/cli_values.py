"""The values of `continuum replay`'s options, from text to what a cell is made of. A wrong one is refused by its option's name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import typer

from benchmarks.replay.faults import ReplicaLoss, SlowReplica
from benchmarks.replay.hardware import gpu as find_gpu
from benchmarks.replay.offload import Tier
from benchmarks.replay.workload import ArrivalKind, Arrivals, DeclaredTurns

OFFLOAD_FORM = "GB, or NAME:GB@RATE with the rate in GB/s"
LOSS_FORM = "REPLICA@SECONDS"
SLOW_FORM = "REPLICA@FACTOR"

#: A load, where arrivals are relative to saturation, and how programs arrive.
LoadedArrivals = tuple[float | None, Arrivals]


def arrivals(
    load: str, *, rate: float | None, concurrency: int | None, is_recorded: bool, is_bursty: bool
) -> list[LoadedArrivals]:
    """One entry a load; a single one where something else than `--load` says how programs arrive."""
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


def tiers(texts: Sequence[str], degree: int, gpu_name: str) -> tuple[Tier, ...]:
    """Offload tiers, the nearest first."""
    return tuple(_tier(text, degree, gpu_name) for text in texts)


def _tier(text: str, degree: int, gpu_name: str) -> Tier:
    name, _, size = text.rpartition(":")
    capacity, _, rate = size.partition("@")
    try:
        capacity_bytes = 1e9 * float(capacity)
        bytes_per_s = 1e9 * float(rate) if rate else degree * find_gpu(gpu_name).host_link_bytes_per_s
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not {OFFLOAD_FORM}", param_hint="--offload") from error
    return Tier(name=name or "dram", capacity_bytes=capacity_bytes, bytes_per_s=bytes_per_s)


def losses(texts: Sequence[str]) -> tuple[ReplicaLoss, ...]:
    """Replicas that die."""
    pairs = [_replica_and_number(text, "--lose", LOSS_FORM) for text in texts]
    return tuple(ReplicaLoss(replica=replica, at_s=at_s) for replica, at_s in pairs)


def slow_replicas(texts: Sequence[str]) -> tuple[SlowReplica, ...]:
    """Replicas whose steps take longer."""
    pairs = [_replica_and_number(text, "--slow", SLOW_FORM) for text in texts]
    return tuple(SlowReplica(replica=replica, factor=factor) for replica, factor in pairs)


def _replica_and_number(text: str, option: str, form: str) -> tuple[int, float]:
    replica, _, number = text.partition("@")
    try:
        return int(replica), float(number)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not {form}", param_hint=option) from error


def declared_turns(name: str) -> DeclaredTurns:
    """How programs declare their remaining turns."""
    try:
        return DeclaredTurns(name)
    except ValueError as error:
        raise typer.BadParameter(f"{name!r} is none of {', '.join(DeclaredTurns)}", param_hint="--declared") from error


def read_durations(path: Path | None) -> tuple[tuple[str, tuple[float, ...]], ...]:
    """Measured seconds by tool."""
    if path is None:
        return ()
    try:
        table = json.loads(path.read_text())
        return tuple((str(tool), tuple(sorted(float(value) for value in values))) for tool, values in table.items())
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise typer.BadParameter(
            f"{path} is not a JSON object of tool: [seconds, …]", param_hint="--durations"
        ) from error
