"""What one more context in the batch costs: seconds of a decode step, learned from the engine's own steps.

A step that only decodes reads the weights once and the KV of every running turn:

    step_s ≈ fixed_s + per_kv_token_s · (KV tokens of the batch)

The first term is shared by the batch, so every further turn makes the engine cheaper per token until the second one
dominates. `gain_rate` is that advantage, and what a waiting turn may bid for the memory of idle programs.

The fit is least squares on relative errors over the newest samples, both coefficients kept at 0 or above.
"""

from __future__ import annotations

import math
from collections import deque

_REFIT_EVERY = 32
_SAMPLES_FOR_FIT = 8


class DecodeCost:
    """Online fit of what a decode step costs."""

    def __init__(self, *, window: int = 256) -> None:
        self._steps: deque[tuple[int, float]] = deque(maxlen=window)
        self._fixed_s, self._per_kv_token_s = 0.0, 0.0
        self._since_fit = 0

    @property
    def samples(self) -> int:
        """Steps in the window."""
        return len(self._steps)

    def step_ran(self, kv_tokens: int, duration_s: float) -> None:
        """Learn from a step that decoded with `kv_tokens` in its batch. Impossible values say nothing."""
        if kv_tokens > 0 and 0 < duration_s < math.inf:
            self._steps.append((kv_tokens, duration_s))
            self._since_fit += 1

    def fit(self) -> tuple[float, float]:
        """(fixed_s, per_kv_token_s); zeros before enough samples."""
        is_stale = self._since_fit >= _REFIT_EVERY or (self._since_fit and len(self._steps) <= 2 * _REFIT_EVERY)
        if is_stale and len(self._steps) >= _SAMPLES_FOR_FIT:
            self._fixed_s, self._per_kv_token_s = _fit(self._steps)
            self._since_fit = 0
        return self._fixed_s, self._per_kv_token_s

    def gain_rate(self, *, own_tokens: int, running_tokens: int) -> float:
        """By how much a turn with a context of `own_tokens` raises the engine's decode rate, relative to the rate now.

        With a = fixed_s, x = KV time of the running batch and y = that of the turn, work per second is proportional to
        x / (a + x) now and (x + y) / (a + x + y) then; their ratio minus 1 is

            y · a / (x · (a + x + y))

        Infinite where nothing runs; 0 before anything is known, and where a step costs nothing beside its KV.
        """
        if running_tokens <= 0:
            return math.inf
        fixed_s, per_kv_token_s = self.fit()
        if fixed_s <= 0:
            return 0.0
        if per_kv_token_s <= 0:
            return own_tokens / running_tokens
        x, y = per_kv_token_s * running_tokens, per_kv_token_s * own_tokens
        return y * fixed_s / (x * (fixed_s + x + y))


def _fit(steps: deque[tuple[int, float]]) -> tuple[float, float]:
    # Rows (1/d, k/d) against 1: relative residuals.
    s11 = s12 = s22 = t1 = t2 = 0.0
    for kv_tokens, duration_s in steps:
        one, kv = 1 / duration_s, kv_tokens / duration_s
        s11, s12, s22 = s11 + one * one, s12 + one * kv, s22 + kv * kv
        t1, t2 = t1 + one, t2 + kv
    determinant = s11 * s22 - s12 * s12
    if determinant > 1e-9 * s11 * s22:
        fixed_s = (t1 * s22 - t2 * s12) / determinant
        per_kv_token_s = (s11 * t2 - s12 * t1) / determinant
        if fixed_s >= 0 and per_kv_token_s >= 0:
            return fixed_s, per_kv_token_s
        if fixed_s < 0:
            return 0.0, t2 / s22
    return t1 / s11, 0.0
