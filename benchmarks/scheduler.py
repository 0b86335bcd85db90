"""What our scheduler costs: `python -m benchmarks.scheduler [--json] [--quick]`.

**Steps.** The time of `schedule()` and `update_from_output()` of our class over that of vLLM's own, in one process, step by step
in turn, so that whatever else the machine does meets both; it is CPU time of the thread, so that what others take of the machine
is left out. A ratio is taken over blocks of steps, and their median reported.
The load (`scheduler_load.py`) fixes how many turns run and wait and how many leases there are, for the presets `continuum` and
`adaptive`. *turnover* is an engine in service: turns of 128 tokens end, and others begin. *decoding* is the same engine while
nobody comes or goes. `calls_ratio` adds what is told to the scheduler between its steps: arrivals and, to ours, what each
ended turn waits for, with the retention decision that follows.

`ratio_256_running_…` is the larger one of the presets, with turnover.

**Decisions.** `decision_us`: the paper's TTL for a turn that just ended, out of 100 to 100,000 samples of its tool, each time
after one more sample came in. `sample_us`: taking in that sample, with its tool's window and the one of all tools full.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

from agent_program.ids import ToolKey
from benchmarks.scheduler_load import Cell, Subject
from engine_replicas.retention.decode_cost import DecodeCost
from engine_replicas.retention.eta import EtaEstimator
from engine_replicas.retention.policy import Continuum, EndedTurn, Estimates
from engine_replicas.retention.prefill_cost import PrefillCost, PrefillStep
from engine_replicas.retention.queueing_delay import QueueingDelay
from engine_replicas.retention.reload_cost import ReloadCost
from engine_replicas.retention.tool_latency import ToolLatencyView

PRESETS = ("continuum", "adaptive")
RUNNING = (16, 64, 256)
WAITING = (0, 1000)
LEASES = (0, 200, 1000)
SAMPLES = (100, 10_000, 100_000)
_QUICK = ((256, 0, 200), (256, 1000, 1000))
_BLOCKS = 12
#: Steps of a block: with turnover at least this many turns end in it.
_STEPS = 32
_SETTLING_STEPS = 96
_DECISIONS = 400


def measure_cell(cell: Cell, *, blocks: int = _BLOCKS) -> dict[str, Any]:
    """The ratios of one cell, and what the schedulers held meanwhile."""
    stock, ours = Subject(cell, is_ours=False), Subject(cell, is_ours=True)
    for subject in (stock, ours):
        for _ in range(_SETTLING_STEPS):
            subject.measured_step()
    # As vLLM does in its engine process: what lives long is not looked at again.
    gc.collect()
    gc.freeze()
    step_ratios, call_ratios, stock_us, ours_us = [], [], [], []
    for _ in range(blocks):
        (stock_s, stock_calls_s), (ours_s, ours_calls_s) = _block(stock, ours)
        step_ratios.append(ours_s / stock_s)
        call_ratios.append((ours_s + ours_calls_s) / (stock_s + stock_calls_s))
        stock_us.append(stock_s / _STEPS * 1e6)
        ours_us.append(ours_s / _STEPS * 1e6)
    counts = ours.counts()
    gc.unfreeze()
    return {
        "preset": cell.preset,
        "running": cell.running,
        "waiting": cell.waiting,
        "leases": cell.leases,
        "kind": "turnover" if cell.has_turnover else "decoding",
        "ratio": round(statistics.median(step_ratios), 3),
        "ratio_spread": [round(min(step_ratios), 3), round(max(step_ratios), 3)],
        "calls_ratio": round(statistics.median(call_ratios), 3),
        "stock_us": round(statistics.median(stock_us), 1),
        "ours_us": round(statistics.median(ours_us), 1),
        "held": counts,
    }


def _block(stock: Subject, ours: Subject) -> tuple[tuple[float, float], tuple[float, float]]:
    """Seconds of a block's steps and calls, of both; each goes first in every second step."""
    totals = {stock: [0.0, 0.0], ours: [0.0, 0.0]}
    for step in range(_STEPS):
        for subject in (stock, ours) if step % 2 else (ours, stock):
            step_s, calls_s = subject.measured_step()
            totals[subject][0] += step_s
            totals[subject][1] += calls_s
    return (totals[stock][0], totals[stock][1]), (totals[ours][0], totals[ours][1])


