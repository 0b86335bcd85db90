"""What replays are told as: JSON, CSV, a sentence; each with its label where step times are not measured."""

import csv
import json

import pytest

from benchmarks.replay.comparison import rows_of
from benchmarks.replay.output import document, verdict, write_results
from support.replay_results import result, result_with_rows

WHY = "no public kernel profile"


def rows_in(path):
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.fixture
def written(tmp_path):
    results = [
        result_with_rows("vllm", 10.0, uncalibrated_because=[WHY]),
        result_with_rows("continuum", 5.0, uncalibrated_because=[WHY], leases={"reused": 3}),
    ]
    write_results(tmp_path, results, rows_of(results))
    return tmp_path


def test_each_run_is_a_row_a_file_and_its_programs(written):
    assert [row["policy"] for row in rows_in(written / "runs.csv")] == ["vllm", "continuum"]
    assert rows_in(written / "runs.csv")[1]["completion_s.mean"] == "5.0"
    # Only one of the runs counts leases: the column is there for both.
    assert [row["leases.reused"] for row in rows_in(written / "runs.csv")] == ["", "3"]
    assert json.loads((written / "runs" / "2.json").read_text())["policy"] == "continuum"
    assert len(rows_in(written / "programs.csv")) == 6
    assert len(rows_in(written / "occupancy.csv")) == 6
    assert len(rows_in(written / "waits.csv")) == 6


@pytest.mark.parametrize(
    "name", ["comparison.csv", "runs.csv", "programs.csv", "occupancy.csv", "waits.csv", "replay.json", "runs/1.json"]
)
def test_every_file_says_that_the_deployment_is_not_calibrated(written, name):
    assert WHY in (written / name).read_text()


def test_the_document_holds_rows_of_runs_on_request_only():
    results = [result_with_rows("vllm", 10.0), result_with_rows("continuum", 5.0)]
    short, whole = (document(results, rows_of(results), with_rows=rows) for rows in (False, True))
    assert "by_program" not in short["runs"][0]
    assert whole["runs"][0]["by_program"]
    assert [point["over_vllm"] for point in short["points"]] == [1.0, 0.5]


def test_the_verdict_names_the_best_choice_at_each_load_beside_the_bound():
    results = [
        result("vllm", 10.0, load=0.5),
        result("continuum", 9.95, load=0.5),
        result("vllm", 100.0, load=2.0),
        result("continuum", 50.0, load=2.0, reused=0.9),
        result("clairvoyant", 40.0, load=2.0),
    ]
    assert verdict(rows_of(results)) == (
        "At load 2, continuum ends programs 2.00 times as fast as vllm on average (knowing the future: 2.50), and reuses "
        "90% of the KV."
    )


def test_the_verdict_says_when_nothing_changes_or_nothing_is_compared():
    assert verdict(rows_of([result("vllm", 10.0), result("continuum", 9.9)])) == (
        "No preset ends programs noticeably earlier than vllm here."
    )
    assert verdict(rows_of([result("vllm", 10.0)])) == "One policy only: nothing to compare."
