"""One engine replica of the replay: an engine, its scheduler's utility calls, and the step that it is at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.replay.control import SchedulerControl
from benchmarks.replay.records import ReplicaRecord
from benchmarks.replay.vllm_engine import ReplayEngine, Step


@dataclass(kw_only=True, slots=True)
class Replica:
    """An engine and what the event loop keeps of it."""

    engine: ReplayEngine
    control: SchedulerControl
    #: How many times as long as modelled its steps take in the end.
    slow_factor: float = 1.0
    #: Turns that became ready while a step ran: what puts them into the engine.
    inbox: list[Callable[[], None]] = field(default_factory=list)
    #: Tags of the turns that were sent here and have not ended, in the order in which they came.
    sent: dict[Any, None] = field(default_factory=dict)
    step: Step | None = None
    is_polling: bool = False
    idle_since_s: float | None = None
    lost_at_s: float | None = None
    turns_ended: int = 0

    @property
    def is_lost(self) -> bool:
        """It has died."""
        return self.lost_at_s is not None

    def report(self) -> dict[str, Any]:
        """What the router hears of it; a turn that waits for a step to end waits like those in the scheduler's queue."""
        stats = self.control.stats()
        return {**stats, "waiting": stats["waiting"] + len(self.inbox)}

    def record(self, index: int) -> ReplicaRecord:
        """What it did."""
        return ReplicaRecord(
            replica=index,
            turns=self.turns_ended,
            busy_s=self.engine.busy_s,
            steps=self.engine.steps,
            scheduler_calls=self.engine.scheduler_calls,
            lost_at_s=self.lost_at_s,
            slow_factor=self.slow_factor,
            scheduler_stats=self.control.stats(),
        )
