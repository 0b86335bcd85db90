"""PrefillReload where KV may also come back from a tier below the GPU: seconds until a lost context is there again.

Without a tier it is the prefill time (`prefill_cost.py`). With one it is, as in the paper, bytes over the tier's rate; the rate
is what this engine's own loads took, waiting for the link included, and what the tier no longer has is computed:

    reload_s(n) = found · n · s + prefill_s(n) · (1 − found)

s is the median load time per token over the newest loads, and found the share of the tokens that returning turns missed on the
GPU and found below.

To the engine as a whole the two are not alike. A prefill takes the GPU from everybody; a load takes a link that nobody else
needs, and costs the engine only that the memory it goes to lies idle meanwhile. So what a lost context costs everybody is

    stall_s(n) = found · n · s · (n / all KV tokens) + prefill_s(n) · (1 − found)
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median

from engine_replicas.retention.prefill_cost import PrefillCost

#: Stalls below this share of the prefill time make holding KV on the GPU pointless.
CHEAP_SHARE = 0.25
_LOADS_MIN = 4


class ReloadCost:
    """What it costs to have a context back."""

    def __init__(self, prefill: PrefillCost, *, kv_tokens_total: int, has_tier: bool = False, window: int = 64) -> None:
        self._prefill = prefill
        self._has_tier = has_tier
        self._kv_tokens_total = max(1, kv_tokens_total)
        self._seconds_per_token: deque[float] = deque(maxlen=window)
        #: (tokens that a turn missed, tokens of them that were loaded)
        self._returns: deque[tuple[int, int]] = deque(maxlen=window)
        self._per_token_s: float | None = None

    @property
    def loads(self) -> int:
        """Loads in the window."""
        return len(self._seconds_per_token)

    def loaded(self, tokens: int, seconds: float) -> None:
        """A load of so many tokens took so long. Impossible values say nothing."""
        if tokens > 0 and 0 <= seconds < math.inf:
            self._seconds_per_token.append(seconds / tokens)
            self._per_token_s = None

    def returned(self, missing_tokens: int, loaded_tokens: int) -> None:
        """A turn came back, missed so many tokens of its context on the GPU, and had some of them loaded."""
        if missing_tokens > 0:
            self._returns.append((missing_tokens, min(loaded_tokens, missing_tokens)))

    @property
    def found_share(self) -> float:
        """The share of missed tokens that a tier had; 0 before anything is known."""
        missing = sum(missed for missed, _ in self._returns)
        return sum(found for _, found in self._returns) / missing if missing else 0.0

    def reload_s(self, tokens: int) -> float:
        """PrefillReload of a context: until the program has it back; 0 before anything is known."""
        return self._mixed_s(tokens, of_load=1.0)

    def stall_s(self, tokens: int) -> float:
        """What having it back costs everybody; 0 before anything is known."""
        return self._mixed_s(tokens, of_load=min(1.0, tokens / self._kv_tokens_total))

    def is_cheap(self, tokens: int) -> bool:
        """Whether a tier brings a context back at next to no cost, compared with computing it. A tier that has not been
        measured is taken to do so: nothing would ever be loaded, and so measured, if everything were held."""
        if self.loads < _LOADS_MIN:
            return self._has_tier
        return self.stall_s(tokens) < CHEAP_SHARE * self._prefill.reload_s(tokens)

    def _mixed_s(self, tokens: int, *, of_load: float) -> float:
        prefill_s = self._prefill.reload_s(tokens)
        if self.loads < _LOADS_MIN:
            return prefill_s
        if self._per_token_s is None:
            self._per_token_s = median(self._seconds_per_token)
        found = self.found_share
        return found * tokens * self._per_token_s * of_load + (1.0 - found) * prefill_s
