"""The replay against the real engine: the same programs, run and predicted.

    python -m benchmarks.replay.against_engine --json

For each seed and preset the scripted programs of `benchmarks.scripted_programs` run on a real engine with its step log on. From
that log a step-time model is fitted; the same programs (the token counts that the engine reported, the arrivals and waits between
turns that the client saw) are then replayed in virtual time on a pool of the same blocks, and compared program by program.

Two things of a real turn are not the engine's steps, and both are measured instead of guessed:

- *between steps*: what the engine core does after one step and before the next, the mean gap of the log where steps follow each
  other closely. It is part of every predicted step.
- *around a turn*: tokenizing, process borders, streaming. A few turns that run alone before the programs do tell what a client
  waits beyond the steps of its turn. It is added to every tool wait, and to the end of the last turn.

A machine is never twice the same. `own` predictions take the model from the very run that they predict, so that what is tested
is the replay and not the machine's calm; `other` ones take it from another run of the same seed, as a planner would.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

from agent_program.clock import SystemClock
from agent_program.errors import PlatformError
from agent_program.ids import ProgramId, ToolKey
from benchmarks.replay.experiment import Cell, Policy, run_cell
from benchmarks.replay.records import ProgramRecord
from benchmarks.replay.step_log import FittedStepTime, LoggedStep, fit_step_time, gap_between_steps_s, read_step_log
from benchmarks.replay.trace import Program, Trace, Turn
from benchmarks.replay.vllm_config import EngineShape
from benchmarks.replay.workload import ArrivalKind, Arrivals
from benchmarks.scripted_programs import (
    ProgramRun,
    ScriptedProgram,
    ScriptedTurn,
    TurnRun,
    WorkloadShape,
    draw_programs,
    play,
    working_set_tokens,
)

#: As the platform starts a CPU engine.
BLOCK_TOKENS = 32
RUNNING_MAX = 16
STEP_TOKENS_MAX = 2048
CONTEXT_TOKENS_MAX = 4096
#: Turns that run alone first.
_ALONE_TURNS = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineRun:
    """One run on the real engine."""

    seed: int
    preset: str
    blocks: int
    programs: tuple[ScriptedProgram, ...]
    runs: tuple[ProgramRun, ...]
    log: tuple[LoggedStep, ...]
    #: Seconds that a client waits for a turn beyond the turn's steps.
    around_turn_s: float
    #: The machine's load average as it ended: how much else it was doing.
    load_average: float


async def run_on_engine(shape: WorkloadShape, *, seed: int, preset: str, pool_share: float) -> EngineRun:
    """Play one seed's programs on a fresh engine.

    Raises:
        RuntimeError: the engine refused or failed a turn.
    """
    from engine_replicas.config import SchedulingSettings
    from engine_replicas.engine_config import EngineSettings
    from engine_replicas.replica import EngineReplica
    from tool_runtime.history import MemoryHistory

    programs = draw_programs(shape, seed=seed)
    blocks = max(160, int(working_set_tokens(programs) * pool_share) // BLOCK_TOKENS)
    engine = EngineSettings(
        num_gpu_blocks_override=blocks,
        block_size=BLOCK_TOKENS,
        max_num_seqs=RUNNING_MAX,
        max_num_batched_tokens=STEP_TOKENS_MAX,
        max_model_len=CONTEXT_TOKENS_MAX,
        engine_log_level="ERROR",
    )
    with tempfile.TemporaryDirectory(prefix="step-log-") as directory:
        path = Path(directory) / "steps.jsonl"
        scheduling = SchedulingSettings(preset=preset, step_log_path=str(path))
        replica = EngineReplica(engine, scheduling, "", history=MemoryHistory())
        try:
            clock = SystemClock()
            alone = await play([_alone()], replica, model=engine.model_name, clock=clock)
            began_s = clock.now_s()
            runs = await play(programs, replica, model=engine.model_name, clock=clock, on_done=_tell(seed, preset))
        finally:
            await replica.aclose()
        log = read_step_log(path)
    return EngineRun(
        seed=seed,
        preset=preset,
        blocks=blocks,
        programs=tuple(programs),
        runs=tuple(runs),
        log=tuple(step for step in log if step.at_s >= began_s),
        around_turn_s=around_turn_s(alone[0].turns, log),
        load_average=os.getloadavg()[0],
    )


def _alone() -> ScriptedProgram:
    turn = ScriptedTurn(new_words=120, output_tokens=16, tool=ToolKey("warm_up"), tool_s=0.0)
    return ScriptedProgram(program_id=ProgramId("alone"), arrival_s=0.0, turns=(turn,) * _ALONE_TURNS, text_seed=0)


def _tell(seed: int, preset: str) -> Any:
    def told(run: ProgramRun) -> None:
        print(f"  seed {seed} {preset}: {run.program_id} took {run.completion_s:.1f} s", file=sys.stderr)

    return told


def around_turn_s(turns: Sequence[TurnRun], log: Sequence[LoggedStep]) -> float:
    """The median over turns that ran alone of what their clients waited beyond the first and the last of their steps.

    Raises:
        PlatformError: no step of the log belongs to any of the turns.
    """
    beyond = []
    # The first turn warms the engine up.
    for turn in turns[1:]:
        steps = [step for step in log if turn.sent_s <= step.at_s <= turn.ended_s]
        if steps:
            beyond.append((turn.ended_s - turn.sent_s) - (steps[-1].at_s + steps[-1].duration_s - steps[0].at_s))
    if not beyond:
        raise PlatformError("the step log holds no step of the turns that ran alone")
    return max(0.0, median(beyond))


def trace_of(run: EngineRun) -> Trace:
    """What ran, as the replay takes it: the tokens that the engine counted, the waits that the client saw (its tools, and what a
    busy machine added to them), and the time around each turn."""
    programs = []
    began_s = min(seen.turns[0].sent_s for seen in run.runs)
    for scripted, seen in zip(run.programs, run.runs, strict=True):
        turns: list[Turn] = []
        context = 0
        for script, turn, after in zip(scripted.turns, seen.turns, (*seen.turns[1:], None), strict=True):
            turns.append(
                Turn(
                    input_tokens=turn.prompt_tokens,
                    prefix_tokens=min(context, turn.prompt_tokens - 1),
                    output_tokens=turn.output_tokens,
                    tool=None if after is None else script.tool,
                    tool_s=None if after is None else after.sent_s - turn.ended_s + run.around_turn_s,
                )
            )
            context = turn.prompt_tokens + turn.output_tokens
        arrival_s = seen.turns[0].sent_s - began_s
        programs.append(Program(program_id=scripted.program_id, turns=tuple(turns), arrival_s=arrival_s))
    return Trace(name=f"scripted-{run.seed}", programs=tuple(programs))


def fit_of(run: EngineRun) -> FittedStepTime:
    """The step-time model of a run's own log, with the time between its steps."""
    fit = fit_step_time(run.log)
    step_s, *others = fit.coefficients
    return replace(fit, coefficients=(step_s + gap_between_steps_s(run.log), *others))


