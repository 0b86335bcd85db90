"""The KV cache over time, at a resolution that a picture needs and no more."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.replay.records import OccupancySample
from benchmarks.replay.replica import Replica

SAMPLES_MAX = 256


class OccupancySampler:
    """Samples at most once a period; when there are too many, every second one goes and the period doubles."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = replicas
        self._samples: list[OccupancySample] = []
        self._period_s, self._next_s = 1.0, 0.0

    @property
    def samples(self) -> tuple[OccupancySample, ...]:
        """What was seen, oldest first."""
        return tuple(self._samples)

    def look(self, now_s: float) -> None:
        """Take a sample if one is due; lost replicas count no more."""
        if now_s < self._next_s:
            return
        self._next_s = now_s + self._period_s
        alive = [replica for replica in self._replicas if not replica.is_lost]
        reports = [replica.control.stats() for replica in alive]
        total, unused, retained, running = (
            sum(report[name] for report in reports)
            for name in ("total_blocks", "free_blocks", "retained_blocks", "running")
        )
        cached = sum(replica.engine.cached_blocks for replica in alive)
        # A block that a lease and a running turn share is counted as retained.
        retained = min(retained, total - unused)
        self._samples.append(
            OccupancySample(
                at_s=now_s,
                blocks_total=total,
                blocks_running=total - unused - retained,
                blocks_retained=retained,
                blocks_cached=cached,
                blocks_free=unused - cached,
                turns_running=running,
                turns_waiting=sum(len(replica.sent) for replica in alive) - running,
            )
        )
        if len(self._samples) > SAMPLES_MAX:
            self._samples = self._samples[::2]
            self._period_s *= 2
