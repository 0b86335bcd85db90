"""The paper's figures as data, and the programs that stand in for its traces."""

import json
from statistics import mean, stdev

import pytest
from pydantic import ValidationError

from benchmarks.paper.__main__ import main, summary
from benchmarks.paper.figures import FIGURES, PaperPrograms, load_figures, point_runs, rows_of_points
from support.replay_results import result


def test_the_figures_that_are_compared():
    figures = load_figures()
    assert {panel.figure for panel in figures.panels} == {8, 10, 14, 16}
    assert {policy for panel in figures.panels for point in panel.points for policy in point} == {
        *figures.policies,
        "rate",
        "turns",
    }


def test_every_point_has_stock_vllm_to_compare_with():
    assert all("vllm" in point for panel in load_figures().panels for point in panel.points)


def test_every_run_of_a_figure_can_be_set_up():
    runs = list(point_runs(load_figures(), [8, 10, 14, 16], [1]))
    assert len({run.task.key for run in runs if run.panel.figure == 16}) == 24
    assert {run.task.cell.policy.name for run in runs if run.policy == "static_ttl"} == {"static:2"}


def test_a_policy_that_nobody_mapped_is_refused(tmp_path):
    (tmp_path / "f.toml").write_text(FIGURES.read_text().replace("infercept = 1041", "magic = 1041"))
    with pytest.raises(ValidationError, match="unknown policies"):
        load_figures(tmp_path / "f.toml")


def test_programs_have_the_statistics_of_the_papers_table_2():
    programs = PaperPrograms(generator="swebench", output_tokens=1500).load(seed=1, programs=400).programs
    turns = [len(program.turns) for program in programs]
    assert mean(turns) == pytest.approx(10.9, rel=0.03)
    assert stdev(turns) == pytest.approx(2.1, rel=0.1)
    assert mean(program.peak_tokens for program in programs) == pytest.approx(70_126, rel=0.05)
    assert mean(turn.output_tokens for program in programs for turn in program.turns) == pytest.approx(1500, rel=0.05)


def test_more_turns_share_the_same_tokens():
    few, many = (
        PaperPrograms(generator="swebench", output_tokens=1500, turns=turns).load(seed=1, programs=200).programs
        for turns in (10.9, 50.6)
    )
    assert mean(len(program.turns) for program in many) == pytest.approx(50.6, rel=0.05)
    assert mean(p.peak_tokens for p in many) == pytest.approx(mean(p.peak_tokens for p in few), rel=0.05)
    assert mean(p.output_tokens for p in many) == pytest.approx(mean(p.output_tokens for p in few), rel=0.05)


def test_ratios_are_taken_over_vllm_at_the_same_point():
    runs = [run for run in point_runs(load_figures(), [16], [1, 2]) if run.panel.workload == "swe"]
    seconds = {"vllm": 100.0, "program_fcfs": 80.0, "static_ttl": 60.0, "continuum": 40.0}
    rows = rows_of_points(runs, [result(run.policy, seconds[run.policy] * run.varied[1]) for run in runs])
    first = {row["policy"]: row for row in rows if row["rate"] == 0.07}
    assert first["continuum"]["ours_over_vllm"] == pytest.approx(0.4)
    assert first["continuum"]["paper_over_vllm"] == pytest.approx(844 / 1442, abs=1e-3)
    assert first["continuum"]["off_by"] == pytest.approx(0.4 / (844 / 1442) - 1, abs=1e-3)
    assert (first["vllm"]["ours_over_vllm"], first["vllm"]["off_by"]) == (1.0, 0.0)
    counted = summary(rows)
    assert (counted["all"]["points"], counted["continuum"]["points"]) == (9, 3)
    assert counted["continuum"]["within"] == 0
    assert counted["program_fcfs"]["within"] == 3


def test_one_figure_is_run_from_the_command_line(tmp_path, monkeypatch, capsys):
    """On a figure of one point with few programs: the real ones take minutes."""
    (tmp_path / "f.toml").write_text(
        '[policies]\nvllm = "vllm"\n[workloads.swe]\ngenerator = "swebench"\noutput_tokens = 50\nfitted_to = "nothing"\n'
        '[[panels]]\nfigure = 8\nworkload = "swe"\nmodel = "llama-3.1-8b"\ngpu = "b200"\npoints = [{ rate = 0.1, vllm = 5 }]\n'
    )
    figures = load_figures(tmp_path / "f.toml")
    monkeypatch.setattr("benchmarks.paper.__main__.load_figures", lambda: figures)
    monkeypatch.setattr("benchmarks.paper.figures.PROGRAMS", 3)
    assert main(["--figure", "8", "--json", "--no-cache", "--out", str(tmp_path / "out.json")]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == json.loads((tmp_path / "out.json").read_text())
    (point,) = told["points"]
    assert (point["paper_s"], point["uncalibrated"]) == (5, True)
    assert "b200" in next(iter(told["uncalibrated"]))
