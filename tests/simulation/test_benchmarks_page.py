"""The page of results, and the picture of regimes, are what the committed data give."""

import json

import pytest

from benchmarks import docs_page, regimes
from benchmarks.docs_page import RESULTS, cells_table, drift, pages, targets_table
from support.replay_results import result


def test_the_committed_documents_are_those_that_the_committed_data_give():
    assert drift() == []


def test_a_document_that_was_edited_by_hand_is_found(tmp_path):
    for path, text in pages().items():
        (tmp_path / path.parent).mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text + ("edited" if path == docs_page.PAGE else ""))
    assert drift(tmp_path) == [str(docs_page.PAGE)]


def test_the_page_says_which_results_are_not_there_yet(tmp_path):
    (tmp_path / docs_page.TEMPLATE).write_text((RESULTS / docs_page.TEMPLATE).read_text())
    files = pages(tmp_path)
    assert list(files) == [docs_page.PAGE]
    assert "*Not run yet: `make compare`.*" in files[docs_page.PAGE]


SUMMARY = {
    "points": 3,
    "points_under_pressure": 2,
    "adaptive_over_continuum_median": 0.7,
    "adaptive_over_vllm_max": 1.05,
}


def test_a_missed_target_is_marked_and_a_missing_one_shown_as_missing():
    table = targets_table(dict.fromkeys(docs_page._GROUPS, SUMMARY))
    assert "| `adaptive_over_continuum_median` | ≤ 0.72 | 0.70 |" in table
    assert "| `adaptive_over_vllm_max` | ≤ 1.02 | **1.05** |" in table
    assert "| `adaptive_p95_over_continuum_max` | ≤ 1 | – |" in table
    assert "| points (under pressure) |  | 3 (2) |" in table


def test_a_cell_is_told_by_its_ratios():
    cell = {
        "workload": "w",
        "load": "over",
        "deployment": "d",
        "tier": "none",
        "under_pressure": True,
        "held_out": True,
        "adaptive_over_continuum": 0.8,
        "policies": {"vllm": {"completion_mean_s": 100.0}, "adaptive": {"completion_mean_s": 40.0}},
    }
    table = cells_table({"policies": ["vllm", "adaptive"], "cells": [cell]})
    assert table.splitlines()[-1] == "| w † | over* | d | 100 | 0.40 | 0.80 | – |"


@pytest.fixture(scope="module")
def grid():
    return regimes.grid([1], regimes.policies())


def test_the_grid_holds_each_policy_at_each_load_and_length_of_tools(grid):
    assert len(grid) == len(regimes.LOADS) * len(regimes.TOOL_OVER_PREFILL) * len(regimes.policies())
    assert {regimes.KEEP_ALL, regimes.ORDER_ONLY, "vllm", "continuum"} <= {run.policy for run in grid}


def test_tool_times_are_scaled_in_units_of_the_prefill_that_they_save(grid):
    scales = {run.tool_over_prefill: run.task.cell.tool_time_scale for run in grid}
    assert scales[10.0] == pytest.approx(10 * scales[1.0])
    # A paused context of this workload takes between a tenth of a second and two seconds to compute on an H100.
    assert 0.1 < scales[1.0] * 2.0 < 4.0


def test_the_map_is_drawn_from_its_data_alone(grid):
    means = {regimes.KEEP_ALL: 50.0, regimes.ORDER_ONLY: 100.0}
    cells = regimes.cells_of(grid, [result(run.policy, means.get(run.policy, 80.0)) for run in grid])
    data = json.loads(json.dumps({"cells": cells}))
    picture = regimes.draw(data)
    assert picture == regimes.draw(data)
    assert picture.startswith("<svg")
    assert ">0.50<" in picture
    assert "prefers-color-scheme" in picture
