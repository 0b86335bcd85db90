"""Random programs on small pools: whatever comes in whatever order, the promises of the scheduler hold.

Each seed is a scenario of its own, and a failure names it; `make nightly` runs ten thousand (`support/random_runs.py`).
"""

import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from support.engine_core import SchedulerHarness
from support.program_load import Load, random_programs
from support.random_runs import POLICIES, played, settings_of

SEEDS = 200


@dataclass
class Runs:
    """What came of all the seeds."""

    failures: list[tuple[int, str]] = field(default_factory=list)
    lease_ends: Counter[str] = field(default_factory=Counter)
    preemptions: int = 0
    policies: set[str] = field(default_factory=set)


@pytest.fixture(scope="module")
def runs(model: Path) -> Runs:
    found = Runs()
    for seed in range(SEEDS):
        try:
            engine = played(model, seed).engine
        except AssertionError as error:
            found.failures.append((seed, str(error)))
            continue
        stats = engine.stats()
        found.lease_ends.update(stats["lease_ends"])
        found.preemptions += engine.preemptions
        found.policies.add(f"{stats['retention']} {stats['ordering']}")
    return found


def test_no_seed_breaks_a_promise(runs: Runs) -> None:
    assert runs.failures == []


def test_the_seeds_meet_memory_pressure_and_every_way_in_which_a_lease_ends(runs: Runs) -> None:
    frequent = (
        *("next_turn_scheduled", "running_turn_needs_blocks", "nothing_runs", "outbid", "over_cap"),
        *("deadline_passed", "never_armed", "not_worth_it", "last_turn", "program_over", "cache_reset", "paused"),
    )
    assert min(runs.lease_ends[reason] for reason in frequent) >= 5, runs.lease_ends
    assert runs.preemptions >= 50
    assert len(runs.policies) >= 7


def under(model: Path, policy: str, seed: int, *, is_async: bool = False) -> Load:
    """One and the same load for every policy, without cancellations, so that answers can be compared."""
    rng = random.Random(seed)
    blocks = rng.choice([24, 32, 48])
    engine = SchedulerHarness(
        model,
        settings_of(policy),
        blocks=blocks,
        max_num_seqs=rng.choice([2, 4, 8]),
        step_tokens_max=rng.choice([64, 128, 512]),
        is_async=is_async,
    )
    programs = random_programs(rng, programs=rng.randint(6, 24), tokens_max=blocks * 16 * 2 // 3)
    for program in programs:
        program.cancel_at = None
    load = Load(engine, programs, rng, resets=False)
    load.run()
    return load


@pytest.mark.parametrize("seed", range(100, 104))
def test_every_policy_and_mode_gives_the_same_answers(model: Path, seed: int) -> None:
    answers = {
        (policy, is_async): sorted(under(model, policy, seed, is_async=is_async).answers)
        for policy in POLICIES
        for is_async in (False, True)
    }
    first = next(iter(answers.values()))
    assert first
    assert all(other == first for other in answers.values())


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_seed_gives_the_same_run(model: Path, policy: str) -> None:
    runs = [under(model, policy, 7) for _ in range(2)]
    assert runs[0].engine.clock.now_s() == runs[1].engine.clock.now_s()
    assert runs[0].engine.stats() == runs[1].engine.stats()
