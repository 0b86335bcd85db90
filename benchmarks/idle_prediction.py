"""How well the length of a wait can be told: `python -m benchmarks.idle_prediction [--json] [--traces DIR] [--trace NAME …]`.

Whether KV is worth keeping depends on when the program is back. Here predictors of that, from "always the median" to a regression on
all that an engine knows, are compared on recorded traces, out of sample by program:

- *grouped*: five folds of programs; each fold is predicted from the other four.
- *forward*: programs in order of time in five parts; each part but the first is predicted from those before it, as in service.

Figures, of all waits that were predicted: `brier` and `auc` of "longer than 10 s" and "longer than 60 s" at the turn's end; `crps_s` of
the whole distribution, up to 600 s; `idle_share_called_long`, the share of all idle time in the waits called long at the turn's end, where
as many are called so as are longer than 10 s; and `auc_back_soon_by_age`, which is what a price of KV needs: of programs that have
been away for 0 to 60 s, which are back within 5 s. `vs_best` says which predictors cannot be told from the best one, by resampling
programs 100 times.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.idle_predictors import GRID_S, PREDICTORS, Array
from benchmarks.idle_scores import LONG_S, auc, back_soon, crps, scores
from benchmarks.idle_waits import TRACES, IdleWait, read_waits

_FOLDS = 5
_RESAMPLES = 100
#: Fewer programs than this say nothing of how programs differ.
_PROGRAMS_MIN = 5
_DEFAULT_TRACES = Path(__file__).resolve().parents[2] / "shared" / "traces"


def splits(waits: Sequence[IdleWait], *, kind: str) -> Iterator[tuple[list[int], list[int]]]:
    """(waits to learn from, waits to predict), by program."""
    programs = 1 + max(one.program for one in waits)
    part = [
        one.program % _FOLDS if kind == "grouped" else min(_FOLDS - 1, one.program * _FOLDS // programs)
        for one in waits
    ]
    for fold in range(_FOLDS):
        if kind == "grouped":
            known = [index for index, of in enumerate(part) if of != fold]
        else:
            known = [index for index, of in enumerate(part) if of < fold]
        asked = [index for index, of in enumerate(part) if of == fold]
        if known and asked:
            yield known, asked


def compare(waits: Sequence[IdleWait], *, kind: str) -> dict[str, Any]:
    """Every predictor on one trace."""
    curves: dict[str, Array] = {}
    asked_of_all: list[int] = []
    for name, make in PREDICTORS.items():
        rows, asked_of_all = [], []
        for known, asked in splits(waits, kind=kind):
            model = make()
            model.fit([waits[index] for index in known])
            rows.append(model.curves([waits[index] for index in asked]))
            asked_of_all.extend(asked)
        curves[name] = np.vstack(rows)
    asked_waits = [waits[index] for index in asked_of_all]
    return {
        "waits": len(asked_waits),
        "by_predictor": {name: scores(asked_waits, rows) for name, rows in curves.items()},
        "vs_best": _against_best(asked_waits, curves),
    }


def _against_best(waits: Sequence[IdleWait], curves: dict[str, Array]) -> dict[str, Any]:
    """For each figure: the best predictor, and those whose 95 % interval of the difference to it holds 0."""
    seconds = np.array([one.wait.seconds for one in waits])
    censored = np.array([one.wait.is_censored for one in waits])
    programs = np.array([one.program for one in waits])
    names = list(curves)
    of_program = {number: np.flatnonzero(programs == number) for number in np.unique(programs).tolist()}
    losses = {name: crps(seconds, censored, rows) for name, rows in curves.items()}
    grid_index = {limit_s: int(np.searchsorted(GRID_S, limit_s)) for limit_s in LONG_S}

    def figures(rows: Any) -> dict[str, list[float]]:
        out: dict[str, list[float]] = {"crps_s": [float(losses[name][rows].mean()) for name in names]}
        for limit_s, column in grid_index.items():
            longer = seconds[rows] > limit_s
            found = [auc(curves[name][rows, column], longer) for name in names]
            out[f"auc_{limit_s:.0f}s"] = [0.5 if value is None else value for value in found]
        soon = [back_soon(seconds[rows], censored[rows], curves[name][rows]) for name in names]
        out["auc_back_soon_by_age"] = [0.5 if value is None else value for value in soon]
        return out

    rng = np.random.default_rng(1)
    numbers = list(of_program)
    drawn = []
    for _ in range(_RESAMPLES):
        chosen = rng.choice(len(numbers), size=len(numbers))
        drawn.append(figures(np.concatenate([of_program[numbers[index]] for index in chosen])))
    whole = figures(np.arange(len(waits)))
    # Where no wait is long there is nothing to rank.
    asked = [
        "crps_s",
        "auc_back_soon_by_age",
        *(f"auc_{limit_s:.0f}s" for limit_s in LONG_S if (seconds > limit_s).any()),
    ]
    if len(numbers) < _PROGRAMS_MIN:
        return {}
    return {figure: _within_noise(names, whole[figure], [draw[figure] for draw in drawn], figure) for figure in asked}


def _within_noise(names: list[str], values: list[float], draws: list[list[float]], figure: str) -> dict[str, Any]:
    sign = 1.0 if figure == "crps_s" else -1.0
    best = min(range(len(names)), key=lambda index: sign * values[index])
    differences = sign * (np.array(draws) - np.array(draws)[:, [best]])
    low = np.percentile(differences, 2.5, axis=0)
    return {
        "best": names[best],
        "within_noise": [name for index, name in enumerate(names) if index != best and low[index] <= 0],
    }


def run(directory: Path, traces: Sequence[str], *, programs_max: int) -> dict[str, Any]:
    """All traces, both ways of splitting."""
    out: dict[str, Any] = {}
    for trace in traces:
        waits = [one for one in read_waits(directory, trace) if one.program < programs_max]
        seconds = np.array([one.wait.seconds for one in waits])
        out[trace] = {
            "times": TRACES[trace],
            "programs": len({one.program for one in waits}),
            "waits": len(waits),
            "cut_off": sum(one.wait.is_censored for one in waits),
            "share_over_10s": round(float((seconds > 10).mean()), 4),
            "share_over_60s": round(float((seconds > 60).mean()), 4),
            **{kind: compare(waits, kind=kind) for kind in ("grouped", "forward")},
        }
        print(f"{trace}: {len(waits)} waits of {out[trace]['programs']} programs", file=sys.stderr)
    return out


def table(result: dict[str, Any]) -> str:
    """The figures as Markdown."""
    lines: list[str] = []
    for trace, found in result.items():
        for kind in ("grouped", "forward"):
            lines += [
                f"**{trace}**, {kind}: {found[kind]['waits']:,} waits of {found['programs']} programs "
                f"({100 * found['share_over_10s']:.1f} % over 10 s); {found['times']}",
                "",
                "| predictor | Brier >10 s | Brier >60 s | AUC >10 s | AUC >60 s | CRPS (s) | idle time called long | back soon, AUC |",
                "|---|---|---|---|---|---|---|---|",
            ]
            for name, row in found[kind]["by_predictor"].items():
                cells = [
                    row[figure]
                    for figure in (
                        "brier_10s",
                        "brier_60s",
                        "auc_10s",
                        "auc_60s",
                        "crps_s",
                        "idle_share_called_long",
                        "auc_back_soon_by_age",
                    )
                ]
                lines.append(
                    f"| `{name}` | " + " | ".join("–" if cell is None else f"{cell:.3f}" for cell in cells) + " |"
                )
            best = "; ".join(
                f"{figure}: `{one['best']}`"
                + (f" (not told from: {', '.join(one['within_noise'])})" if one["within_noise"] else "")
                for figure, one in found[kind]["vs_best"].items()
            )
            lines += ["", f"Best: {best or 'too few programs to tell'}.", ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.idle_prediction", description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the result as JSON on standard output")
    parser.add_argument("--traces", type=Path, help="directory of the traces; CONTINUUM_TRACES by default")
    parser.add_argument("--trace", action="append", choices=sorted(TRACES), help="only this trace; may be repeated")
    parser.add_argument("--programs", type=int, default=600, help="at most so many programs of a trace (default 600)")
    options = parser.parse_args()
    directory = options.traces or Path(os.environ.get("CONTINUUM_TRACES", _DEFAULT_TRACES))
    names = options.trace or list(TRACES)
    if missing := [name for name in names if not (directory / f"{name}.jsonl").exists()]:
        parser.error(f"no trace {', '.join(missing)} in {directory}; --traces names the directory that holds them")
    result = run(directory, names, programs_max=options.programs)
    print(json.dumps(result, indent=2) if options.json else table(result))


if __name__ == "__main__":
    main()
