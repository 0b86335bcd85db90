"""The figures of the idle-time comparison, each against a count by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.idle_prediction import compare, splits
from benchmarks.idle_predictors import GRID_S
from benchmarks.idle_scores import auc, covered, crps
from benchmarks.idle_waits import read_waits


def test_the_auc_counts_pairs_and_ties_for_half() -> None:
    # Positives 3, 2; negatives 2, 1.  3 > 2, 3 > 1, 2 = 2 (half), 2 > 1: 3.5 of 4.
    score, positive = np.array([3.0, 2.0, 2.0, 1.0]), np.array([True, True, False, False])
    assert auc(score, positive) == 3.5 / 4
    assert auc(score, np.array([True] * 4)) is None


def test_idle_time_called_long() -> None:
    seconds, chance = np.array([1.0, 2.0, 3.0, 94.0]), np.array([0.1, 0.2, 0.9, 0.8])
    assert covered(seconds, chance, 0.25) == pytest.approx(0.03)
    assert covered(seconds, chance, 0.50) == pytest.approx(0.97)
    # Nothing is known: a quarter of the waits is a quarter of the time.
    assert covered(seconds, np.zeros(4), 0.25) == pytest.approx(0.25)


def test_the_crps_of_a_point_is_its_error() -> None:
    step = float(GRID_S[40])
    curve = (step > GRID_S).astype(float)[None, :]
    # What lies on the grid's cell of the step is off by at most that cell.
    found = crps(np.array([step / 4]), np.array([False]), curve)[0]
    assert found == pytest.approx(step - step / 4, abs=float(GRID_S[40] - GRID_S[39]))


def write_trace(directory: Path, programs: int) -> None:
    """`slow` takes a minute, `quick` next to nothing; the last turn's wait is none."""
    rows = []
    for number in range(programs):
        turns = [
            {
                "input_tokens": 100 * index + 100,
                "output_tokens": 20,
                "tool": "slow" if (index + number) % 3 == 0 else "quick",
                "tool_s": 61.0 + index if (index + number) % 3 == 0 else 0.1 + 0.01 * index,
            }
            for index in range(8)
        ]
        rows.append({"program_id": str(number), "arrival_s": None, "turns": turns})
    (directory / "tracelab_examples.jsonl").write_text("\n".join(map(json.dumps, rows)))


def test_no_program_is_predicted_from_itself(tmp_path: Path) -> None:
    write_trace(tmp_path, 10)
    waits = read_waits(tmp_path, "tracelab_examples")
    assert len(waits) == 10 * 7
    for kind in ("grouped", "forward"):
        for known, asked in splits(waits, kind=kind):
            learned, predicted = {waits[one].program for one in known}, {waits[one].program for one in asked}
            assert not learned & predicted
            assert kind == "grouped" or max(learned) < min(predicted)


def test_tools_that_tell_all_are_seen_to(tmp_path: Path) -> None:
    write_trace(tmp_path, 15)
    found = compare(read_waits(tmp_path, "tracelab_examples"), kind="grouped")["by_predictor"]
    assert found["tool_cdf"]["auc_10s"] == 1.0
    assert found["tool_cdf"]["idle_share_called_long"] > 0.99
    assert found["static_ttl"]["auc_10s"] == 0.5
    assert found["logistic"]["auc_60s"] > 0.95