def predict(run: EngineRun, fit: FittedStepTime) -> list[ProgramRecord]:
    """The same programs in virtual time, in the order of the real run.

    The replayed engine borrows a model's geometry to be built at all; the pool is given in blocks and the step times come from
    the log, so none of it plays a part.
    """
    cell = Cell(
        policy=Policy.named(run.preset),
        programs=None,
        load=None,
        arrivals=Arrivals(kind=ArrivalKind.RECORDED),
        shape=EngineShape(
            block_size=BLOCK_TOKENS,
            max_batched_tokens=STEP_TOKENS_MAX,
            max_running=RUNNING_MAX,
            max_model_tokens=CONTEXT_TOKENS_MAX,
            kv_tokens=run.blocks * BLOCK_TOKENS,
        ),
        jump=False,
    )
    by_id = {program.program_id: program for program in run_cell(cell, trace_of(run), step_time=fit).run.programs}
    return [by_id[scripted.program_id] for scripted in run.programs]


def compared(run: EngineRun, fit: FittedStepTime) -> dict[str, Any]:
    """A run beside its prediction."""
    predicted = predict(run, fit)
    rows: list[dict[str, Any]] = [
        {
            "program_id": seen.program_id,
            "turns": len(seen.turns),
            "real_s": seen.completion_s,
            "replay_s": record.completion_s + run.around_turn_s,
            "real_recomputed_tokens": seen.recomputed_tokens,
            # What a client can count: prompt tokens that were not found when the turn was first scheduled.
            "replay_recomputed_tokens": sum(
                max(0, before.input_tokens + before.output_tokens - turn.reused_tokens)
                for before, turn in zip(_turns(run, seen), record.turns[1:], strict=True)
            ),
        }
        for seen, record in zip(run.runs, predicted, strict=True)
    ]
    real_s, replay_s = mean(row["real_s"] for row in rows), mean(row["replay_s"] for row in rows)
    real, replayed = (sum(row[f"{name}_recomputed_tokens"] for row in rows) for name in ("real", "replay"))
    return {
        "seed": run.seed,
        "preset": run.preset,
        "blocks": run.blocks,
        "step_model": dict(zip(("step_s", "turn_s", "token_s", "pair_s"), fit.coefficients, strict=True)),
        "step_model_mape": fit.mape,
        "steps": len(run.log),
        "around_turn_s": run.around_turn_s,
        "load_average": run.load_average,
        "real_mean_s": real_s,
        "replay_mean_s": replay_s,
        "mean_error": replay_s / real_s - 1.0,
        "program_error_mean": mean(abs(row["replay_s"] / row["real_s"] - 1.0) for row in rows),
        "real_recomputed_tokens": real,
        "replay_recomputed_tokens": replayed,
        "recomputed_error": replayed / real - 1.0 if real else 0.0,
        "programs": rows,
    }


