"""How long a wait lasts, from waits of which some were cut off: Kaplan–Meier curves, and curves pooled with coarser ones.

A wait that was watched for c seconds and had not ended (a timeout, a cancelled call) says only that it is longer than c. The
product-limit estimate uses it up to c and not beyond:

    S(t) = Π over durations d ≤ t of (1 − ended at d / still watched at d)

Few samples of one tool say little about its tail, so its curve is drawn towards that of its class, and the class's towards that of
all tools: the coarser curve counts like `strength` further samples. Given that a wait has lasted e seconds, it ends within the
next h with probability 1 − S(e + h) / S(e). Pure.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


class Wait(NamedTuple):
    """One wait, or as much of it as was seen."""

    seconds: float
    #: It had not ended by then.
    is_censored: bool = False
    weight: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Survival:
    """A step function S: the share of waits that last longer than t; after the last step it stays as it is."""

    #: Where it steps, ascending.
    steps_s: tuple[float, ...] = ()
    #: Its value from each step on.
    values: tuple[float, ...] = ()
    #: Weight of the waits that it was made of.
    weight: float = 0.0

    def at(self, seconds: float) -> float:
        """S(t)."""
        index = bisect_right(self.steps_s, seconds)
        return self.values[index - 1] if index else 1.0

    def ends_within(self, horizon_s: float, *, elapsed_s: float) -> float:
        """The probability that a wait which has lasted `elapsed_s` ends within `horizon_s` more; 0 where none ever lasted so
        long."""
        now = self.at(elapsed_s)
        return 1.0 - self.at(elapsed_s + horizon_s) / now if now > 0 else 0.0


def kaplan_meier(waits: Iterable[Wait]) -> Survival:
    """The product-limit estimate. A wait cut off at the moment in which others ended counts as watched then."""
    ordered = sorted(waits, key=lambda wait: (wait.seconds, wait.is_censored))
    watched = total = sum(wait.weight for wait in ordered)
    steps: list[float] = []
    values: list[float] = []
    survival, index = 1.0, 0
    while index < len(ordered):
        seconds, ended, gone = ordered[index].seconds, 0.0, 0.0
        while index < len(ordered) and ordered[index].seconds == seconds:
            gone += ordered[index].weight
            ended += 0.0 if ordered[index].is_censored else ordered[index].weight
            index += 1
        if ended:
            survival *= max(0.0, 1.0 - ended / watched)
            steps.append(seconds)
            values.append(survival)
        watched -= gone
    return Survival(steps_s=tuple(steps), values=tuple(values), weight=total)


def pooled(own: Survival, coarser: Survival, *, strength: float) -> Survival:
    """`own`, drawn towards `coarser` as if that were `strength` further waits."""
    share = own.weight / (own.weight + strength) if own.weight else 0.0
    steps = sorted({*own.steps_s, *coarser.steps_s})
    values = tuple(share * own.at(step) + (1.0 - share) * coarser.at(step) for step in steps)
    return Survival(steps_s=tuple(steps), values=values, weight=own.weight)
