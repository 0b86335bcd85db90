"""T: the sliding mean of how long evicted turns waited."""

import pytest

from engine_replicas.retention.queueing_delay import QueueingDelay


def test_it_starts_at_zero() -> None:
    assert QueueingDelay(window=4).mean_s() == 0.0


def test_it_is_the_mean_of_the_newest_delays() -> None:
    delay = QueueingDelay(window=2)
    for waited_s in (100.0, 1.0, 3.0):
        delay.evicted_turn_waited(waited_s)
    assert (delay.mean_s(), delay.samples) == (2.0, 2)


def test_it_stands_when_evictions_stop() -> None:
    delay = QueueingDelay(window=8)
    delay.evicted_turn_waited(5.0)
    assert [delay.mean_s() for _ in range(3)] == [5.0, 5.0, 5.0]


def test_long_streams_do_not_drift() -> None:
    delay = QueueingDelay(window=16)
    for index in range(100_000):
        delay.evicted_turn_waited(0.1 * (index % 7))
    newest = [0.1 * (index % 7) for index in range(100_000 - 16, 100_000)]
    assert delay.mean_s() == pytest.approx(sum(newest) / 16, abs=1e-6)
