"""Predictors of how long a wait will last: each learns from some programs' waits, and gives curves S(t) for others'.

All curves are values on `GRID_S`. Whatever a predictor looks at, an engine knows it when the wait begins.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from benchmarks.idle_waits import IdleWait
from benchmarks.survival import Survival, Wait, kaplan_meier, pooled

Array: TypeAlias = npt.NDArray[np.float64]
#: 0.02 s to 20 min, with the thresholds that are reported among them.
GRID_S: Array = np.array(sorted({*np.geomspace(0.02, 1200.0, 64).tolist(), 0.5, 1.0, 5.0, 10.0, 60.0}))
#: The coarser curve counts like so many samples of a tool.
_STRENGTH = 20.0
_HAZARD_AGE_S_MIN = 0.5


class Predictor(Protocol):
    """Learns once, then predicts."""

    def fit(self, waits: Sequence[IdleWait]) -> None:
        """Learn from these."""
        ...

    def curves(self, waits: Sequence[IdleWait]) -> Array:
        """S on the grid, a row a wait."""
        ...


class StaticTtl:
    """Every wait is taken to last for the median."""

    def fit(self, waits: Sequence[IdleWait]) -> None:
        self._median_s = float(np.median([one.wait.seconds for one in waits]))

    def curves(self, waits: Sequence[IdleWait]) -> Array:
        return np.tile((self._median_s > GRID_S).astype(np.float64), (len(waits), 1))


class AgeOnly:
    """A time without a scale: hazard 1 / max(t, 0.5 s). It learns nothing."""

    def fit(self, waits: Sequence[IdleWait]) -> None:
        pass

    def curves(self, waits: Sequence[IdleWait]) -> Array:
        young = np.minimum(GRID_S, _HAZARD_AGE_S_MIN) / _HAZARD_AGE_S_MIN
        curve = np.exp(-young) * np.minimum(1.0, _HAZARD_AGE_S_MIN / GRID_S)
        return np.tile(curve, (len(waits), 1))


class ByKey:
    """Kaplan–Meier curves by tool, class or not at all, drawn towards the coarser ones or not."""

    def __init__(self, *, by_tool: bool, strength: float | None = None, half_life: float | None = None) -> None:
        """`strength` None uses a tool's own curve from five samples on; `half_life` counts in programs."""
        self._by_tool, self._strength, self._half_life = by_tool, strength, half_life

    def fit(self, waits: Sequence[IdleWait]) -> None:
        newest = max(one.program for one in waits)
        by_tool: dict[str, list[Wait]] = defaultdict(list)
        by_class: dict[str, list[Wait]] = defaultdict(list)
        everything: list[Wait] = []
        for one in waits:
            age = (newest - one.program) / self._half_life if self._half_life else 0.0
            wait = one.wait._replace(weight=0.5**age)
            everything.append(wait)
            by_tool[one.tool].append(wait)
            by_class[one.tool_class].append(wait)
        whole = kaplan_meier(everything)
        self._default = _on_grid(whole)
        self._rows: dict[str, Array] = {}
        self._classes: dict[str, Array] = {}
        if not self._by_tool:
            return
        of_class = {name: self._drawn(kaplan_meier(some), whole) for name, some in by_class.items()}
        self._classes = {name: _on_grid(curve) for name, curve in of_class.items()}
        for tool, some in by_tool.items():
            coarser = of_class[tool.split("+")[0].split(":")[0]]
            self._rows[tool] = _on_grid(self._drawn(kaplan_meier(some), coarser))

    def _drawn(self, own: Survival, coarser: Survival) -> Survival:
        if self._strength is None:
            return own if own.weight >= 5 else coarser
        return pooled(own, coarser, strength=self._strength)

    def curves(self, waits: Sequence[IdleWait]) -> Array:
        return np.array([self._rows.get(one.tool, self._classes.get(one.tool_class, self._default)) for one in waits])


