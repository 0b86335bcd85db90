"""PrefillReload from the engine's own steps: a · chunks + b · n + c · n²/2."""

import math
import random

import pytest

from engine_replicas.retention.prefill_cost import PrefillCost, PrefillStep

PER_STEP_S, PER_TOKEN_S, PER_PAIR_S = 0.015, 8e-5, 2e-9


def true_step_s(tokens: int, pairs: int) -> float:
    return PER_STEP_S + PER_TOKEN_S * tokens + PER_PAIR_S * pairs


def true_reload_s(tokens: int, chunk: int) -> float:
    return PER_STEP_S * math.ceil(tokens / chunk) + PER_TOKEN_S * tokens + PER_PAIR_S * tokens**2 / 2


def pairs_of(tokens: int, before: int) -> int:
    return tokens * before + tokens * (tokens + 1) // 2


def learned(rng: random.Random, *, noise: float, outliers: float, steps: int = 300) -> PrefillCost:
    cost = PrefillCost(chunk_tokens_max=2048)
    for _ in range(steps):
        tokens = rng.randint(64, 2048)
        pairs = pairs_of(tokens, rng.choice([0, 0, 1000, 5000, 20_000]))
        duration_s = true_step_s(tokens, pairs) * rng.lognormvariate(0, noise)
        if rng.random() < outliers:
            duration_s *= rng.uniform(3, 20)
        cost.step_ran(PrefillStep(tokens=tokens, pairs=pairs, duration_s=duration_s))
    return cost


@pytest.mark.parametrize("seed", range(5))
def test_it_finds_the_quadratic_through_noise_and_outliers(seed: int) -> None:
    cost = learned(random.Random(seed), noise=0.08, outliers=0.05)
    for tokens in (1000, 8000, 32_000, 100_000):
        assert cost.reload_s(tokens) == pytest.approx(true_reload_s(tokens, 2048), rel=0.1)


def test_it_costs_nothing_before_the_first_sample() -> None:
    assert PrefillCost(chunk_tokens_max=2048).reload_s(5000) == 0.0


def test_one_sample_gives_a_price_per_token() -> None:
    cost = PrefillCost(chunk_tokens_max=2048)
    cost.step_ran(PrefillStep(tokens=500, pairs=pairs_of(500, 0), duration_s=0.25))
    assert cost.reload_s(1000) == pytest.approx(0.5)


def test_steps_of_one_size_do_not_make_it_extrapolate_wildly() -> None:
    cost = PrefillCost(chunk_tokens_max=2048)
    for index in range(40):
        cost.step_ran(PrefillStep(tokens=300, pairs=pairs_of(300, 0), duration_s=0.03 * (1 + 0.02 * (index % 3))))
    assert cost.reload_s(30_000) == pytest.approx(3.0, rel=0.1)


@pytest.mark.parametrize(
    ("tokens", "duration_s"), [(0, 1.0), (-5, 1.0), (100, 0.0), (100, -1.0), (100, math.inf), (100, math.nan)]
)
def test_steps_that_say_nothing_are_ignored(tokens: int, duration_s: float) -> None:
    cost = PrefillCost(chunk_tokens_max=2048)
    cost.step_ran(PrefillStep(tokens=tokens, pairs=1, duration_s=duration_s))
    assert (cost.samples, cost.reload_s(100)) == (0, 0.0)


@pytest.mark.parametrize("seed", range(20))
def test_a_longer_context_never_costs_less(seed: int) -> None:
    rng = random.Random(seed)
    cost = PrefillCost(chunk_tokens_max=512)
    for _ in range(rng.randrange(1, 100)):
        step = PrefillStep(tokens=rng.randint(1, 512), pairs=rng.randint(1, 10**7), duration_s=rng.uniform(1e-4, 10))
        cost.step_ran(step)
    costs = [cost.reload_s(tokens) for tokens in range(0, 100_000, 997)]
    assert costs == sorted(costs)
    assert all(math.isfinite(value) and value >= 0 for value in costs)


def test_it_follows_a_machine_that_becomes_slower() -> None:
    cost = learned(random.Random(1), noise=0.0, outliers=0.0)
    before_s = cost.reload_s(8000)
    for _ in range(300):
        cost.step_ran(PrefillStep(tokens=1000, pairs=pairs_of(1000, 0), duration_s=true_step_s(1000, 500_500) * 2))
    assert cost.reload_s(8000) > 1.5 * before_s
