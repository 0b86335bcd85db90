"""The matrices: data that stand for runs, checked before anything runs; and what is told of their results."""

import json

import pytest

from agent_program.errors import InvalidRequest
from benchmarks import compare
from benchmarks.matrix import MATRICES, load_matrix
from benchmarks.replay.experiment import saturation_rate
from benchmarks.replay.generators import generate
from benchmarks.replay.sweep import ResultCache
from benchmarks.replay.trace import pooled_eta
from engine_replicas.config import SchedulingPreset
from support.replay_results import result


@pytest.fixture(scope="module")
def full():
    return load_matrix("full")


def workloads_of(spec, *, tiered):
    return {name for block in spec.blocks if ("none" not in block.tiers) == tiered for name in block.workloads}


def test_the_full_matrix_is_wide_enough_to_mean_something(full):
    blocks = [block for block in full.spec.blocks if block.tiers == ("none",)]
    assert len({name for block in blocks for name in block.workloads}) >= 6
    assert {name for block in blocks for name in block.loads} == {"light", "near", "over", "burst"}
    assert len({name for block in blocks for name in block.deployments}) >= 2
    assert all(len({*block.seeds, *block.held_out_seeds}) >= 5 for block in blocks)


def test_program_lengths_go_from_fixed_to_heavy_tailed(full):
    sources = {full.definitions.workloads[name].source for name in workloads_of(full.spec, tiered=False)}
    etas = {source: pooled_eta(generate(source, programs=300, seed=1).programs) for source in sources}
    assert min(etas.values()) < -0.05
    assert max(etas.values()) == pytest.approx(1.0)


def test_seeds_and_two_workloads_are_held_out_of_all_tuning(full):
    runs = list(full.runs(["vllm"]))
    assert len({run.workload for run in runs if run.is_held_out_workload}) >= 2
    assert any(run.is_held_out_seed for run in runs)
    tuned = {run.workload for run in runs if not run.is_held_out_workload}
    assert tuned.isdisjoint({run.workload for run in runs if run.is_held_out_workload})


def test_what_is_tuned_on_holds_nothing_that_is_held_out():
    runs = list(load_matrix("tune").runs(["vllm"]))
    assert runs
    assert not any(run.is_held_out_workload or run.is_held_out_seed for run in runs)
    full = load_matrix("full").spec.blocks
    assert {run.task.cell.seed for run in runs}.isdisjoint({seed for block in full for seed in block.held_out_seeds})


def test_offload_tiers_come_in_every_size_and_rate(full):
    tiers = {(t.capacity_gb, t.gbps) for t in full.definitions.tiers.values()}
    assert tiers == {(size, rate) for size in (50, 100, 200) for rate in (10, 45)}


def test_every_preset_runs_and_what_it_is_measured_against(full):
    policies = full.policies()
    assert set(SchedulingPreset) <= set(policies)
    assert {"program_fcfs", "static:10", "clairvoyant"} <= set(policies)
    assert full.policies(["vllm"])[0] == "vllm"


def test_runs_of_one_point_share_everything_but_the_policy(full):
    runs = list(full.runs(full.policies()))
    groups = {}
    for run in runs:
        cell = run.task.cell
        key = (run.workload, run.load, cell.model, cell.shape.offload, cell.seed, cell.declared)
        groups.setdefault(key, []).append(cell.policy.name)
    assert all(names == list(full.policies()) for names in groups.values())


def test_load_one_is_each_cells_own_saturation_rate(full):
    cells = {run.task.cell.model: run.task.cell for run in full.runs(["vllm"]) if run.workload == "swebench"}
    trace = generate("swebench", programs=60, seed=1)
    rates = {name: saturation_rate(cell, trace) for name, cell in cells.items()}
    assert len(set(rates.values())) == len(rates) == 2


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('loads = ["light"]', 'loads = ["heavy"]', "unknown loads: heavy"),
        ('tiers = ["dram_100_45"]', 'tiers = ["tape"]', "unknown tiers: tape"),
        ("programs = 40", "programs = 0", "greater than or equal to 1"),
        ("programs = 40", "programs = 40\ncolour = 3", "Extra inputs"),
        ("load = 0.4", "load = ", "is not a set of matrices"),
    ],
)
def test_a_matrix_that_cannot_be_run_is_refused_by_name(tmp_path, old, new, message):
    text = MATRICES.read_text()
    assert old in text
    (tmp_path / "m.toml").write_text(text.replace(old, new, 1))
    with pytest.raises(InvalidRequest, match=message):
        load_matrix("quick", tmp_path / "m.toml")


