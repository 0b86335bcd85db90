"""Whether a new program may start: one small class per admission.

A program that starts will come back with a longer context, and again. If the contexts of the programs that have started do not
fit the memory together, each turn destroys what another one retained, and all of them compute everything again. So a program
waits until its first turn fits beside what the others are going to need.

Only first turns are held back: a program that has started is never refused a later turn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

#: Contexts grow while they are active.
GROWTH = 1.05


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkingSetView:
    """The memory that the programs which have started want, in tokens."""

    tokens_total: int
    #: Contexts of turns that run or wait after their program's first.
    active_tokens: float
    #: Contexts of paused programs, each weighted with how likely it is to be back soon.
    idle_tokens: float


class Admission(Protocol):
    """Which first turns may start."""

    #: Whether anything is ever held back.
    limits: bool

    def admits(self, own_tokens: int, waited_s: float, others: WorkingSetView) -> bool:
        """Whether a program whose first turn has `own_tokens`, and has waited for `waited_s`, may start now."""
        ...


class NoAdmission:
    """Everybody starts."""

    limits = False

    def admits(self, own_tokens: int, waited_s: float, others: WorkingSetView) -> bool:
        return True


class WorkingSet:
    """As many as fit, with room to grow; whoever has waited too long starts all the same."""

    limits = True

    def __init__(self, *, fraction: float, wait_max_s: float) -> None:
        self._fraction = fraction
        self._wait_max_s = wait_max_s

    def admits(self, own_tokens: int, waited_s: float, others: WorkingSetView) -> bool:
        wanted = GROWTH * (others.active_tokens + own_tokens) + others.idle_tokens
        return waited_s > self._wait_max_s or wanted <= self._fraction * others.tokens_total


def idle_weight(hazard_per_s: float) -> float:
    """How much of a paused program's context counts: all of it while it may be back within the next 5 s."""
    return min(1.0, 5.0 * hazard_per_s)
