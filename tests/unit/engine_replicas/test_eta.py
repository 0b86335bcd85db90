"""eta = −Corr(k, N−k) over the turns of finished programs, pooled."""

import random
import statistics

import pytest

from engine_replicas.retention.eta import ETA_PRIOR, EtaEstimator


def by_definition(lengths: list[int]) -> float:
    pairs = [(k, n - k) for n in lengths for k in range(1, n)]
    return -statistics.correlation([k for k, _ in pairs], [rest for _, rest in pairs])


def estimate(lengths: list[int], *, window: int = 10_000, programs_min: int = 2) -> float:
    estimator = EtaEstimator(window=window, programs_min=programs_min)
    for turns in lengths:
        estimator.program_finished(turns)
    return estimator.eta()


@pytest.mark.parametrize("seed", range(20))
def test_the_closed_forms_agree_with_the_definition(seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.randrange(2, 40) for _ in range(rng.randrange(5, 50))]
    assert estimate(lengths) == pytest.approx(by_definition(lengths), abs=1e-9)


def test_it_is_one_where_all_programs_have_one_length() -> None:
    assert estimate([7] * 20) == 1.0


def test_it_is_about_zero_where_lengths_are_memoryless() -> None:
    rng = random.Random(1)
    lengths = []
    for _ in range(20_000):
        turns = 1
        while rng.random() > 0.1:
            turns += 1
        lengths.append(turns)
    assert abs(estimate(lengths, window=30_000)) < 0.05


def test_it_is_negative_where_lengths_are_heavy_tailed() -> None:
    rng = random.Random(1)
    assert estimate([2 + int(rng.paretovariate(1.5)) for _ in range(5000)]) < -0.1


def test_it_keeps_its_prior_until_enough_programs_have_finished() -> None:
    assert estimate([3, 5, 9, 2, 7], programs_min=6) == ETA_PRIOR
    assert estimate([3, 5, 9, 2, 7, 8], programs_min=6) != ETA_PRIOR


def test_programs_of_one_turn_say_nothing() -> None:
    estimator = EtaEstimator(window=16, programs_min=2)
    for _ in range(10):
        estimator.program_finished(1)
    estimator.program_finished(0)
    assert (estimator.programs, estimator.eta()) == (0, ETA_PRIOR)


def test_only_the_newest_programs_count_and_older_ones_leave_exactly() -> None:
    rng = random.Random(3)
    lengths = [rng.randrange(2, 30) for _ in range(500)]
    assert estimate(lengths, window=16) == pytest.approx(by_definition(lengths[-16:]), abs=1e-12)