def test_an_unknown_matrix_is_refused():
    with pytest.raises(InvalidRequest, match="known: full, part, quick, tune"):
        load_matrix("huge")


def test_held_out_results_are_summed_up_apart(full):
    runs = [run for run in full.runs(["vllm", "continuum"]) if run.load == "over" and not run.task.cell.shape.offload]
    worse_where_held_out = [
        result(
            run.task.cell.policy.name,
            100.0 if run.task.cell.policy.name == "vllm" else 60.0 if run.is_held_out_workload else 40.0,
            workload=run.workload,
            load_name=run.load,
            seed=run.task.cell.seed,
            deployment=run.task.cell.model,
            reused=0.5,
        )
        for run in runs
    ]
    told = compare.document(worse_where_held_out, runs)
    assert told["summary_tuned_on"]["continuum_over_vllm_median"] == pytest.approx(0.4)
    assert told["summary_held_out_seeds"]["continuum_over_vllm_median"] == pytest.approx(0.4)
    assert told["summary_held_out_workloads"]["continuum_over_vllm_median"] == pytest.approx(0.6)
    assert {cell["workload"] for cell in told["cells"] if cell["held_out"]} == {"chat", "subagents"}


TINY = """
[workloads.w]
source = "memoryless"
about = "…"
[loads.over]
load = 3.0
[deployments.d]
model = "llama-3.1-8b"
gpu = "a100"
[tiers.dram]
capacity_gb = 50
gbps = 10
[matrices.tiny]
programs = 4
[[matrices.tiny.blocks]]
workloads = ["w"]
loads = ["over"]
deployments = ["d"]
tiers = ["none", "dram"]
seeds = [1]
held_out_seeds = [2]
"""


def test_a_matrix_of_ones_own_is_compared_from_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CONTINUUM_CACHE", str(tmp_path / "cache"))
    (tmp_path / "m.toml").write_text(TINY)
    arguments = ["--file", str(tmp_path / "m.toml"), "--matrix", "tiny", "--presets", "vllm,continuum"]
    assert compare.main([*arguments, "--json", "--out", str(tmp_path / "out.json")]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == json.loads((tmp_path / "out.json").read_text())
    assert [cell["tier"] for cell in told["cells"]] == ["none", "dram 50 GB at 10 GB/s"]
    assert set(told["cells"][0]["policies"]) == {"vllm", "continuum", "program_fcfs", "clairvoyant"}
    assert told["cells"][0]["policies"]["vllm"]["seeds"] == 2
    assert told["summary_held_out_seeds"]["points"] == 2
    # Everything is stored now, so nothing is left; and the table needs no run.
    assert compare.main([*arguments, "--estimate"]) == 0
    assert json.loads(capsys.readouterr().out)["left"] == 0
    assert compare.main(arguments) == 0
    assert "summary.continuum_over_vllm_max" in capsys.readouterr().out


def test_what_is_left_is_estimated_from_what_like_runs_took(full, tmp_path):
    store = ResultCache(tmp_path)
    runs = list(full.runs(["vllm"]))
    first = next(run for run in runs if run.task.cell.seed == 1)
    store.put(first.task.key, result("vllm", 1.0), 7.0)
    told = compare.estimate(full, ["vllm"], store)
    assert (told["runs"], told["stored"], told["left"]) == (len(runs), 1, len(runs) - 1)
    assert told["core_s_left"] == 7 * (len(runs) - 1)
