"""Every number that metrics show of a scheduler is one that the real scheduler reports."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

from engine_replicas import engine_metrics
from support.engine_core import SchedulerHarness, prompt
from support.metrics import QUEUE_STATS, REPLICA_STATS, SHADOW

Build = Callable[..., SchedulerHarness]


def test_the_scheduler_reports_what_the_metrics_page_asks_for(engine: Build) -> None:
    running = engine(preset="continuum", shadow={"preset": "adaptive"}, pool={"blocks": 60})
    running.run_turn("a1", prompt(1, 320), program="a")
    stats = running.scheduler.continuum_stats()
    assert set(QUEUE_STATS) <= set(stats)
    assert set(SHADOW) <= set(stats["shadow"])
    keys = chain(
        (key for _, key in chain(*(table.values() for table in (engine_metrics._GAUGES, engine_metrics._COUNTERS)))),
        (key for _, key in engine_metrics._HISTOGRAMS.values()),
        (key for _, _, keys in engine_metrics._LABELLED_GAUGES.values() for key in keys.values()),
        (key for _, _, key in engine_metrics._LABELLED_COUNTERS.values()),
        (key for _, _, keys in engine_metrics._COUNTERS_OF_SEVERAL.values() for key in keys.values()),
    )
    assert {key.split(".")[0] for key in keys} <= set(stats) | set(REPLICA_STATS)


def test_each_step_is_timed(engine: Build) -> None:
    running = engine(preset="vllm", pool={"blocks": 60})
    running.run_turn("a1", prompt(1, 320), program="a")
    assert sum(running.scheduler.continuum_stats()["schedule_s"]["counts"]) >= 1