class Logistic:
    """A logistic regression at each of a few thresholds, on what an engine knows: the tool (its pooled chances), turn, context,
    output, and the program's own past waits."""

    _THRESHOLDS_S = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0)
    _RIDGE = 3.0

    def __init__(self, *, uses_lengths: bool = True) -> None:
        """Without `uses_lengths`, context and output are left out: where waits are estimated from the time of a whole turn, what
        the estimate gets wrong grows with them."""
        self._uses_lengths = uses_lengths

    def fit(self, waits: Sequence[IdleWait]) -> None:
        self._tools = ByKey(by_tool=True, strength=_STRENGTH)
        self._tools.fit(waits)
        raw = self._features(waits, self._held_out_curves(waits))
        self._mean, self._scale = raw.mean(axis=0), raw.std(axis=0) + 1e-9
        design = self._design(raw)
        seconds = np.array([one.wait.seconds for one in waits])
        censored = np.array([one.wait.is_censored for one in waits])
        self._weights = []
        for threshold_s in self._THRESHOLDS_S:
            is_known = ~censored | (seconds > threshold_s)
            self._weights.append(_logistic(design[is_known], (seconds > threshold_s)[is_known], self._RIDGE))

    def curves(self, waits: Sequence[IdleWait]) -> Array:
        design = self._design(self._features(waits, self._tools.curves(waits)))
        at = 1.0 / (1.0 + np.exp(-np.clip(design @ np.array(self._weights).T, -30, 30)))
        at = np.minimum.accumulate(at, axis=1)
        known = np.log(np.array([GRID_S[0] / 2, *self._THRESHOLDS_S, 3000.0]))
        padded = np.hstack([np.ones((len(waits), 1)), at, np.zeros((len(waits), 1))])
        grid = np.log(GRID_S)
        return np.array([np.interp(grid, known, row) for row in padded])

    def _held_out_curves(self, waits: Sequence[IdleWait]) -> Array:
        """Curves of tools for the waits that they are learned from, each from the other half of the programs."""
        out = np.empty((len(waits), len(GRID_S)))
        for half in (0, 1):
            own = [index for index, one in enumerate(waits) if one.program % 2 == half]
            others = [one for one in waits if one.program % 2 != half]
            model = ByKey(by_tool=True, strength=_STRENGTH)
            model.fit(others or waits)
            if own:
                out[own] = model.curves([waits[index] for index in own])
        return out

    def _features(self, waits: Sequence[IdleWait], curves: Array) -> Array:
        columns = [int(np.searchsorted(GRID_S, seconds)) for seconds in (1.0, 10.0, 60.0)]
        chances = np.clip(curves[:, columns], 1e-3, 1 - 1e-3)
        rest = []
        for one in waits:
            logs = [math.log(0.05 + seconds) for seconds in one.past_s]
            # Drawn towards about a second, so that few waits say little.
            mean = sum(logs) / (len(logs) + 2.0)
            longest = max(logs, default=0.0)
            rest.append(
                (
                    math.log1p(one.turn),
                    math.log1p(one.context_tokens) if self._uses_lengths else 0.0,
                    math.log1p(one.output_tokens) if self._uses_lengths else 0.0,
                    mean,
                    logs[-1] if logs else 0.0,
                    longest,
                )
            )
        return np.hstack([np.log(chances / (1 - chances)), np.array(rest)])

    def _design(self, raw: Array) -> Array:
        return np.hstack([np.ones((len(raw), 1)), (raw - self._mean) / self._scale])


def _on_grid(curve: Survival) -> Array:
    values = np.array([1.0, *curve.values])
    return np.asarray(values[np.searchsorted(np.array(curve.steps_s), GRID_S, side="right")])


def _logistic(design: Array, is_longer: npt.NDArray[np.bool_], ridge: float) -> Array:
    """Newton's method with a ridge on all but the intercept."""
    weights = np.zeros(design.shape[1])
    penalty = np.full(design.shape[1], ridge)
    penalty[0] = 1e-3
    for _ in range(25):
        chance = 1.0 / (1.0 + np.exp(-np.clip(design @ weights, -30, 30)))
        gradient = design.T @ (is_longer - chance) - penalty * weights
        curvature = (design * (chance * (1 - chance))[:, None]).T @ design + np.diag(penalty)
        step = np.linalg.solve(curvature, gradient)
        weights = weights + step
        if float(np.abs(step).max()) < 1e-6:
            break
    return weights


PREDICTORS: dict[str, Callable[[], Predictor]] = {
    "static_ttl": StaticTtl,
    "age_only": AgeOnly,
    "global_cdf": partial(ByKey, by_tool=False),
    "tool_cdf": partial(ByKey, by_tool=True),
    "tool_cdf_pooled": partial(ByKey, by_tool=True, strength=_STRENGTH),
    "tool_cdf_pooled_recent": partial(ByKey, by_tool=True, strength=_STRENGTH, half_life=50.0),
    "logistic_without_lengths": partial(Logistic, uses_lengths=False),
    "logistic": Logistic,
}
