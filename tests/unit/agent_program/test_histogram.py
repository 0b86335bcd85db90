"""Distributions as metrics show them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_program.histogram import Histogram, cumulative


def test_a_value_on_a_bound_is_in_its_bucket() -> None:
    seen = Histogram((0.1, 1.0))
    for value in (0.05, 0.1, 0.2, 5.0):
        seen.add(value)
    assert seen.to_plain()["counts"] == [2, 1, 1]
    assert seen.count == 4


def test_prometheus_counts_each_bucket_with_the_smaller_ones() -> None:
    buckets, total = cumulative({"bounds": [0.1, 1.0], "counts": [2, 1, 1], "sum": 5.35})
    assert buckets == [("0.1", 2), ("1.0", 3), ("+Inf", 4)]
    assert total == 5.35


def test_counts_that_do_not_fit_the_bounds_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        cumulative({"bounds": [1.0], "counts": [1], "sum": 1.0})


@given(st.lists(st.floats(min_value=0, max_value=1e6), max_size=50))
def test_nothing_is_lost_and_the_plain_form_is_json(values: list[float]) -> None:
    seen = Histogram((0.5, 5.0, 50.0))
    for value in values:
        seen.add(value)
    buckets, total = cumulative(json.loads(json.dumps(seen.to_plain())))
    assert buckets[-1] == ("+Inf", len(values))
    assert total == pytest.approx(sum(values))
    for bound, count in buckets[:-1]:
        assert count == sum(value <= float(bound) for value in values)
