"""The table of durations against the definition, while durations come and go."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_replicas.retention.duration_table import DurationTable


def naive_best(pairs: Sequence[tuple[float, float]], benefit_s: float, unreturned: float) -> tuple[float, float]:
    """Eq. 2 over every duration: (tau, gain), the smallest tau of equal gains."""
    total = sum(weight for _, weight in pairs) + unreturned

    def gain_s(tau_s: float) -> float:
        return sum(weight for duration_s, weight in pairs if duration_s <= tau_s) / total * benefit_s - tau_s

    if benefit_s <= 0 or not pairs:
        return 0.0, 0.0
    best = max([0.0, *(duration_s for duration_s, _ in pairs)], key=lambda tau_s: (gain_s(tau_s), -tau_s))
    return best, gain_s(best)


#: Eighths and powers of two: sums and products are exact, so equal gains are equal.
DURATIONS = st.integers(0, 64).map(lambda eighths: eighths / 8)
WEIGHTS = st.sampled_from([0.5, 1.0, 2.0])
PAIRS = st.lists(st.tuples(DURATIONS, WEIGHTS), max_size=400)


@settings(deadline=None)
@given(PAIRS, st.integers(-16, 256).map(lambda quarters: quarters / 4), st.integers(0, 64))
def test_the_best_ttl_is_that_of_the_definition(
    pairs: list[tuple[float, float]], benefit_s: float, unreturned: int
) -> None:
    pairs.sort()
    # With a total weight that is a power of two, shares are exact as well.
    weight = sum(weight for _, weight in pairs) + unreturned
    total = 1.0
    while total < weight:
        total *= 2
    best = DurationTable(pairs).best_ttl(benefit_s, unreturned=unreturned + total - weight)
    assert (best.ttl_s, best.gain_s) == naive_best(pairs, benefit_s, unreturned + total - weight)


@settings(deadline=None)
@given(PAIRS, st.lists(st.tuples(st.booleans(), DURATIONS), max_size=300))
def test_durations_come_and_go(pairs: list[tuple[float, float]], changes: list[tuple[bool, float]]) -> None:
    table = DurationTable(sorted(pairs))
    known = list(pairs)
    for is_new, duration_s in changes:
        if is_new:
            table.add(duration_s)
            known.append((duration_s, 1.0))
        elif (duration_s, 1.0) in known:
            table.remove(duration_s)
            known.remove((duration_s, 1.0))
    assert sorted(table.pairs()) == sorted(known)
    assert [duration_s for duration_s, _ in table.pairs()] == sorted(duration_s for duration_s, _ in known)
    weight = sum(weight for _, weight in known)
    assert table.weight == weight
    assert table.mean_s == (sum(value * share for value, share in known) / weight if known else 0.0)


@pytest.mark.parametrize("seed", range(6))
def test_a_sliding_window_of_thousands_is_decided_as_the_definition_says(seed: int) -> None:
    rng = random.Random(seed)
    draw = [lambda: rng.lognormvariate(0, 1.5), lambda: float(rng.randrange(60)), lambda: rng.expovariate(0.2)][
        seed % 3
    ]
    window = [draw() for _ in range(2000)]
    table = DurationTable([(value, 1.0) for value in sorted(window)])
    for _ in range(60):
        for _ in range(rng.randrange(1, 90)):
            table.remove(window.pop(0))
            window.append(draw())
            table.add(window[-1])
        benefit_s = rng.choice([0.5, 3.0, 10.0, 40.0]) * rng.random()
        best = table.best_ttl(benefit_s)
        ascending = sorted(window)
        gains = [(rank / 2000 * benefit_s - value, -value) for rank, value in enumerate(ascending, start=1)]
        gain_s, minus_ttl_s = max([(0.0, 0.0), *gains])
        assert best.gain_s == pytest.approx(gain_s, abs=1e-9)
        assert best.ttl_s == pytest.approx(-minus_ttl_s, rel=1e-9)


def test_what_was_never_added_cannot_be_removed() -> None:
    table = DurationTable([(1.0, 2.0), (2.0, 1.0)])
    with pytest.raises(ValueError, match=r"no duration of 1\.0 s with weight 1"):
        table.remove(1.0)
    assert list(table.pairs()) == [(1.0, 2.0), (2.0, 1.0)]
