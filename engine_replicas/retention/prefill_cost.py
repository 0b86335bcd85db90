"""PrefillReload: seconds to compute a context of n tokens again, learned from the engine's own steps.

The paper profiles prefill times offline and fits a quadratic in the context length. Here every engine step that does
prefill work is a sample, so that nothing has to be profiled and the fit follows the machine:

    step_s ≈ a + b · tokens + c · pairs

tokens are all tokens computed in the step and pairs the (query, key) pairs that attention visits for them; a, b, c ≥ 0. A
context of n tokens, computed alone in chunks of at most C tokens, then takes

    reload_s(n) = a · ceil(n / C) + b · n + c · n² / 2

which is the paper's quadratic. The fit is least squares on relative errors over the newest samples, reweighted after Huber
so that a step that happened to compile, page or wait does not bend it. Relative, because a long step is measured no better
than a short one; and no coefficient is used that the samples do not ask for. It runs only when enough new samples have come in: a fraction of a millisecond for many prefill steps.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

_REFIT_EVERY = 32
_SAMPLES_FOR_FIT = 8
_HUBER_ROUNDS = 4
_HUBER_K = 1.5
#: Relative error below which one fit is as good as another.
_ERROR_FLOOR = 0.01
#: Which coefficients (per step, per token, per pair) a fit may use, the most plausible first.
_SUPPORTS = ((1,), (0, 1), (1, 2), (0, 1, 2), (0,), (2,), (0, 2))


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillStep:
    """One engine step that computed prompt tokens."""

    #: Tokens computed, decodes included.
    tokens: int
    #: (query, key) pairs attended: a chunk of n tokens behind s others adds n·s + n·(n+1)/2.
    pairs: int
    duration_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillFit:
    """The coefficients of a step's duration."""

    per_step_s: float
    per_token_s: float
    per_pair_s: float

    def step_s(self, tokens: int, pairs: int) -> float:
        """Expected duration of a step."""
        return self.per_step_s + self.per_token_s * tokens + self.per_pair_s * pairs


class PrefillCost:
    """Robust online fit of what a prefill costs."""

    def __init__(self, *, chunk_tokens_max: int, window: int = 256) -> None:
        self._chunk_tokens_max = max(1, chunk_tokens_max)
        self._steps: deque[PrefillStep] = deque(maxlen=window)
        self._fit: PrefillFit | None = None
        self._since_fit = 0

    @property
    def samples(self) -> int:
        """Steps in the window."""
        return len(self._steps)

    def step_ran(self, step: PrefillStep) -> None:
        """Learn from a step. Steps without tokens or with a non-positive duration say nothing."""
        if step.tokens > 0 and 0 < step.duration_s < math.inf:
            self._steps.append(step)
            self._since_fit += 1

    def fit(self) -> PrefillFit | None:
        """The current coefficients; None before the first sample."""
        stale = self._since_fit >= _REFIT_EVERY or (self._since_fit and len(self._steps) <= 2 * _REFIT_EVERY)
        if self._steps and (self._fit is None or stale):
            self._fit = _fit(list(self._steps))
            self._since_fit = 0
        return self._fit

    def reload_s(self, context_tokens: int) -> float:
        """PrefillReload of a context; 0 before the first sample."""
        fit = self.fit()
        if fit is None or context_tokens <= 0:
            return 0.0
        n = context_tokens
        chunks = math.ceil(n / self._chunk_tokens_max)
        return fit.per_step_s * chunks + fit.per_token_s * n + fit.per_pair_s * n * n / 2


def _fit(steps: list[PrefillStep]) -> PrefillFit:
    if len(steps) < _SAMPLES_FOR_FIT:
        per_token_s = math.fsum(step.duration_s for step in steps) / sum(step.tokens for step in steps)
        return PrefillFit(per_step_s=0.0, per_token_s=per_token_s, per_pair_s=0.0)
    # Divide each row by its duration: the residual becomes relative, its target 1.
    rows = [(1 / step.duration_s, step.tokens / step.duration_s, step.pairs / step.duration_s) for step in steps]
    weights = [1.0] * len(rows)
    solution = (0.0, 0.0, 0.0)
    for _ in range(_HUBER_ROUNDS):
        solution = _simplest_good_fit(rows, weights)
        errors = [abs(1 - sum(x * y for x, y in zip(row, solution, strict=True))) for row in rows]
        scale = sorted(errors)[len(errors) // 2] / 0.6745
        limit = max(_HUBER_K * scale, _ERROR_FLOOR)
        weights = [1.0 if error <= limit else limit / error for error in errors]
    return PrefillFit(per_step_s=solution[0], per_token_s=solution[1], per_pair_s=solution[2])


def _simplest_good_fit(rows: list[tuple[float, float, float]], weights: list[float]) -> tuple[float, float, float]:
    """min Σ w (1 − row·x)² for x ≥ 0, over every choice of which coefficients are not 0.

    The choice with the best Bayesian information criterion wins: a coefficient that the samples cannot tell from the others
    (steps of one size, say) would explain nothing and extrapolate wildly, so it stays 0.
    """
    gram = [[0.0] * 3 for _ in range(3)]
    target = [0.0] * 3
    for row, weight in zip(rows, weights, strict=True):
        for i in range(3):
            target[i] += weight * row[i]
            for j in range(3):
                gram[i][j] += weight * row[i] * row[j]
    total = math.fsum(weights)
    best, best_score = (0.0, 0.0, 0.0), math.inf
    for support in _SUPPORTS:
        solved = _solve([[gram[i][j] for j in support] for i in support], [target[i] for i in support])
        if solved is None or any(value < 0 for value in solved):
            continue
        # At a least-squares optimum the residual sum of squares is Σw − target·x.
        residual = total - sum(target[i] * value for i, value in zip(support, solved, strict=True))
        score = len(rows) * math.log(max(residual / total, _ERROR_FLOOR**2)) + len(support) * math.log(len(rows))
        if score < best_score:
            values = dict(zip(support, solved, strict=True))
            best, best_score = (values.get(0, 0.0), values.get(1, 0.0), values.get(2, 0.0)), score
    return best


def _solve(matrix: list[list[float]], target: list[float]) -> list[float] | None:
    """Solve a small symmetric system, scaled to a unit diagonal; None where it is (nearly) singular."""
    size = len(target)
    if any(matrix[i][i] <= 0 for i in range(size)):
        return None
    scale = [1 / math.sqrt(matrix[i][i]) for i in range(size)]
    rows = [[matrix[i][j] * scale[i] * scale[j] for j in range(size)] + [target[i] * scale[i]] for i in range(size)]
    for i in range(size):
        pivot = max(range(i, size), key=lambda r: abs(rows[r][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        if abs(rows[i][i]) < 1e-9:
            return None
        for r in range(i + 1, size):
            factor = rows[r][i] / rows[i][i]
            for column in range(i, size + 1):
                rows[r][column] -= factor * rows[i][column]
    solution = [0.0] * size
    for i in reversed(range(size)):
        known = sum(rows[i][j] * solution[j] for j in range(i + 1, size))
        solution[i] = (rows[i][size] - known) / rows[i][i]
    return [value * scale[i] for i, value in enumerate(solution)]
