"""What goes wrong in a replay, and when. Pure, and part of what a result depends on.

A *lost* replica takes its KV, its leases and the turns inside it along. As in production, its death breaks the calls of those
turns at once: each is sent again from its request to the replica that the router names then; tool waits go on, and a program
whose tool returns later finds its replica gone and is placed anew. A lost replica does not come back.

A *slow* replica takes a fixed factor longer for every step from a moment on: a throttled GPU, a noisy neighbour. Its scheduler
and the router see only what they can measure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from agent_program.clock import Clock
from agent_program.errors import InvalidRequest
from benchmarks.replay.step_time import StepLoad, StepTimeModel


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaLoss:
    """A replica dies."""

    #: Index of the replica.
    replica: int
    #: When, in seconds since the start of the run.
    at_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SlowReplica:
    """A replica's steps take longer."""

    #: Index of the replica.
    replica: int
    #: Every step takes this many times as long; below 1 it is faster than the others.
    factor: float
    #: From when on, in seconds since the start of the run.
    from_s: float = 0.0


def check_faults(replicas: int, losses: Sequence[ReplicaLoss], slow: Sequence[SlowReplica]) -> None:
    """Refuse faults that cannot happen to `replicas` replicas.

    Raises:
        InvalidRequest: no such replica, a time or factor out of range, a replica lost twice, or nobody left to serve.
    """
    for index in [loss.replica for loss in losses] + [one.replica for one in slow]:
        if not 0 <= index < replicas:
            raise InvalidRequest(f"there is no replica {index} among {replicas}", param="faults")
    times = [loss.at_s for loss in losses] + [one.from_s for one in slow]
    if not all(0 <= time < math.inf for time in times):
        raise InvalidRequest("a fault happens at a finite time from 0 on", param="faults")
    if not all(0 < one.factor < math.inf for one in slow):
        raise InvalidRequest("a slow replica needs a factor above 0", param="faults")
    lost = [loss.replica for loss in losses]
    if len(set(lost)) < len(lost):
        raise InvalidRequest("a replica is lost once", param="faults")
    if len(lost) >= replicas:
        raise InvalidRequest("with every replica lost, no program can end", param="faults")


class SlowedStepTime:
    """Another model's step times, multiplied by a factor from a moment on."""

    def __init__(self, inner: StepTimeModel, slow: SlowReplica, clock: Clock) -> None:
        self._inner, self._slow, self._clock = inner, slow, clock

    @property
    def label(self) -> str:
        return f"{self._inner.label}, x {self._slow.factor:g} from {self._slow.from_s:g} s"

    def step_s(self, load: StepLoad) -> float:
        """Seconds of a step that starts now."""
        seconds = self._inner.step_s(load)
        return seconds * self._slow.factor if self._clock.now_s() >= self._slow.from_s else seconds
