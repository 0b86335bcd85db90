"""Which waiting turns did not fit, and whether smaller ones may pass them.

vLLM stops at the first waiting turn that does not fit, so that one large context keeps every small one out while memory lies
free. Passing it is worth it if it is bounded: at most `skips_max` turns are passed at a time, and none that has been refused
for longer than `wait_max_s`; from then on memory collects for it. Looking at a refused turn again costs a walk over its
whole prefix, so it is not looked at until memory was freed, or a while has passed.

Pure: told what was refused and freed; answers which turns to leave out of the next step.
"""

from __future__ import annotations

from collections.abc import Sequence

#: A refused turn is tried again after this long, for prices fall with time.
RETRY_S = 0.25


class Backfill:
    """The refused turns of one engine."""

    def __init__(self, *, skips_max: int, wait_max_s: float) -> None:
        self._skips_max = skips_max
        self._wait_max_s = wait_max_s
        #: Turn → when it was first refused; until it runs or leaves.
        self._refused_since_s: dict[str, float] = {}
        #: Turn → until when it need not be tried; forgotten whenever memory is freed.
        self._quiet_until_s: dict[str, float] = {}

    def refused(self, turn_id: str, now_s: float) -> None:
        """The turn was tried and did not fit."""
        self._refused_since_s.setdefault(turn_id, now_s)
        self._quiet_until_s[turn_id] = now_s + RETRY_S

    def left(self, turn_id: str) -> None:
        """It runs, or is gone."""
        self._refused_since_s.pop(turn_id, None)
        self._quiet_until_s.pop(turn_id, None)

    def memory_freed(self) -> None:
        """Everybody may try again."""
        self._quiet_until_s.clear()

    def first_to_try(self, turn_ids: Sequence[str], now_s: float) -> int:
        """Of the waiting turns, in their order: the position of the first that the next step should try, those before it
        being passed; `len(turn_ids)` where nothing should be tried, for what comes next would fail and may not be passed."""
        for position, turn_id in enumerate(turn_ids):
            if now_s >= self._quiet_until_s.get(turn_id, 0.0):
                return position
            if position >= self._skips_max or now_s - self._refused_since_s[turn_id] > self._wait_max_s:
                break
        return len(turn_ids)
