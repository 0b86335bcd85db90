"""Whose lease gives way: the paper's rule, and ours, where a lease has a price."""

import math

import pytest

from agent_program.ids import ProgramId, TenantId
from engine_replicas.retention.decode_cost import DecodeCost
from engine_replicas.retention.lease import BranchKey, Lease, LeaseState
from engine_replicas.retention.prefill_cost import PrefillCost, PrefillStep
from engine_replicas.retention.reclaim import CheapestFirst, LatestArrival, WaitingNeed, hazard_per_s
from engine_replicas.retention.reload_cost import ReloadCost

ALICE, BOB, CAROL = (BranchKey(ProgramId(name), "0") for name in ("alice", "bob", "carol"))


def lease(
    key: BranchKey,
    *,
    away_since_s: float = 0.0,
    tokens: int = 1000,
    blocks: int = 10,
    arrival_s: float = 0.0,
    queued_turns: int = 0,
) -> Lease:
    first = hash(key) % 1_000_000 * 1000
    return Lease(
        lease_id=first,
        key=key,
        tenant_id=TenantId("default"),
        program_arrival_s=arrival_s,
        blocks=frozenset(range(first, first + blocks)),
        tokens=tokens,
        started_s=away_since_s,
        away_since_s=away_since_s,
        ttl_s=math.inf,
        deadline_s=math.inf,
        state=LeaseState.ARMED,
        queued_turns=queued_turns,
        queued_since_s=away_since_s if queued_turns else None,
    )


# --- the paper's --------------------------------------------------------------------------------------------------------


def test_the_program_that_arrived_last_gives_up_its_lease_first() -> None:
    leases = [lease(ALICE, arrival_s=1.0), lease(BOB, arrival_s=2.0)]
    victim = LatestArrival().victim(leases, spare=None, now_s=5.0)
    assert victim is not None
    assert victim.key == BOB


def test_one_whose_next_turn_is_queued_goes_after_one_whose_is_not() -> None:
    leases = [lease(ALICE, arrival_s=1.0), lease(BOB, arrival_s=2.0, queued_turns=1)]
    victim = LatestArrival().victim(leases, spare=None, now_s=5.0)
    assert victim is not None
    assert victim.key == ALICE


@pytest.mark.parametrize(
    "rule",
    [
        LatestArrival(),
        CheapestFirst(ReloadCost(PrefillCost(chunk_tokens_max=512), kv_tokens_total=100_000), DecodeCost()),
    ],
)
def test_the_one_who_asks_loses_its_own_lease_last_but_does_lose_it(rule: LatestArrival | CheapestFirst) -> None:
    leases = [lease(ALICE, arrival_s=1.0), lease(BOB, arrival_s=2.0)]
    first = rule.victim(leases, spare=BOB, now_s=5.0)
    last = rule.victim([lease(BOB)], spare=BOB, now_s=5.0)
    assert [first and first.key, last and last.key] == [ALICE, BOB]
    assert rule.victim([], spare=BOB, now_s=5.0) is None


def test_under_the_papers_rule_a_waiting_turn_takes_nothing_while_others_run() -> None:
    need = WaitingNeed(blocks_missing=1, own_tokens=100_000, running_tokens=1)
    assert LatestArrival().worth_taking([lease(ALICE)], need, spare=None, now_s=1e6) == ()


# --- the price of a lease -----------------------------------------------------------------------------------------------


