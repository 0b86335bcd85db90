"""A shadow beside the real policy on the real scheduler: the replay is the same with and without it, and says what it saw."""

from __future__ import annotations

import pytest

from benchmarks.replay.experiment import Cell, CellResult, Policy, run_cell
from benchmarks.replay.workload import Arrivals
from support.replays import SMALL, agents


def run(scheduling: dict[str, object]) -> CellResult:
    policy = Policy(name="watched", scheduling=scheduling)
    cell = Cell(policy=policy, seed=1, load=None, programs=None, shape=SMALL, arrivals=Arrivals(rate_per_s=2.0))
    return run_cell(cell, agents(16, tool_s=2.0))


@pytest.mark.parametrize(
    ("preset", "watching"), [("continuum", "adaptive"), ("adaptive", "continuum"), ("vllm", "infercept")]
)
def test_a_shadow_changes_nothing(preset: str, watching: str) -> None:
    alone, watched = run({"preset": preset}), run({"preset": preset, "shadow": {"preset": watching}})
    assert watched.run.programs == alone.run.programs
    seen = watched.run.replicas[0].scheduler_stats["shadow"]
    assert seen["retention"] == watching
    assert sum(seen["agreement"].values()) > 0
    assert seen["live_leases"] == 0