def measure_decisions(samples: int) -> dict[str, Any]:
    """Median microseconds of a retention decision, and of a tool sample, with full windows of `samples`."""
    rng = random.Random(samples)
    tool = ToolKey("pytest")
    prefill = PrefillCost(chunk_tokens_max=2048)
    estimates = Estimates(
        tools=ToolLatencyView(window=samples, tools_max=64),
        queueing_delay=QueueingDelay(window=256),
        eta=EtaEstimator(window=256, programs_min=8),
        prefill=prefill,
        reload=ReloadCost(prefill, kv_tokens_total=400_000),
        decode=DecodeCost(),
    )
    for tokens in range(512, 2048, 16):
        prefill.step_ran(PrefillStep(tokens=tokens, pairs=tokens * tokens // 2, duration_s=0.01 + tokens * 1e-4))
    for turns in range(5, 25):
        estimates.eta.program_finished(turns)
    for _ in range(64):
        estimates.queueing_delay.evicted_turn_waited(20.0 * rng.random())
    for _ in range(samples):
        estimates.tools.add_wait(tool, rng.lognormvariate(0.0, 1.5))
    policy = Continuum(estimates, k_cold_start=10)
    decisions, additions, repeats = [], [], []
    ended = itertools.cycle([EndedTurn(tool=tool, context_tokens=tokens) for tokens in range(1000, 30_000, 997)])
    for turn in itertools.islice(ended, _DECISIONS):
        duration_s = rng.lognormvariate(0.0, 1.5)
        began_s = time.thread_time()
        estimates.tools.add_wait(tool, duration_s)
        added_s = time.thread_time()
        policy.decide(turn)
        decided_s = time.thread_time()
        policy.decide(turn)
        repeats.append(time.thread_time() - decided_s)
        additions.append(added_s - began_s)
        decisions.append(decided_s - added_s)
    return {
        "samples": samples,
        "decision_us": round(statistics.median(decisions) * 1e6, 2),
        "decision_mean_us": round(statistics.mean(decisions) * 1e6, 2),
        "decision_without_new_samples_us": round(statistics.median(repeats) * 1e6, 2),
        "sample_us": round(statistics.median(additions) * 1e6, 2),
    }


def _cells(*, quick: bool) -> Iterator[Cell]:
    for has_turnover in (True, False):
        for running, waiting, leases in _QUICK if quick else itertools.product(RUNNING, WAITING, LEASES):
            for preset in PRESETS:
                yield Cell(preset=preset, running=running, waiting=waiting, leases=leases, has_turnover=has_turnover)


def run(*, quick: bool) -> dict[str, Any]:
    """The whole grid, or its two headline cells, and the decisions."""
    decisions = [measure_decisions(samples) for samples in SAMPLES]
    grid = []
    for cell in _cells(quick=quick):
        grid.append(measure_cell(cell))
        print(_line(grid[-1]), file=sys.stderr)
    at_10_000 = next(row for row in decisions if row["samples"] == 10_000)
    return {
        "ratio_256_running_200_leases": _headline(grid, waiting=0, leases=200),
        "ratio_256_running_1000_waiting_1000_leases": _headline(grid, waiting=1000, leases=1000),
        "decision_us_10000_samples": at_10_000["decision_us"],
        "sample_us": at_10_000["sample_us"],
        "decisions": decisions,
        "grid": grid,
    }


def _headline(grid: list[dict[str, Any]], *, waiting: int, leases: int) -> float:
    return max(
        float(row["ratio"])
        for row in grid
        if (row["running"], row["waiting"], row["leases"], row["kind"]) == (256, waiting, leases, "turnover")
    )


def _line(row: dict[str, Any]) -> str:
    low, high = row["ratio_spread"]
    return (
        f"{row['preset']:>9} {row['running']:>3} running {row['waiting']:>4} waiting {row['leases']:>4} leases "
        f"{row['kind']:<8}  {row['stock_us']:>7.0f} µs → {row['ours_us']:>7.0f} µs  ×{row['ratio']:.3f} "
        f"({low:.2f}–{high:.2f})  with calls ×{row['calls_ratio']:.3f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scheduler", description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the result as JSON on standard output")
    parser.add_argument("--quick", action="store_true", help="the two cells that have a target, instead of the grid")
    options = parser.parse_args()
    result = run(quick=options.quick)
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        print(
            f"×{result['ratio_256_running_200_leases']} of stock at 256 running and 200 leases, "
            f"×{result['ratio_256_running_1000_waiting_1000_leases']} with 1,000 waiting and 1,000 leases; "
            f"{result['decision_us_10000_samples']} µs a decision, {result['sample_us']} µs a sample"
        )


if __name__ == "__main__":
    main()
