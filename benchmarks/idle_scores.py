"""How good predicted curves of waits are: calibration, ranking, and what an engine would make of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from benchmarks.idle_predictors import GRID_S, Array
from benchmarks.idle_waits import IdleWait

LONG_S = (10.0, 60.0)
#: How long programs have been away, when it is asked which of them is back soonest.
AGES_S = (0.0, 0.5, 1.0, 5.0, 10.0, 60.0)
_SOON_S = 5.0
#: Waits are scored up to here: beyond it nobody holds KV on a GPU.
_CRPS_S_MAX = 600.0


def scores(waits: Sequence[IdleWait], curves: Array) -> dict[str, float | None]:
    """All figures of one predictor over the same waits."""
    seconds = np.array([one.wait.seconds for one in waits])
    censored = np.array([one.wait.is_censored for one in waits])
    out: dict[str, float | None] = {}
    for limit_s in LONG_S:
        # A wait that was cut off before the limit does not say whether it would have passed it.
        known = ~censored | (seconds > limit_s)
        longer, chance = (seconds > limit_s)[known], _at(curves, limit_s)[known]
        out[f"brier_{limit_s:.0f}s"] = float(np.mean((longer - chance) ** 2))
        out[f"auc_{limit_s:.0f}s"] = auc(chance, longer)
    out["crps_s"] = float(np.mean(crps(seconds, censored, curves)))
    chance = _at(curves, LONG_S[0])
    share = float(np.mean(seconds > LONG_S[0]))
    out["idle_share_called_long"] = covered(seconds, chance, share)
    out["idle_share_called_long_twice_as_many"] = covered(seconds, chance, min(1.0, 2 * share))
    out["auc_back_soon_by_age"] = back_soon(seconds, censored, curves)
    return {name: None if value is None else round(value, 4) for name, value in out.items()}


def auc(score: Array, is_positive: npt.NDArray[np.bool_]) -> float | None:
    """The chance that a positive has a higher score than a negative, equal scores counting half; None where one kind is
    missing."""
    positives = int(is_positive.sum())
    negatives = len(is_positive) - positives
    if not positives or not negatives:
        return None
    _, inverse, counts = np.unique(score, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    return float((ranks[is_positive].sum() - positives * (positives + 1) / 2) / (positives * negatives))


def crps(seconds: Array, censored: npt.NDArray[np.bool_], curves: Array) -> Array:
    """∫ (F(t) − 1[wait ≤ t])² dt, a wait each; of one that was cut off, up to there."""
    grid = np.minimum(GRID_S, _CRPS_S_MAX)
    widths = np.diff(np.concatenate([[0.0], grid]))
    # A cell of the grid counts for the part of it that lies before and after the wait.
    lower = grid - widths
    before = np.clip(seconds[:, None] - lower, 0.0, widths)
    after = np.where(censored[:, None], 0.0, widths - before)
    return np.asarray(((1.0 - curves) ** 2 * before + curves**2 * after).sum(axis=1))


def covered(seconds: Array, chance: Array, share: float) -> float:
    """The share of all idle time in the waits called long, where those with the highest chance are called so until they are
    `share` of all; among equal chances each is called in part."""
    order = np.argsort(-chance, kind="stable")
    wanted, taken, time_s, start = share * len(seconds), 0.0, 0.0, 0
    while start < len(order) and taken < wanted:
        stop = start
        while stop < len(order) and chance[order[stop]] == chance[order[start]]:
            stop += 1
        part = min(1.0, (wanted - taken) / (stop - start))
        time_s += part * float(seconds[order[start:stop]].sum())
        taken += part * (stop - start)
        start = stop
    return time_s / float(seconds.sum())


def back_soon(seconds: Array, censored: npt.NDArray[np.bool_], curves: Array) -> float | None:
    """What a price needs: of programs that have been away for different times, which is back within 5 s? The AUC over all pairs
    of (wait, age) with the wait longer than the age."""
    chances, positives = [], []
    for age_s in AGES_S:
        is_there = seconds > age_s
        is_there &= ~(censored & (seconds <= age_s + _SOON_S))
        now = _at(curves, age_s)[is_there] if age_s else np.ones(int(is_there.sum()))
        then = _interpolated(curves, age_s + _SOON_S)[is_there]
        chances.append(1.0 - then / np.maximum(now, 1e-9))
        positives.append(seconds[is_there] <= age_s + _SOON_S)
    return auc(np.concatenate(chances), np.concatenate(positives))


def _at(curves: Array, seconds: float) -> Array:
    return np.asarray(curves[:, int(np.searchsorted(GRID_S, seconds))])


def _interpolated(curves: Array, seconds: float) -> Array:
    index = int(np.searchsorted(GRID_S, seconds))
    share = (seconds - GRID_S[index - 1]) / (GRID_S[index] - GRID_S[index - 1])
    return np.asarray((1 - share) * curves[:, index - 1] + share * curves[:, index])