@dataclass(frozen=True, slots=True)
class _Counts:
    input_tokens: int
    output_tokens: int


def _turns(run: EngineRun, seen: ProgramRun) -> list[_Counts]:
    return [_Counts(turn.prompt_tokens, turn.output_tokens) for turn in seen.turns[:-1]]


async def run_all(presets: Sequence[str], seeds: Sequence[int], *, pool_share: float) -> list[EngineRun]:
    """Every seed under every preset; presets of a seed are neighbours, and take turns at being first."""
    return [
        await run_on_engine(WorkloadShape(), seed=seed, preset=preset, pool_share=pool_share)
        for position, seed in enumerate(seeds)
        for preset in (presets if position % 2 == 0 else list(reversed(presets)))
    ]


def report(runs: Sequence[EngineRun]) -> dict[str, Any]:
    """Runs beside their predictions: `own` by each run's own step-time model, `other` by that of another preset's run of the
    same seed (empty where there was one preset only)."""
    presets = sorted({run.preset for run in runs})
    fits = [fit_of(run) for run in runs]
    own = [compared(run, fit) for run, fit in zip(runs, fits, strict=True)]
    other = [
        compared(run, next(fits[index] for index, one in enumerate(runs) if _is_neighbour(run, one)))
        for run in runs
        if any(_is_neighbour(run, one) for one in runs)
    ]
    return {"presets": presets, "own": _summary(own, presets), "other": _summary(other, presets)}


def _is_neighbour(run: EngineRun, other: EngineRun) -> bool:
    return run.seed == other.seed and run.preset != other.preset


def _summary(rows: Sequence[dict[str, Any]], presets: Sequence[str]) -> dict[str, Any]:
    if not rows:
        return {}
    by_preset = {preset: [row for row in rows if row["preset"] == preset] for preset in presets}
    means = {
        side: {preset: mean(row[f"{side}_mean_s"] for row in group) for preset, group in by_preset.items()}
        for side in ("real", "replay")
    }
    return {
        "mean_s": means,
        "mean_error": {preset: means["replay"][preset] / means["real"][preset] - 1.0 for preset in presets},
        "is_ordering_the_same": sorted(presets, key=means["real"].__getitem__)
        == sorted(presets, key=means["replay"].__getitem__),
        "recomputed_error": {
            preset: sum(row["replay_recomputed_tokens"] for row in group)
            / max(1, sum(row["real_recomputed_tokens"] for row in group))
            - 1.0
            for preset, group in by_preset.items()
        },
        "runs": list(rows),
    }


def table(result: dict[str, Any]) -> str:
    """A report for people."""
    lines = []
    for fit in ("own", "other"):
        if not result[fit]:
            continue
        lines.append(f"step model from the run's {'own' if fit == 'own' else 'neighbour’s'} log")
        lines.append(
            f"  {'seed':>4} {'preset':<10} {'real s':>8} {'replay s':>9} {'error':>7} {'recomputed':>11} {'replay':>8}"
        )
        lines += [
            f"  {row['seed']:>4} {row['preset']:<10} {row['real_mean_s']:>8.2f} {row['replay_mean_s']:>9.2f} "
            f"{row['mean_error']:>+7.1%} {row['real_recomputed_tokens']:>11,} {row['replay_recomputed_tokens']:>8,}"
            for row in result[fit]["runs"]
        ]
        lines.append(f"  presets in the same order: {'yes' if result[fit]['is_ordering_the_same'] else 'no'}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run, predict and print; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.replay.against_engine",
        description="Compare the replay with the real engine on the same programs.",
    )
    parser.add_argument("--presets", default="vllm,continuum", help="comma-separated (default vllm,continuum)")
    parser.add_argument("--seeds", type=int, default=2, help="how many seeds, from 1 (default 2)")
    parser.add_argument("--pool-share", type=float, default=0.5, help="KV pool over the working set (default 0.5)")
    parser.add_argument("--json", action="store_true", help="print JSON on standard output")
    arguments = parser.parse_args(argv)
    if arguments.seeds < 1 or not 0.05 <= arguments.pool_share <= 4:
        parser.error("--seeds must be at least 1 and --pool-share between 0.05 and 4")
    # vLLM logs to standard output, which is for the results.
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    runs = asyncio.run(
        run_all(arguments.presets.split(","), range(1, arguments.seeds + 1), pool_share=arguments.pool_share)
    )
    result = report(runs)
    print(json.dumps(result, indent=2) if arguments.json else table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