def prices() -> CheapestFirst:
    """1 ms a token of prefill; a decode step of 10 ms plus 1 us a token of KV."""
    prefill, decode = PrefillCost(chunk_tokens_max=512), DecodeCost()
    for tokens in range(100, 500, 10):
        prefill.step_ran(PrefillStep(tokens=tokens, pairs=tokens * tokens // 2, duration_s=tokens * 1e-3))
        decode.step_ran(kv_tokens=tokens * 100, duration_s=10e-3 + tokens * 100 * 1e-6)
    return CheapestFirst(ReloadCost(prefill, kv_tokens_total=100_000), decode)


def test_a_lease_is_worth_its_prefill_times_the_chance_of_a_return_which_falls_with_its_age() -> None:
    held = lease(ALICE, tokens=2000)
    assert prices().value_rate(held, 10.0) == pytest.approx(2.0 / 10.0, rel=0.05)
    assert prices().value_rate(held, 100.0) == pytest.approx(2.0 / 100.0, rel=0.05)


def test_a_turn_that_is_back_already_is_as_good_as_returned() -> None:
    assert hazard_per_s(lease(ALICE, queued_turns=1), 1e6) == hazard_per_s(lease(ALICE, away_since_s=1e6), 1e6)


def test_the_longest_away_goes_first_among_equals() -> None:
    leases = [lease(ALICE, away_since_s=5.0), lease(BOB, away_since_s=0.0), lease(CAROL, away_since_s=8.0)]
    victim = prices().victim(leases, spare=None, now_s=10.0)
    assert victim is not None
    assert victim.key == BOB


def test_per_block_the_smaller_context_is_as_dear_as_the_larger() -> None:
    small, large = lease(ALICE, tokens=1000, blocks=10), lease(BOB, tokens=4000, blocks=20)
    victim = prices().victim([small, large], spare=None, now_s=10.0)
    assert victim is not None
    assert victim.key == ALICE


def test_a_waiting_turn_takes_what_is_worth_less_than_it_brings_and_no_more_than_it_needs() -> None:
    leases = [lease(ALICE, away_since_s=0.0), lease(BOB, away_since_s=100.0), lease(CAROL, away_since_s=199.0)]
    need = WaitingNeed(blocks_missing=10, own_tokens=5000, running_tokens=10_000)
    taken = prices().worth_taking(leases, need, spare=None, now_s=200.0)
    assert [taken.key for taken in taken] == [ALICE]


def test_it_takes_nothing_if_all_that_it_needs_is_worth_more() -> None:
    leases = [lease(ALICE, away_since_s=199.0), lease(BOB, away_since_s=199.5)]
    need = WaitingNeed(blocks_missing=20, own_tokens=100, running_tokens=100_000)
    assert prices().worth_taking(leases, need, spare=None, now_s=200.0) == ()


def test_it_takes_nothing_if_all_leases_together_would_not_make_room() -> None:
    need = WaitingNeed(blocks_missing=11, own_tokens=100_000, running_tokens=100)
    assert prices().worth_taking([lease(ALICE)], need, spare=None, now_s=1e6) == ()


def test_it_never_bids_for_its_own_lease() -> None:
    need = WaitingNeed(blocks_missing=10, own_tokens=100_000, running_tokens=100)
    assert prices().worth_taking([lease(ALICE)], need, spare=ALICE, now_s=1e6) == ()


# --- what one more turn brings ------------------------------------------------------------------------------------------


def test_the_gain_of_a_turn_is_the_rise_of_the_decode_rate() -> None:
    decode = DecodeCost()
    for kv_tokens in range(1000, 41_000, 1000):
        decode.step_ran(kv_tokens=kv_tokens, duration_s=10e-3 + kv_tokens * 1e-6)
    fixed_s, x, y = 10e-3, 20e-3, 5e-3
    rate_before, rate_after = x / (fixed_s + x), (x + y) / (fixed_s + x + y)
    gain = decode.gain_rate(own_tokens=5000, running_tokens=20_000)
    assert gain == pytest.approx(rate_after / rate_before - 1, rel=1e-6)


def test_with_nothing_running_any_turn_is_worth_everything() -> None:
    assert DecodeCost().gain_rate(own_tokens=1, running_tokens=0) == math.inf


def test_before_anything_is_known_a_turn_brings_nothing() -> None:
    assert DecodeCost().gain_rate(own_tokens=1000, running_tokens=1000) == 0.0


@pytest.mark.parametrize("duration_s", [0.0, -1.0, math.inf, math.nan])
def test_impossible_durations_say_nothing(duration_s: float) -> None:
    decode = DecodeCost()
    decode.step_ran(kv_tokens=100, duration_s=duration_s)
    assert decode.samples == 0


def test_steps_that_do_not_depend_on_kv_give_a_fixed_cost_alone() -> None:
    decode = DecodeCost()
    for kv_tokens in range(1000, 21_000, 1000):
        decode.step_ran(kv_tokens=kv_tokens, duration_s=5e-3)
    assert decode.fit() == (pytest.approx(5e-3), pytest.approx(0.0, abs=1e-9))


def test_steps_that_are_all_kv_have_no_fixed_cost_and_nothing_to_share() -> None:
    decode = DecodeCost()
    for kv_tokens in range(1000, 21_000, 1000):
        decode.step_ran(kv_tokens=kv_tokens, duration_s=kv_tokens * 1e-6 - 1e-4)
    assert decode.fit()[0] == 0.0
    assert decode.gain_rate(own_tokens=1000, running_tokens=1000) == 0.0
