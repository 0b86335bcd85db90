"""Curves of waits against the definition of the estimate, and against counting."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.survival import Survival, Wait, kaplan_meier, pooled

WAITS = st.lists(
    st.builds(Wait, st.integers(0, 12).map(float), st.booleans(), st.sampled_from([0.5, 1.0, 2.0])),
    max_size=40,
)


def product_limit(waits: list[Wait], at_s: float) -> float:
    """S(t) as it is written: a factor for each moment at which waits ended."""
    survival = 1.0
    for moment in sorted({wait.seconds for wait in waits if not wait.is_censored}):
        if moment <= at_s:
            ended = sum(wait.weight for wait in waits if wait.seconds == moment and not wait.is_censored)
            watched = sum(wait.weight for wait in waits if wait.seconds >= moment)
            survival *= 1 - ended / watched
    return survival


@settings(deadline=None)
@given(WAITS, st.integers(0, 26).map(lambda halves: halves / 2))
def test_it_is_the_product_limit_estimate(waits: list[Wait], at_s: float) -> None:
    assert kaplan_meier(waits).at(at_s) == pytest.approx(product_limit(waits, at_s), abs=1e-9)


@settings(deadline=None)
@given(WAITS.filter(bool), st.integers(0, 12).map(float), st.integers(0, 12).map(float))
def test_without_censoring_it_is_the_share_that_lasts_longer(
    waits: list[Wait], elapsed_s: float, horizon_s: float
) -> None:
    ended = [wait._replace(is_censored=False) for wait in waits]
    curve = kaplan_meier(ended)
    total = sum(wait.weight for wait in ended)
    longer = sum(wait.weight for wait in ended if wait.seconds > elapsed_s)
    assert curve.at(elapsed_s) == pytest.approx(longer / total, abs=1e-9)
    soon = sum(wait.weight for wait in ended if elapsed_s < wait.seconds <= elapsed_s + horizon_s)
    expected = soon / longer if longer else 0.0
    assert curve.ends_within(horizon_s, elapsed_s=elapsed_s) == pytest.approx(expected, abs=1e-6)


def test_a_timeout_counts_until_it_and_not_beyond() -> None:
    # At 2 s one of three ends: 2/3. At 5 s one is watched, and ends.  Counting the cut-off one as ended would give 1/3 at 4 s.
    curve = kaplan_meier([Wait(2.0), Wait(3.0, is_censored=True), Wait(5.0)])
    assert (curve.at(1.0), curve.at(4.0), curve.at(5.0)) == pytest.approx((1.0, 2 / 3, 0.0))


def test_few_waits_are_drawn_towards_the_coarser_curve() -> None:
    coarse = kaplan_meier([Wait(1.0), Wait(9.0)])
    own = kaplan_meier([Wait(20.0)] * 10)
    # 10 own against a strength of 30: a quarter of 1 and three quarters of 1/2.
    assert pooled(own, coarse, strength=30.0).at(5.0) == pytest.approx(0.25 + 0.75 / 2)
    assert pooled(Survival(), coarse, strength=30.0).at(5.0) == coarse.at(5.0)
