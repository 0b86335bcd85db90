"""What a set of replays is told as: one JSON document, CSV files, and a sentence.

    replay.json       everything: points, summary, each run with its rows
    runs/N.json       one run
    comparison.csv    a row a point and policy            runs.csv        a row a run
    programs.csv      a row a program                     occupancy.csv   a row a sample of the KV cache
    waits.csv         a row a tool wait with a deadline

Every one of them says of each deployment whether it is calibrated, and if not, why.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.replay.comparison import (
    BASELINE,
    CLAIRVOYANT,
    Row,
    load_name,
    points_under_pressure,
    ratios,
    summarize_ratios,
)

Result = Mapping[str, Any]

#: Parts of a result that are lists of rows, and the CSV file that each becomes.
ROWS = {"by_program": "programs.csv", "occupancy": "occupancy.csv", "ttl_rows": "waits.csv"}
_BULKY = frozenset({*ROWS, "scheduler"})
#: Below this ratio a preset is said to end programs earlier; what is closer to 1 is noise of a chaotic system.
_NOTICEABLE = 0.98


def document(results: Sequence[Result], rows: Sequence[Row], *, with_rows: bool = False) -> dict[str, Any]:
    """Everything about a set of replays; the rows of each run on request."""
    pressed = points_under_pressure(rows)
    baseline = baseline_of(rows)
    over = {policy: ratios(rows, policy, baseline) for policy in {row.policy for row in rows}}
    return {
        "points": [
            {
                **asdict(row),
                "under_pressure": row.point in pressed,
                f"over_{baseline}": over[row.policy].get(row.point),
            }
            for row in rows
        ],
        "runs": [result if with_rows else without_rows(result) for result in results],
        "summary": summarize_ratios(rows),
        "uncalibrated": uncalibrated(results),
        "verdict": verdict(rows),
    }


def without_rows(result: Result) -> dict[str, Any]:
    """A result's figures only."""
    return {key: value for key, value in result.items() if key not in _BULKY}


def uncalibrated(results: Iterable[Result]) -> dict[str, list[str]]:
    """Why a deployment's step times are not backed by measurements, for each of which they are not."""
    return {r["deployment"]: list(r["uncalibrated_because"]) for r in results if r["uncalibrated_because"]}


def baseline_of(rows: Sequence[Row]) -> str:
    """What ratios are taken over: stock behaviour, or the first policy where that did not run."""
    return BASELINE if any(row.policy == BASELINE for row in rows) else rows[0].policy


def verdict(rows: Sequence[Row]) -> str:
    """What the presets change, load by load, in a few sentences."""
    baseline = baseline_of(rows)
    if all(row.policy == baseline for row in rows):
        return "One policy only: nothing to compare."
    sentences = [sentence for load in dict.fromkeys(row.load for row in rows) if (sentence := _of_load(rows, load))]
    return " ".join(sentences) or f"No preset ends programs noticeably earlier than {baseline} here."


def _of_load(rows: Sequence[Row], load: str) -> str | None:
    baseline = baseline_of(rows)
    here = [row for row in rows if row.load == load]
    over = {
        row.policy: ratio for row in here if (ratio := ratios(here, row.policy, baseline).get(row.point)) is not None
    }
    # What knows the future is a bound, not a choice.
    choices = [row for row in here if row.policy in over and row.policy not in (baseline, CLAIRVOYANT)]
    best = min(choices, key=lambda row: over[row.policy], default=None)
    if best is None or over[best.policy] > _NOTICEABLE:
        return None
    at = f"At load {load}" if load != "-" else "Here"
    bound = f" (knowing the future: {1 / over[CLAIRVOYANT]:.2f})" if CLAIRVOYANT in over else ""
    return (
        f"{at}, {best.policy} ends programs {1 / over[best.policy]:.2f} times as fast as {baseline} on average{bound}, "
        f"and reuses {best.reused_fraction:.0%} of the KV."
    )


def write_results(directory: Path, results: Sequence[Result], rows: Sequence[Row]) -> None:
    """Write the files listed above, over what is there."""
    (directory / "runs").mkdir(parents=True, exist_ok=True)
    _write_json(directory / "replay.json", document(results, rows, with_rows=True))
    for number, result in enumerate(results, start=1):
        _write_json(directory / "runs" / f"{number}.json", result)
    reasons = {name: "; ".join(why) for name, why in uncalibrated(results).items()}
    _write_csv(
        directory / "comparison.csv",
        [{**asdict(row), "uncalibrated": reasons.get(row.deployment, "")} for row in rows],
    )
    _write_csv(directory / "runs.csv", [{**_identity(result), **_flat(without_rows(result))} for result in results])
    for part, name in ROWS.items():
        _write_csv(directory / name, [{**_identity(r), **row} for r in results for row in r.get(part, ())])


def _identity(result: Result) -> dict[str, Any]:
    """The columns that tell one run's rows from another's."""
    return {
        "workload": result["workload"],
        "deployment": result["deployment"],
        "uncalibrated": "; ".join(result["uncalibrated_because"]),
        "tier": result.get("tier", "none"),
        "load": load_name(result),
        "policy": result["policy"],
        "seed": result["seed"],
    }


def _flat(result: Result, prefix: str = "") -> dict[str, Any]:
    """Nested figures as columns: `completion_s.mean`."""
    flat: dict[str, Any] = {}
    for key, value in result.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        elif not isinstance(value, list):
            flat[prefix + key] = value
    return flat


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    # Runs of different policies may count different things: the columns are those of all rows together.
    columns = dict.fromkeys(key for row in rows for key in row)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(columns), restval="")
        writer.writeheader()
        writer.writerows(rows)
