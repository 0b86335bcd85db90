"""Eq. 2 of the paper: P(tau)·B − tau, maximised over 0 and the durations seen."""

import math
import random
from collections.abc import Sequence

import pytest

from engine_replicas.retention.duration_table import DurationTable
from engine_replicas.retention.ttl_argmax import BestTtl, cold_start_ttl


def best_ttl(pairs: Sequence[tuple[float, float]], benefit_s: float, *, unreturned: float = 0.0) -> BestTtl:
    return DurationTable(pairs).best_ttl(benefit_s, unreturned=unreturned)


def equally_weighted(*durations_s: float) -> list[tuple[float, float]]:
    return [(duration_s, 1.0) for duration_s in sorted(durations_s)]


def exhaustive(pairs: Sequence[tuple[float, float]], benefit_s: float, unreturned: float = 0.0) -> float:
    """Eq. 2 as it is written, in O(n²)."""
    total = sum(weight for _, weight in pairs) + unreturned

    def value(tau_s: float) -> float:
        return sum(weight for duration_s, weight in pairs if duration_s <= tau_s) / total * benefit_s - tau_s

    candidates = sorted({0.0, *(duration_s for duration_s, _ in pairs)})
    return max(candidates, key=lambda tau_s: (value(tau_s), -tau_s))


def test_the_worked_example() -> None:
    # B = 10.  tau 0.5: 1/4·10 − 0.5 = 2.0;  1: 2/4·10 − 1 = 4.0;  3: 3/4·10 − 3 = 4.5;  9: 10 − 9 = 1.0
    best = best_ttl(equally_weighted(0.5, 1.0, 3.0, 9.0), 10.0)
    assert (best.ttl_s, best.return_probability, best.gain_s) == (3.0, 0.75, 4.5)


def test_nothing_is_retained_where_every_duration_costs_more_than_it_brings() -> None:
    assert best_ttl(equally_weighted(5.0, 6.0), 4.0).ttl_s == 0.0


def test_a_tie_goes_to_the_smaller_ttl() -> None:
    # tau 1: 1/2·4 − 1 = 1;  tau 3: 4 − 3 = 1
    assert best_ttl(equally_weighted(1.0, 3.0), 4.0).ttl_s == 1.0


def test_a_tie_with_zero_retains_nothing() -> None:
    assert best_ttl(equally_weighted(4.0), 4.0).ttl_s == 0.0


def test_a_negative_benefit_retains_nothing() -> None:
    assert best_ttl(equally_weighted(0.0, 0.1), -1.0).ttl_s == 0.0


def test_no_durations_retain_nothing() -> None:
    assert best_ttl([], 100.0).ttl_s == 0.0
    assert best_ttl([], 100.0, unreturned=5.0).ttl_s == 0.0


def test_equal_durations_count_together_before_they_are_judged() -> None:
    # Judged one by one, the first of the three would promise 1/3·3 − 0.9 = 0.1; together they promise 3 − 0.9.
    best = best_ttl(equally_weighted(0.9, 0.9, 0.9), 3.0)
    assert best.return_probability == 1.0


def test_calls_that_never_returned_lower_the_probability() -> None:
    # Without them: 10 − 2 = 8.  With as many again: 1/2·10 − 2 = 3.
    assert best_ttl(equally_weighted(2.0), 10.0, unreturned=1.0).gain_s == pytest.approx(3.0)


@pytest.mark.parametrize("seed", range(50))
def test_it_agrees_with_the_formula_as_written(seed: int) -> None:
    rng = random.Random(seed)
    # Durations on a grid, so that ties and repeats are common.
    pairs = sorted((rng.randrange(0, 40) / 4, rng.choice([0.5, 1.0, 2.0])) for _ in range(rng.randrange(1, 60)))
    benefit_s, unreturned = rng.uniform(-5, 30), rng.choice([0.0, 3.0])
    assert best_ttl(pairs, benefit_s, unreturned=unreturned).ttl_s == exhaustive(pairs, benefit_s, unreturned)


def test_cold_start_is_the_logarithm_of_the_benefit() -> None:
    assert cold_start_ttl(math.e**2) == pytest.approx(2.0)  # the 2 s of the paper's public code: B = 7.39 s


@pytest.mark.parametrize("benefit_s", [-3.0, 0.0, 0.5, 1.0])
def test_cold_start_retains_nothing_for_a_benefit_of_at_most_a_mean_tool_call(benefit_s: float) -> None:
    assert cold_start_ttl(benefit_s) == 0.0


def test_cold_start_is_the_argmax_for_exponential_durations() -> None:
    # Quantiles of Exp(1) stand in for the distribution: the discrete argmax comes out at ln B.
    points = 20_000
    pairs = [(-math.log(1 - (i + 0.5) / points), 1.0) for i in range(points)]
    assert best_ttl(pairs, 6.0).ttl_s == pytest.approx(cold_start_ttl(6.0), abs=0.05)
