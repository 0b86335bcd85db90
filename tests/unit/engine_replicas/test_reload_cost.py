"""What it costs to have a lost context back, where a tier below the GPU may still have it."""

import math

import pytest

from engine_replicas.retention.prefill_cost import PrefillCost, PrefillStep
from engine_replicas.retention.reload_cost import ReloadCost


def prefill_of_1ms_a_token() -> PrefillCost:
    prefill = PrefillCost(chunk_tokens_max=512)
    for tokens in range(100, 500, 10):
        prefill.step_ran(PrefillStep(tokens=tokens, pairs=tokens * tokens // 2, duration_s=tokens * 1e-3))
    return prefill


def test_without_a_tier_it_is_the_prefill() -> None:
    prefill = prefill_of_1ms_a_token()
    reload = ReloadCost(prefill, kv_tokens_total=100_000)
    reload.returned(1000, 0)
    assert reload.reload_s(2000) == prefill.reload_s(2000) > 0
    assert not reload.is_cheap(2000)


def test_with_a_tier_that_has_everything_it_is_what_loads_took() -> None:
    reload = ReloadCost(prefill_of_1ms_a_token(), kv_tokens_total=100_000)
    for _ in range(4):
        reload.loaded(1000, 0.01)
        reload.returned(1000, 1000)
    assert reload.reload_s(2000) == pytest.approx(0.02)
    assert reload.is_cheap(2000)


def test_what_the_tier_no_longer_has_is_computed() -> None:
    prefill = prefill_of_1ms_a_token()
    reload = ReloadCost(prefill, kv_tokens_total=100_000)
    for _ in range(4):
        reload.loaded(1000, 0.01)
    reload.returned(1000, 250)
    assert reload.found_share == 0.25
    assert reload.reload_s(2000) == pytest.approx(0.25 * 0.02 + 0.75 * prefill.reload_s(2000))
    assert not reload.is_cheap(2000)


def test_a_load_costs_everybody_no_more_than_the_memory_it_goes_to() -> None:
    prefill = prefill_of_1ms_a_token()
    reload = ReloadCost(prefill, kv_tokens_total=100_000)
    for _ in range(4):
        reload.loaded(1000, 0.5)
        reload.returned(1000, 1000)
    assert reload.reload_s(2000) == pytest.approx(1.0)
    assert reload.stall_s(2000) == pytest.approx(1.0 * 2000 / 100_000)
    assert reload.is_cheap(2000)


def test_a_tier_is_not_cheap_for_a_context_that_takes_the_whole_pool_if_it_is_slower_than_the_gpu() -> None:
    reload = ReloadCost(prefill_of_1ms_a_token(), kv_tokens_total=2000)
    for _ in range(4):
        reload.loaded(1000, 2.0)
        reload.returned(1000, 1000)
    assert not reload.is_cheap(2000)


def test_one_slow_load_does_not_bend_it() -> None:
    reload = ReloadCost(prefill_of_1ms_a_token(), kv_tokens_total=100_000)
    for seconds in (0.01, 0.01, 30.0, 0.01, 0.01):
        reload.loaded(1000, seconds)
        reload.returned(1000, 1000)
    assert reload.reload_s(1000) == pytest.approx(0.01)


@pytest.mark.parametrize(("tokens", "seconds"), [(0, 1.0), (-5, 1.0), (100, -1.0), (100, math.inf), (100, math.nan)])
def test_impossible_loads_say_nothing(tokens: int, seconds: float) -> None:
    reload = ReloadCost(prefill_of_1ms_a_token(), kv_tokens_total=100_000)
    reload.loaded(tokens, seconds)
    assert reload.loads == 0


def test_a_few_loads_are_not_trusted_yet() -> None:
    reload = ReloadCost(prefill_of_1ms_a_token(), kv_tokens_total=100_000)
    for _ in range(3):
        reload.loaded(1000, 0.0)
        reload.returned(1000, 1000)
    assert not reload.is_cheap(1000)


def test_a_tier_that_has_not_been_measured_is_taken_to_be_cheap_so_that_it_will_be() -> None:
    prefill = prefill_of_1ms_a_token()
    reload = ReloadCost(prefill, kv_tokens_total=100_000, has_tier=True)
    assert reload.is_cheap(1000)
    for _ in range(4):
        reload.loaded(1000, 0.01)
        reload.returned(1000, 0)
    assert not reload.is_cheap(1000)
