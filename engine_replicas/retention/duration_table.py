"""Weighted durations in ascending order, and the paper's TTL over them without looking at each.

Eq. 2 asks for the argmax of  W(d)/W · B − d  over all durations d, where W(d) is the weight at or below d. Evaluating it is one
pass; but an engine decides after nearly every sample, so a pass over ten thousand of them costs milliseconds a turn. Here the
durations lie in blocks of about a hundred, and a decision looks into few of them:

- In a block, whatever lies before it adds the same to every gain, so the block's best point depends on c = B/W alone: it is the
  vertex of the lower convex hull of (weight so far in the block, duration) where the slope reaches c. The hull is made when a
  block is asked for the second time since it changed, and then asked by bisection.
- No point of a block gains more than  (weight at or below the block's end) · c − its first duration. A block whose bound does
  not reach the best gain known is passed over. The first one asked is the best bounded of about thirty.

An equal gain at a smaller duration wins, as the paper's argmax is read here. Equal durations are points of their own: the last
of them has all their weight and beats the others, so they need no care, wherever blocks end.

Adding and removing move a few pointers in one block. Pure.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

from engine_replicas.retention.ttl_argmax import BestTtl

_BLOCK_MAX = 64
_BLOCK_MIN = 12


class _Block:
    """Some neighbouring durations, and their hull while it is known."""

    __slots__ = ("durations", "hull", "is_asked", "weights")

    def __init__(self, durations: list[float], weights: list[float]) -> None:
        self.durations = durations
        self.weights = weights
        #: (slopes between vertices, weights at the vertices, durations of the vertices)
        self.hull: tuple[list[float], list[float], list[float]] | None = None
        #: It was asked since it last changed.
        self.is_asked = False

    def changed(self) -> None:
        """Forget what was made of the points."""
        self.hull, self.is_asked = None, False

    def best(self, slope: float) -> tuple[float, float]:
        """(weight, duration) of the point that maximises weight · slope − duration, the first of equals."""
        if self.hull is None and not self.is_asked:
            # A block that changes before every question is never worth a hull.
            self.is_asked = True
            weights = list(accumulate(self.weights))
            gains = [weight * slope - duration_s for weight, duration_s in zip(weights, self.durations, strict=True)]
            vertex = gains.index(max(gains))
            return weights[vertex], self.durations[vertex]
        slopes, weights, durations = self.hull or self._make_hull()
        vertex = bisect_left(slopes, slope)
        return weights[vertex], durations[vertex]

    def _make_hull(self) -> tuple[list[float], list[float], list[float]]:
        slopes: list[float] = []
        at_weights: list[float] = []
        at_durations: list[float] = []
        for weight, duration_s in zip(accumulate(self.weights), self.durations, strict=True):
            while slopes and (duration_s - at_durations[-1]) <= slopes[-1] * (weight - at_weights[-1]):
                slopes.pop()
                at_weights.pop()
                at_durations.pop()
            if at_weights:
                slopes.append((duration_s - at_durations[-1]) / (weight - at_weights[-1]))
            at_weights.append(weight)
            at_durations.append(duration_s)
        self.hull = (slopes, at_weights, at_durations)
        return self.hull


class DurationTable:
    """Durations with positive weights."""

    def __init__(self, pairs: Sequence[tuple[float, float]] = ()) -> None:
        """Start with (duration, weight) pairs in ascending order of durations."""
        self._blocks: list[_Block] = []
        self._firsts: list[float] = []
        self._weights: list[float] = []
        size = _BLOCK_MAX // 2
        for start in range(0, len(pairs), size):
            durations, weights = zip(*pairs[start : start + size], strict=True)
            self._put(len(self._blocks), _Block(list(durations), list(weights)))
        self.weight = sum(self._weights)
        self._weighted_sum_s = sum(duration_s * weight for duration_s, weight in pairs)

    def pairs(self) -> Iterator[tuple[float, float]]:
        """(duration, weight), ascending."""
        for block in self._blocks:
            yield from zip(block.durations, block.weights, strict=True)

    @property
    def mean_s(self) -> float:
        """The weighted mean; 0 where there is nothing."""
        return self._weighted_sum_s / self.weight if self._blocks else 0.0

    def add(self, duration_s: float, weight: float = 1.0) -> None:
        """Take in a duration."""
        self.weight += weight
        self._weighted_sum_s += duration_s * weight
        if not self._blocks:
            self._put(0, _Block([duration_s], [weight]))
            return
        index = bisect_right(self._firsts, duration_s) - 1
        if index < 0:
            index = 0
            self._firsts[0] = duration_s
        block = self._blocks[index]
        durations = block.durations
        position = bisect_right(durations, duration_s)
        durations.insert(position, duration_s)
        block.weights.insert(position, weight)
        block.changed()
        self._weights[index] += weight
        if len(durations) > _BLOCK_MAX:
            self._cut(index)

    def remove(self, duration_s: float, weight: float = 1.0) -> None:
        """Take out a duration that was added with this weight.

        Raises:
            ValueError: there is none; nothing is changed.
        """
        index, position = self._find(duration_s, weight)
        block = self._blocks[index]
        del block.durations[position]
        del block.weights[position]
        block.changed()
        self.weight -= weight
        self._weighted_sum_s -= duration_s * weight
        self._weights[index] -= weight
        if len(block.durations) < _BLOCK_MIN:
            self._join(index)
        elif not position:
            self._firsts[index] = block.durations[0]

    def best_ttl(self, benefit_s: float, *, unreturned: float = 0.0) -> BestTtl:
        """Maximise Eq. 2: exactly `ttl_argmax.best_ttl` over these pairs."""
        if benefit_s <= 0 or not self._blocks:
            return BestTtl(ttl_s=0.0, return_probability=0.0, gain_s=0.0)
        total = self.weight + unreturned
        slope = benefit_s / total
        ends = list(accumulate(self._weights))
        blocks, firsts, all_weights = self._blocks, self._firsts, self._weights
        # Any block would do to begin with; a good one leaves few others to ask.
        index = max(range(0, len(ends), 1 + len(ends) // 16), key=lambda at: ends[at] * slope - firsts[at])
        weight, duration_s = blocks[index].best(slope)
        returned = ends[index] - all_weights[index] + weight
        best, ttl_s, asked = returned * slope - duration_s, duration_s, index
        if best <= 0.0:
            best, ttl_s, returned = 0.0, 0.0, 0.0
        # Outside of these no bound reaches the best: too little weight before, or too long.
        start = bisect_left(ends, best / slope)
        stop = bisect_right(firsts, benefit_s - best)
        for index in range(start, stop):
            end = ends[index]
            if end * slope - firsts[index] < best or index == asked:
                continue
            weight, duration_s = blocks[index].best(slope)
            weight += end - all_weights[index]
            gain_s = weight * slope - duration_s
            if gain_s > best or (gain_s == best and duration_s < ttl_s):
                best, ttl_s, returned = gain_s, duration_s, weight
        probability = returned / total
        return BestTtl(ttl_s=ttl_s, return_probability=probability, gain_s=probability * benefit_s - ttl_s)

    # --- inside --------------------------------------------------------------------------------------------------------

    def _put(self, index: int, block: _Block) -> None:
        self._blocks.insert(index, block)
        self._firsts.insert(index, block.durations[0])
        self._weights.insert(index, sum(block.weights))

    def _drop(self, index: int) -> _Block:
        del self._firsts[index]
        del self._weights[index]
        return self._blocks.pop(index)

    def _cut(self, index: int) -> None:
        """Make two blocks of one that is too long."""
        block = self._drop(index)
        half = len(block.durations) // 2
        self._put(index, _Block(block.durations[half:], block.weights[half:]))
        self._put(index, _Block(block.durations[:half], block.weights[:half]))

    def _join(self, index: int) -> None:
        """Put a block that has become short together with a neighbour."""
        block = self._drop(index)
        if self._blocks:
            left = max(0, index - 1)
            other = self._drop(left)
            pair = (other, block) if left < index else (block, other)
            joined = _Block(pair[0].durations + pair[1].durations, pair[0].weights + pair[1].weights)
            self._put(left, joined)
            if len(joined.durations) > _BLOCK_MAX:
                self._cut(left)
        elif block.durations:
            self._put(0, block)
        else:
            self.weight = self._weighted_sum_s = 0.0

    def _find(self, duration_s: float, weight: float) -> tuple[int, int]:
        for index in range(bisect_right(self._firsts, duration_s) - 1, -1, -1):
            block = self._blocks[index]
            durations = block.durations
            position = bisect_left(durations, duration_s)
            while position < len(durations) and durations[position] == duration_s:
                if block.weights[position] == weight:
                    return index, position
                position += 1
            if durations[0] < duration_s:
                break
        raise ValueError(f"no duration of {duration_s} s with weight {weight}")
