"""Sweeps: cached by what results depend on, resumable, the same in one process or several; and the command line."""

import csv
import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from agent_program.errors import InvalidRequest
from benchmarks.replay import cli
from benchmarks.replay.experiment import Cell, Policy
from benchmarks.replay.sweep import ResultCache, Source, Task, run_sweep, with_seeds
from benchmarks.replay.trace import save_trace
from benchmarks.replay.workload import Arrivals
from engine_replicas.config import SchedulingPreset
from support.replays import SMALL, agents


@pytest.fixture
def trace_file(tmp_path):
    path = tmp_path / "agents.jsonl"
    save_trace(agents(5, turns=3), path)
    return path


def task(path, policy="vllm"):
    cell = Cell(policy=Policy.named(policy), programs=None, load=None, arrivals=Arrivals(rate_per_s=2.0), shape=SMALL)
    return Task(source=Source(name=str(path)), cell=cell)


def test_a_key_names_all_that_a_result_depends_on(trace_file, tmp_path):
    one = task(trace_file)
    assert one.key == task(trace_file).key
    others = [
        task(trace_file, "continuum"),
        replace(one, cell=replace(one.cell, seed=2)),
        replace(one, source=replace(one.source, scale=0.5)),
        replace(one, durations=(("bash", (1.0,)),)),
        replace(one, with_rows=False),
    ]
    save_trace(agents(5, turns=4), tmp_path / "other.jsonl")
    others.append(task(tmp_path / "other.jsonl"))
    assert len({one.key, *(other.key for other in others)}) == 7


def test_a_sweep_goes_on_where_it_stopped(trace_file, tmp_path):
    tasks = with_seeds(task(trace_file), 2)
    store = ResultCache(tmp_path / "cache")
    first = next(iter(run_sweep(tasks, cache_in=store)))
    again = list(run_sweep(tasks, cache_in=store))
    assert [done.was_cached for done in again] == [True, False]
    assert again[0].result == json.loads(json.dumps(first.result))


def test_a_stored_result_keeps_the_time_that_it_took(trace_file, tmp_path):
    store = ResultCache(tmp_path / "cache")
    first, again = (next(iter(run_sweep([task(trace_file)], cache_in=store))) for _ in range(2))
    assert again.was_cached
    assert again.wall_s == first.wall_s > 0


def test_progress_is_told_program_by_program(trace_file):
    told = []
    list(run_sweep([task(trace_file)], cache_in=None, on_progress=lambda *news: told.append(news)))
    assert told == [(0, ended, 5) for ended in range(1, 6)]


def test_results_without_rows_hold_figures_only(trace_file):
    (done,) = run_sweep([replace(task(trace_file), with_rows=False)], cache_in=None)
    assert "by_program" not in done.result
    assert done.result["completion_s"]["mean"] > 0


def test_a_damaged_result_is_run_again(trace_file, tmp_path):
    store = ResultCache(tmp_path / "cache")
    list(run_sweep([task(trace_file)], cache_in=store))
    (stored,) = (tmp_path / "cache").glob("*.json")
    stored.write_text('{"half": ')
    assert [done.was_cached for done in run_sweep([task(trace_file)], cache_in=store)] == [False]


def test_several_processes_give_what_one_gives(trace_file):
    tasks = with_seeds(task(trace_file), 2)
    alone = {done.index: done.result for done in run_sweep(tasks, cache_in=None)}
    together = {done.index: done.result for done in run_sweep(tasks, cache_in=None, jobs=2)}
    assert together == alone


def test_a_source_that_is_neither_file_nor_generator_is_refused():
    with pytest.raises(InvalidRequest, match="neither a trace file nor a generator"):
        Source(name="nothing").load(seed=1, programs=3)


def command(*arguments):
    import typer

    app = typer.Typer()
    app.command()(cli.replay_command)
    return CliRunner().invoke(app, list(map(str, arguments)))


def test_the_command_compares_presets_and_writes_its_results(trace_file, tmp_path, monkeypatch):
    monkeypatch.setenv("CONTINUUM_CACHE", str(tmp_path / "cache"))
    told = command(
        trace_file,
        "--rate",
        2,
        "--programs",
        5,
        "--kv-tokens",
        24000,
        "--csv",
        tmp_path / "out",
        "--html",
        tmp_path / "out" / "report.html",
        "--json",
    )
    assert told.exit_code == 0, told.output
    document = json.loads(told.stdout)
    assert [point["policy"] for point in document["points"]] == list(SchedulingPreset)
    assert "continuum_over_vllm_max" in document["summary"]
    assert "<svg" in (tmp_path / "out" / "report.html").read_text()
    with (tmp_path / "out" / "programs.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 5 * len(SchedulingPreset)
    assert json.loads((tmp_path / "out" / "replay.json").read_text())["runs"][0]["by_program"]


def test_the_command_says_what_the_presets_would_change(trace_file, tmp_path, monkeypatch):
    monkeypatch.setenv("CONTINUUM_CACHE", str(tmp_path / "cache"))
    told = command(trace_file, "--rate", 2, "--programs", 5, "--gpu", "b200", "--offload", "100@45")
    assert told.exit_code == 0, told.output
    assert "uncalibrated: b200 has no public kernel profile" in told.stdout
    assert "offload to dram 100 GB at 45 GB/s" in told.stdout
    assert "No preset ends programs noticeably earlier than vllm here." in told.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["swebench", "--gpu", "tpu"], "unknown GPU"),
        (["swebench", "--presets", "magic"], "unknown policy"),
        (["no-such-trace"], "neither a trace file nor a generator"),
        (["swebench", "--load", "heavy"], "not a list of numbers"),
        (["swebench", "--rate", "1", "--recorded"], "exclude each other"),
        (["swebench", "--offload", "dram:much"], "is not GB, or NAME:GB@RATE"),
        (["swebench", "--lose", "one"], "is not REPLICA@SECONDS"),
        (["swebench", "--lose", "1@5"], "there is no replica 1 among 1"),
        (["swebench", "--declared", "perhaps"], "is none of none, exact"),
        (["swebench", "--recorded", "--programs", "3"], "no arrival times"),
    ],
)
def test_wrong_arguments_are_refused_with_a_reason(arguments, message, tmp_path, monkeypatch):
    monkeypatch.setenv("CONTINUUM_CACHE", str(tmp_path / "cache"))
    told = command(*arguments)
    assert told.exit_code == 2
    assert message in " ".join((told.output + told.stderr).replace("│", " ").split())
