"""Tiers below the GPU: what they hold, what they forget, and how long a load takes."""

import pytest

from agent_program.errors import InvalidRequest
from benchmarks.replay.offload import LOAD_LATENCY_S, Link, Tier, TieredStore

BLOCK = 100.0


def store(*capacities: int, rates=(1e3, 1e2)) -> TieredStore:
    tiers = [
        Tier(name=f"t{index}", capacity_bytes=blocks * BLOCK, bytes_per_s=rate)
        for index, (blocks, rate) in enumerate(zip(capacities, rates, strict=False))
    ]
    return TieredStore(tiers, BLOCK)


def names(*numbers: int) -> list[bytes]:
    return [number.to_bytes(2, "big") for number in numbers]


def test_a_run_ends_at_the_first_block_that_no_tier_holds():
    tier = store(10)
    tier.store(names(1, 2, 4))
    assert tier.run_length(names(1, 2, 3, 4)) == 2


def test_the_least_recently_used_block_goes_first():
    tier = store(2)
    tier.store(names(1, 2))
    tier.store(names(1))
    tier.store(names(3))
    assert [tier.run_length(names(n)) for n in (1, 2, 3)] == [1, 0, 1]


def test_what_memory_pushes_out_moves_to_disk_and_comes_back_slower():
    tiers = store(1, 5)
    tiers.store(names(1))
    tiers.store(names(2))
    assert tiers.run_length(names(1, 2)) == 2
    # 100 B at 100 B/s from disk, 100 B at 1,000 B/s from memory.
    assert tiers.seconds_to_load(names(1, 2)) == pytest.approx(LOAD_LATENCY_S + 1.0 + 0.1)


def test_a_block_is_in_one_tier_at_a_time():
    tiers = store(1, 5)
    for block in (1, 2, 1, 2, 1):
        tiers.store(names(block))
    assert len(tiers) == 2


def test_dropped_blocks_are_gone_from_every_tier():
    tiers = store(1, 5)
    tiers.store(names(1))
    tiers.store(names(2))
    tiers.drop(names(1, 2))
    assert len(tiers) == 0


def test_loads_share_the_link_in_order():
    link = Link()
    link.start("a", tokens=16, seconds=2.0, now_s=10.0)
    link.start("b", tokens=16, seconds=1.0, now_s=10.5)
    assert link.next_done_s == 12.0
    assert [load.request_id for load in link.take_done(12.9)] == ["a"]
    assert [(load.request_id, load.done_s) for load in link.take_done(13.0)] == [("b", 13.0)]
    assert link.next_done_s is None


@pytest.mark.parametrize(
    "arguments", [{"capacity_bytes": 0, "bytes_per_s": 1}, {"capacity_bytes": 1, "bytes_per_s": 0}]
)
def test_a_tier_without_size_or_rate_is_refused(arguments):
    with pytest.raises(InvalidRequest, match="above 0"):
        Tier(name="t", **arguments)
