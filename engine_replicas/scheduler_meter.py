"""What the scheduler counts for metrics alone: additions in its step, everything else when somebody asks."""

from __future__ import annotations

from typing import Any

from agent_program.histogram import STEP_BOUNDS_S, Histogram
from engine_replicas.retention.calibration import Calibration
from engine_replicas.retention.lease import LeaseEnd


class SchedulerMeter:
    """Step times, deadlines against what happened, tokens that came back from a tier below."""

    def __init__(self) -> None:
        self._calibration = Calibration()
        self._step_s = Histogram(STEP_BOUNDS_S)
        self._loaded_tokens = 0

    def step_scheduled(self, seconds: float) -> None:
        """Scheduling one step took so long, ours and vLLM's part together."""
        self._step_s.add(seconds)

    def lease_ended(self, end: LeaseEnd) -> None:
        """A lease is over."""
        self._calibration.ended(end)

    def loaded(self, tokens: int) -> None:
        """So many tokens of context were loaded from host memory or disk."""
        self._loaded_tokens += tokens

    def to_plain(self) -> dict[str, Any]:
        """Plain values, for `continuum_stats`."""
        return {
            "schedule_s": self._step_s.to_plain(),
            "calibration": self._calibration.to_plain(),
            "loaded_tokens": self._loaded_tokens,
        }
