"""Random programs on small pools: whatever comes in whatever order, the promises of the scheduler hold.

Each seed is a scenario of its own; a failure names it.
"""

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from engine_replicas.config import SchedulingSettings
from support.engine_core import SchedulerHarness
from support.program_load import Load, random_programs

POLICIES: dict[str, dict[str, Any]] = {
    "vllm": {"preset": "vllm"},
    "continuum": {"preset": "continuum", "k_cold_start": 3},
    "static": {"retention": "static_ttl", "ttl_s": 2.0},
    "forever": {
        "retention": "static_ttl",
        "ttl_s": 10_000,
        "ttl_max_s": 10_000,
        "retained_fraction_max": 1.0,
        "tenant_retained_fraction_max": 1.0,
        "program_retained_fraction_max": 1.0,
    },
    "autellix": {"preset": "autellix"},
    "infercept": {"preset": "infercept"},
    "adaptive": {"preset": "adaptive"},
    "adaptive_and_tight": {
        "preset": "adaptive",
        "tenant_retained_fraction_max": 0.5,
        "program_retained_fraction_max": 0.3,
        "admission_fraction": 0.4,
        "admission_wait_max_s": 5.0,
        "lane_fraction": 0.0,
    },
    "retained_but_fcfs": {"retention": "static_ttl", "ttl_s": 2.0, "ordering": "fcfs"},
}


def played(
    model: Path, policy: str, seed: int, *, is_async: bool = False, resets: bool = False, cancels: bool = True
) -> Load:
    rng = random.Random(seed)
    blocks = rng.choice([24, 32, 48])
    engine = SchedulerHarness(
        model,
        SchedulingSettings(**POLICIES[policy]),
        blocks=blocks,
        max_num_seqs=rng.choice([2, 4, 8]),
        step_tokens_max=rng.choice([64, 128, 512]),
        is_async=is_async,
    )
    programs = random_programs(rng, programs=rng.randint(6, 24), tokens_max=blocks * 16 * 2 // 3)
    if not cancels:
        for program in programs:
            program.cancel_at = None
    load = Load(engine, programs, rng, resets=resets)
    load.run()
    return load


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(8))
def test_every_program_ends_and_every_block_comes_back(model: Path, policy: str, seed: int, is_async: bool) -> None:
    load = played(model, policy, seed, is_async=is_async, resets=seed % 3 == 0)
    engine = load.engine
    stats = engine.stats()
    assert engine.free_blocks == engine.total_blocks - stats["retained_blocks"]
    engine.clock.advance(100_000)
    stats = engine.stats()
    assert engine.free_blocks == engine.total_blocks
    assert stats["leases_begun"] == sum(stats["leases"].values())
    assert (stats["live_turns"], stats["live_leases"]) == (0, 0)
    assert engine.scheduler.reset_prefix_cache()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(200, 206))
def test_leases_go_before_anybody_is_preempted(model: Path, policy: str, seed: int) -> None:
    engine = played(model, policy, seed).engine
    assert engine.leases_beside_preemption == 0


def test_these_loads_do_put_memory_under_pressure(model: Path) -> None:
    engines = [played(model, "forever", seed).engine for seed in range(8)]
    ends = sum((Counter(engine.stats()["lease_ends"]) for engine in engines), Counter())
    assert min(ends[reason] for reason in ("next_turn_scheduled", "running_turn_needs_blocks", "nothing_runs")) >= 5
    assert sum(engine.preemptions for engine in engines) >= 5


@pytest.mark.parametrize("seed", range(100, 106))
def test_every_policy_and_mode_gives_the_same_answers(model: Path, seed: int) -> None:
    answers = {
        (policy, is_async): sorted(played(model, policy, seed, is_async=is_async, cancels=False).answers)
        for policy in POLICIES
        for is_async in (False, True)
    }
    first = next(iter(answers.values()))
    assert first
    assert all(other == first for other in answers.values())


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_seed_gives_the_same_run(model: Path, policy: str) -> None:
    runs = [played(model, policy, 7) for _ in range(2)]
    assert runs[0].engine.clock.now_s() == runs[1].engine.clock.now_s()
    assert runs[0].engine.stats() == runs[1].engine.stats()
