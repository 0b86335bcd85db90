"""How long engine steps take, and a log of them for fitting step-time models.

Scheduling runs ahead of execution in async mode, so a step is timed from when it could begin (it was scheduled, and the step
before it was done) to when its output arrives.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engine_replicas.retention.prefill_cost import PrefillStep

#: Of the steps that only decode, one in so many is a sample: they come by the thousand and cost a walk over the batch.
DECODE_EVERY = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeStep:
    """One engine step that only decoded."""

    #: Tokens whose KV it read.
    pairs: int
    duration_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StepWork:
    """What one engine step computed."""

    at_s: float
    #: Tokens computed, and those of them that belong to turns with more than one token in the step.
    tokens: int
    prefill_tokens: int
    turns: int
    #: (query, key) pairs attended.
    pairs: int


class StepLog:
    """Appends one JSON line a step. For measurements: every line is written through."""

    def __init__(self, path: str) -> None:
        self._file = Path(path).open("a", buffering=1, encoding="utf-8")  # noqa: SIM115 - closed in close()

    def write(self, work: StepWork, duration_s: float) -> None:
        self._file.write(json.dumps({**asdict(work), "duration_s": duration_s}) + "\n")

    def close(self) -> None:
        self._file.close()


class StepTimer:
    """Pairs each scheduled step with its output; steps come out in the order they went in."""

    def __init__(self, log: StepLog | None) -> None:
        self._log = log
        self._in_flight: deque[tuple[int, StepWork | None, float]] = deque(maxlen=64)
        self._last_done_s = 0.0
        self._decode_steps = 0

    def scheduled(self, output: Any, requests: Mapping[str, Any], now_s: float) -> None:
        """A step was scheduled; `output` is vLLM's SchedulerOutput. Its work is counted only if somebody wants to know."""
        if not output.total_num_scheduled_tokens:
            return
        tokens = output.total_num_scheduled_tokens
        prefill_tokens = tokens - list(output.num_scheduled_tokens.values()).count(1)
        # Neither mostly prefill nor nothing but decodes: no sample of anything.
        is_sampled = 2 * prefill_tokens >= tokens if prefill_tokens else self._decodes_are_due()
        is_sampled |= self._log is not None
        work = _work(output, requests, now_s) if is_sampled else None
        self._in_flight.append((id(output), work, now_s))

    def _decodes_are_due(self) -> bool:
        self._decode_steps += 1
        return self._decode_steps % DECODE_EVERY == 0

    def finished(self, output: Any, now_s: float) -> PrefillStep | DecodeStep | None:
        """A step's output arrived. Returns it as a sample if it was mostly prefill, or nothing but decodes."""
        if not output.total_num_scheduled_tokens:
            return None
        while self._in_flight:
            step_id, work, scheduled_s = self._in_flight.popleft()
            if step_id != id(output):
                continue
            duration_s = now_s - max(scheduled_s, self._last_done_s)
            self._last_done_s = now_s
            if work is None:
                return None
            if self._log is not None:
                self._log.write(work, duration_s)
            if not work.prefill_tokens:
                return DecodeStep(pairs=work.pairs, duration_s=duration_s)
            if 2 * work.prefill_tokens < work.tokens:
                return None
            return PrefillStep(tokens=work.tokens, pairs=work.pairs, duration_s=duration_s)
        return None

    def close(self) -> None:
        if self._log is not None:
            self._log.close()


def _work(output: Any, requests: Mapping[str, Any], now_s: float) -> StepWork:
    prefill_tokens = pairs = 0
    for request_id, tokens in output.num_scheduled_tokens.items():
        # vLLM has already moved num_computed_tokens past this step.
        before = requests[request_id].num_computed_tokens - tokens
        pairs += tokens * before + tokens * (tokens + 1) // 2
        if tokens > 1:
            prefill_tokens += tokens
    return StepWork(
        at_s=now_s,
        tokens=output.total_num_scheduled_tokens,
        prefill_tokens=prefill_tokens,
        turns=len(output.num_scheduled_tokens),
        pairs=pairs,
    )
