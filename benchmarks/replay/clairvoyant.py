"""What a scheduler could do that knew the future: the yardstick for those that guess. Exists in replays only.

It knows each program's remaining work and each tool's duration, and does two things with that:

- order: the program with the least remaining GPU work first, running turns included (the last of them is preempted first);
- retention: a lease to exactly the tool's return, where the tool returns within `PATIENCE` times the time that computing
  the context again would take; none otherwise.

What it bounds: the mean completion time of policies that order and retain, in practice. What it does not: it is a heuristic,
not an optimum. Shortest remaining work first is optimal for one machine without memory limits and with free preemption; here
memory is the limit. It says nothing about tails and fairness, which it sacrifices: long programs wait for all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agent_program.ids import ProgramId, ToolKey
from benchmarks.replay.alone import prefill_s
from benchmarks.replay.control import UtilityCalls
from benchmarks.replay.step_time import StepLoad, StepTimeModel
from benchmarks.replay.workload import ReadyProgram, ReadyTurn
from engine_replicas.admission import NoAdmission
from engine_replicas.config import SchedulingSettings
from engine_replicas.ordering import OrderedTurn
from engine_replicas.policies import Policies
from engine_replicas.retention.policy import DecisionReason, EndedTurn, Estimates, RetentionDecision
from engine_replicas.retention.reclaim import LatestArrival

#: A reload also stalls everybody else in the batch: retention pays for many times its own reload time.
PATIENCE = 20.0
#: A lease outlives its tool by this much, for the next turn to get in.
GRACE_S = 0.5
#: Batch at which a decoded token's share of a step is priced.
_TYPICAL_BATCH = 16


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
        #: How long the tool takes that is being announced.
        self.tool_s: float | None = None

    def remaining_s(self, request_id: str) -> float:
        """GPU seconds that the request's program still needs, this turn included."""
        index, turn = request_id.split(".")
        return self._remaining_s[int(index)][int(turn)]

    def turn_over(self, index: int) -> None:
        """A turn of program `index` ended; its tool's time is in `tool_s` until the next call."""
        turn = self._programs[index].turns[self._turns_over[index]]
        self._turns_over[index] += 1
        self.tool_s = turn.tool_s if turn.tool is not None else None


def _work_s(turn: ReadyTurn, step_time: StepTimeModel, chunk_tokens: int) -> float:
    context = turn.input_tokens + turn.output_tokens / 2
    batch = StepLoad(decode_seqs=_TYPICAL_BATCH, decode_kv_tokens=_TYPICAL_BATCH * context)
    return prefill_s(turn, step_time, chunk_tokens) + turn.output_tokens * step_time.step_s(batch) / _TYPICAL_BATCH


class OracleCalls(UtilityCalls):
    """The utility calls, with the oracle told first."""

    def __init__(self, scheduler: Any, oracle: Oracle) -> None:
        super().__init__(scheduler)
        self._oracle = oracle

    def turn_over(self, program_id: ProgramId, branch: str, tool: ToolKey | None, *, is_last_turn: bool) -> None:
        self._oracle.turn_over(int(program_id.removeprefix("p")) if branch == "0" else int(branch))
        super().turn_over(program_id, branch, tool, is_last_turn=is_last_turn)


@dataclass(kw_only=True, slots=True)
class KnownReturn:
    """Retention by the tool's true duration."""

    oracle: Oracle
    step_time: StepTimeModel
    chunk_tokens: int
    depends_on_tool: bool = True

    def decide(self, turn: EndedTurn) -> RetentionDecision:
        tool_s = self.oracle.tool_s
        context = ReadyTurn(
            input_tokens=max(1, turn.context_tokens), prefix_tokens=0, output_tokens=1, tool=None, tool_s=0.0
        )
        reload_s = prefill_s(context, self.step_time, self.chunk_tokens)
        is_worth_it = tool_s is not None and tool_s <= PATIENCE * reload_s
        return RetentionDecision(
            ttl_s=tool_s + GRACE_S if is_worth_it and tool_s is not None else 0.0,
            reason=DecisionReason.TOOL_HISTORY,
            prefill_reload_s=reload_s,
        )


@dataclass(kw_only=True, slots=True)
class LeastRemaining:
    """Order by the work that is truly left."""

    oracle: Oracle
    reorders: bool = True
    has_lanes: bool = False

    def waiting_key(self, turn: OrderedTurn) -> tuple[float, ...]:
        return (self.oracle.remaining_s(turn.turn_id),)

    def running_key(self, turn: OrderedTurn) -> tuple[float, ...]:
        return (self.oracle.remaining_s(turn.turn_id),)


def clairvoyant_policies(
    settings: SchedulingSettings, estimates: Estimates, *, oracle: Oracle, step_time: StepTimeModel, chunk_tokens: int
) -> Policies:
    """The oracle in place of everything that guesses."""
    return Policies(
        retention=KnownReturn(oracle=oracle, step_time=step_time, chunk_tokens=chunk_tokens),
        reclaiming=LatestArrival(),
        ordering=LeastRemaining(oracle=oracle),
        admission=NoAdmission(),
    )
