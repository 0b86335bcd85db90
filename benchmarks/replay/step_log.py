"""From an engine's step log to a step-time model: the same workload can then be replayed and compared with what ran.

The log is the one that the scheduler writes (`step_log_path`, `engine_replicas.step_log`): JSON Lines, one step a line,
with its `duration_s`, `turns` (sequences), `tokens` and `pairs` ((query, key) pairs that attention visited).

The model is linear with non-negative coefficients, which is what the roofline becomes on one machine:

    step_s = a + b·turns + c·tokens + d·pairs

fitted by least squares of the *relative* error, so that short steps count as much as long ones, and then scaled so that all steps
together take as long as they did: on a machine that others use too, some steps take many times as long as they should, which the
relative error hardly sees and a queue does.

    python -m benchmarks.replay.step_log steps.jsonl --json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from agent_program.errors import InvalidRequest
from benchmarks.replay.step_time import StepLoad

_COEFFICIENTS = 4
#: Steps further apart than this had nothing to do between them.
BUSY_GAP_S_MAX = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggedStep:
    """One step that an engine ran."""

    duration_s: float
    turns: int
    tokens: int
    pairs: int
    #: When it was scheduled, on the engine's clock.
    at_s: float = 0.0

    @property
    def features(self) -> tuple[float, ...]:
        return (1.0, float(self.turns), float(self.tokens), float(self.pairs))


def read_step_log(path: Path) -> list[LoggedStep]:
    """Parse a step log.

    Raises:
        InvalidRequest: a line is not a step; the message names the line.
    """
    steps = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            steps.append(
                LoggedStep(
                    duration_s=float(row["duration_s"]),
                    turns=int(row["turns"]),
                    tokens=int(row["tokens"]),
                    pairs=int(row["pairs"]),
                    at_s=float(row.get("at_s", 0.0)),
                )
            )
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidRequest(f"{path.name} line {number}: not a step record ({error})", param="step_log") from error
    return steps


@dataclass(frozen=True, kw_only=True, slots=True)
class FittedStepTime:
    """A linear step-time model, with how well it describes the log that it was fitted to."""

    coefficients: tuple[float, ...]
    #: Mean absolute relative error over the log.
    mape: float
    steps: int
    label: str = "fit of an engine's step log"

    def step_s(self, load: StepLoad) -> float:
        prefill_pairs = sum(chunk * cached + chunk * (chunk + 1) // 2 for chunk, cached in load.prefill)
        features = (
            1.0,
            float(load.decode_seqs + len(load.prefill)),
            float(load.decode_seqs + load.prefill_tokens),
            float(load.decode_kv_tokens + prefill_pairs),
        )
        return max(1e-6, sum(c * x for c, x in zip(self.coefficients, features, strict=True)))


def fit_step_time(log: Iterable[LoggedStep]) -> FittedStepTime:
    """Fit the linear model to a log.

    Raises:
        InvalidRequest: fewer steps than coefficients, or a step that took no time.
    """
    steps = list(log)
    if len(steps) < _COEFFICIENTS or any(step.duration_s <= 0 for step in steps):
        raise InvalidRequest(
            f"a fit needs at least {_COEFFICIENTS} steps, each longer than 0 s; got {len(steps)}", param="step_log"
        )
    durations = np.array([step.duration_s for step in steps])
    relative = np.array([step.features for step in steps]) / durations[:, None]
    coefficients = _non_negative_least_squares(relative, np.ones(len(steps)))
    predicted = np.array([step.features for step in steps]) @ coefficients
    coefficients = coefficients * (durations.sum() / predicted.sum())
    errors = np.abs(relative @ coefficients - 1.0)
    return FittedStepTime(coefficients=tuple(map(float, coefficients)), mape=float(errors.mean()), steps=len(steps))


def gap_between_steps_s(log: Sequence[LoggedStep]) -> float:
    """The mean time from one step's end to the next one's start, where they follow each other within `BUSY_GAP_S_MAX`: what
    an engine that has work does between its steps. 0 where no two do."""
    gaps = [after.at_s - (before.at_s + before.duration_s) for before, after in pairwise(log)]
    busy = [max(0.0, gap) for gap in gaps if gap <= BUSY_GAP_S_MAX]
    return float(np.mean(busy)) if busy else 0.0


def _non_negative_least_squares(matrix: Any, target: Any) -> Any:
    """Least squares over the columns left after those with a negative coefficient are dropped, worst first.

    A dropped column is one that the log cannot tell from noise.
    """
    scale = np.abs(matrix).max(axis=0)
    kept: Sequence[int] = [column for column in range(matrix.shape[1]) if scale[column] > 0]
    while True:
        solution, *_ = np.linalg.lstsq(matrix[:, kept] / scale[kept], target, rcond=None)
        if solution.min() >= 0 or len(kept) == 1:
            break
        kept = [column for column, value in zip(kept, solution, strict=True) if value > solution.min()]
    coefficients = np.zeros(matrix.shape[1])
    coefficients[kept] = np.maximum(solution, 0.0) / scale[kept]
    return coefficients


def main(argv: Sequence[str] | None = None) -> int:
    """Print the model that describes a log; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.replay.step_log", description="Fit a step-time model to an engine's step log."
    )
    parser.add_argument("log", type=Path, help="the file that scheduling.step_log_path named")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args(argv)
    try:
        fit = fit_step_time(read_step_log(arguments.log))
    except (OSError, InvalidRequest) as error:
        parser.error(str(error))
    names = ("step_s", "turn_s", "token_s", "pair_s")
    fitted = dict(zip(names, fit.coefficients, strict=True))
    if arguments.json:
        print(json.dumps({"coefficients": fitted, "mape": fit.mape, "steps": fit.steps}, indent=2))
    else:
        print("\n".join(f"{name:<8} {value:.3e} s" for name, value in fitted.items()))
        print(f"mean absolute relative error {fit.mape:.1%} over {fit.steps} steps")
    return 0


if __name__ == "__main__":
    sys.exit(main())
