"""What a scheduler could do that knew the future: the yardstick for those that guess. Exists in replays only.

It is the `adaptive` scheduler (leases with prices, backfill, working-set admission) with the future in place of its guesses:

- order: the program with the least remaining GPU work first, running turns included (the last of them is preempted first),
  and no lane for first turns, which trades the mean for first tokens;
- retention: a lease is worth its reload over the true time until the tool returns, where `adaptive` has a likelihood.

Where only one half knows the future (`clairvoyant_order`, `clairvoyant_retention`), the other is `adaptive`'s own.

What it bounds: the *mean* completion time that better guesses of lengths and tool times could still bring to this form of
scheduler. A policy near it has nothing left to learn from better estimates.

What it does not bound:

- It is a heuristic, not an optimum. Shortest remaining work first is optimal for one machine without memory limits and with
  free preemption; here memory is the limit, preemption costs a recompute, and tool waits let a long program in between. Another
  form of policy may beat it.
- Tails, fairness and first tokens, which it sacrifices: long programs wait for all others. A policy may beat its P95 and its
  largest slowdown by any amount.
- Arrivals are news to it, as to everyone: it does not keep room for a program that is about to come.
- It knows how long a tool takes, not how long sub-agents keep their parent waiting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from agent_program.ids import ProgramId, ToolKey
from benchmarks.replay.alone import prefill_s
from benchmarks.replay.control import Grant, UtilityCalls
from benchmarks.replay.step_time import StepLoad, StepTimeModel
from benchmarks.replay.workload import ReadyProgram, ReadyTurn
from engine_replicas.config import SchedulingSettings
from engine_replicas.ordering import OrderedTurn
from engine_replicas.policies import Policies, named_policies
from engine_replicas.retention.lease import BranchKey, Lease
from engine_replicas.retention.policy import Estimates
from engine_replicas.retention.reclaim import HAZARD_AGE_S_MIN, CheapestFirst

#: Batch at which a decoded token's share of a step is priced.
_TYPICAL_BATCH = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Foresight:
    """Which decisions know the future."""

    #: Turns are ordered by the true remaining work.
    order: bool = True
    #: Leases are priced by the true return.
    retention: bool = True


class Oracle:
    """The future of one workload."""

    def __init__(self, programs: Sequence[ReadyProgram], step_time: StepTimeModel, chunk_tokens: int) -> None:
        self._programs = programs
        self._remaining_s: list[list[float]] = []
        for program in programs:
            suffix = [0.0]
            for turn in reversed(program.turns):
                suffix.append(suffix[-1] + _work_s(turn, step_time, chunk_tokens))
            self._remaining_s.append(suffix[:0:-1])
        self._turns_over = [0] * len(programs)

    def remaining_s(self, request_id: str) -> float:
        """GPU seconds that the request's program still needs, this turn included."""
        index, turn = request_id.split(".")
        return self._remaining_s[int(index)][int(turn)]

    def turn_over(self, program_id: ProgramId, branch: str) -> None:
        """A turn ended."""
        self._turns_over[_index(program_id, branch)] += 1

    def tool_s(self, key: BranchKey) -> float:
        """How long the tool takes that the branch waits for now; 0 before its turn is known to be over."""
        index = _index(key.program_id, key.branch)
        over = self._turns_over[index]
        return self._programs[index].turns[over - 1].tool_s if over else 0.0


def _index(program_id: ProgramId, branch: str) -> int:
    """A sub-agent is a branch of its root's program, named by its own index."""
    return int(program_id.removeprefix("p")) if branch == "0" else int(branch)


def _work_s(turn: ReadyTurn, step_time: StepTimeModel, chunk_tokens: int) -> float:
    context = turn.input_tokens + turn.output_tokens / 2
    batch = StepLoad(decode_seqs=_TYPICAL_BATCH, decode_kv_tokens=_TYPICAL_BATCH * context)
    return prefill_s(turn, step_time, chunk_tokens) + turn.output_tokens * step_time.step_s(batch) / _TYPICAL_BATCH


class OracleCalls(UtilityCalls):
    """The utility calls, with the oracle told first."""

    def __init__(self, scheduler: Any, oracle: Oracle) -> None:
        super().__init__(scheduler)
        self._oracle = oracle

    def turn_over(
        self, program_id: ProgramId, branch: str, tool: ToolKey | None, *, is_last_turn: bool
    ) -> Grant | None:
        self._oracle.turn_over(program_id, branch)
        return super().turn_over(program_id, branch, tool, is_last_turn=is_last_turn)


class KnownReturn(CheapestFirst):
    """Prices by the true time until the return."""

    def __init__(self, oracle: Oracle, estimates: Estimates) -> None:
        super().__init__(estimates.reload, estimates.decode)
        self._oracle = oracle

    def value_rate(self, lease: Lease, now_s: float) -> float:
        away_s = 0.0 if lease.queued_turns else lease.started_s + self._oracle.tool_s(lease.key) - now_s
        return self._reload.stall_s(lease.tokens) / max(away_s, HAZARD_AGE_S_MIN)


@dataclass(kw_only=True, slots=True)
class LeastRemaining:
    """Order by the work that is truly left."""

    oracle: Oracle
    reorders: bool = True
    #: For the sake of backfill; the lane itself is not used.
    has_lanes: bool = True

    def waiting_key(self, turn: OrderedTurn) -> tuple[float, ...]:
        return (self.oracle.remaining_s(turn.turn_id),)

    def running_key(self, turn: OrderedTurn) -> tuple[float, ...]:
        return (self.oracle.remaining_s(turn.turn_id),)


def clairvoyant_policies(
    settings: SchedulingSettings, estimates: Estimates, *, oracle: Oracle, foresight: Foresight
) -> Policies:
    """The oracle in place of what guesses, and what the settings name for the rest."""
    named = named_policies(settings, estimates)
    return replace(
        named,
        reclaiming=KnownReturn(oracle, estimates) if foresight.retention else named.reclaiming,
        ordering=LeastRemaining(oracle=oracle) if foresight.order else named.ordering,
    )
