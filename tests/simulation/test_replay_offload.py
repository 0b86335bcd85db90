"""Offload tiers through vLLM's own connector interface and asynchronous-load path."""

import dataclasses
import json

import pytest

from benchmarks.replay.offload import Tier
from benchmarks.replay.records import Cause
from support.replays import SMALL, agents, replay

PRESSURE = agents(14)
DRAM = Tier(name="dram", capacity_bytes=20e9, bytes_per_s=45e9)


def with_tiers(*tiers, drops_ended=False):
    return dataclasses.replace(SMALL, offload=tiers, offload_drops_ended=drops_ended)


def test_a_tier_that_holds_everything_turns_recomputation_into_loads():
    bare = replay("stock", PRESSURE).to_dict()
    tiered = replay("stock", PRESSURE, shape=with_tiers(DRAM)).to_dict()
    assert bare["recomputed_tokens"] > 100_000
    # What is left are the unhashed ends of turns: up to 16 tokens each.
    assert tiered["recomputed_tokens"] < 16 * 14 * 6
    assert tiered["loaded_tokens"] > 0.5 * bare["recomputed_tokens"]
    assert tiered["completion_s"]["mean"] < bare["completion_s"]["mean"]


def test_a_slow_link_costs_time_that_is_booked_as_loading():
    slow = replay("stock", PRESSURE, shape=with_tiers(dataclasses.replace(DRAM, bytes_per_s=1e9)))
    fast = replay("stock", PRESSURE, shape=with_tiers(DRAM))
    loading = [sum(program.seconds[Cause.LOAD] for program in result.run.programs) for result in (slow, fast)]
    assert loading[0] > 10 * loading[1] > 0
    for program in slow.run.programs:
        assert sum(program.seconds.values()) == pytest.approx(program.completion_s)
        assert min(program.seconds.values()) >= -1e-9


def test_a_full_tier_keeps_more_for_the_living_when_it_forgets_the_dead():
    trace = agents(30, tool_s=0.5)
    tier = dataclasses.replace(DRAM, capacity_bytes=5e9)
    keeping, dropping = (
        replay("stock", trace, rate_per_s=1.0, shape=with_tiers(tier, drops_ended=drops)).to_dict()
        for drops in (False, True)
    )
    assert dropping["recomputed_tokens"] < keeping["recomputed_tokens"]


def test_a_disk_below_memory_catches_what_memory_pushes_out():
    memory = dataclasses.replace(DRAM, capacity_bytes=2e9)
    disk = Tier(name="ssd", capacity_bytes=50e9, bytes_per_s=5e9)
    alone = replay("stock", PRESSURE, shape=with_tiers(memory)).to_dict()
    backed = replay("stock", PRESSURE, shape=with_tiers(memory, disk)).to_dict()
    assert backed["recomputed_tokens"] < 0.1 * alone["recomputed_tokens"]


def test_with_tiers_one_seed_still_gives_the_same_bytes():
    one, other = (
        json.dumps(replay("continuum", PRESSURE, shape=with_tiers(DRAM)).to_dict(with_rows=True), sort_keys=True)
        for _ in range(2)
    )
    assert one == other


@pytest.mark.parametrize("policy", ["stock", "continuum"])
def test_jumps_change_little_with_a_tier(policy):
    jumped, stepped = (replay(policy, PRESSURE, shape=with_tiers(DRAM), jump=jump).to_dict() for jump in (True, False))
    assert jumped["completion_s"]["mean"] == pytest.approx(stepped["completion_s"]["mean"], rel=0.02)


def test_leases_and_loads_together_never_keep_the_engine_idle():
    # Requests that hold KV for a load, and leases that hold the rest, must not wait for one another.
    tier = dataclasses.replace(DRAM, capacity_bytes=4e9)
    bare = replay("static:10", PRESSURE).to_dict()
    tiered = replay("static:10", PRESSURE, shape=with_tiers(tier)).to_dict()
    assert tiered["completion_s"]["mean"] < 1.1 * bare["completion_s"]["mean"]
