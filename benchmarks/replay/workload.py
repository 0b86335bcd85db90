"""From a trace to a workload: when programs arrive and how long each tool takes, drawn from one seed. Pure.

Draws depend on the seed and on a program's place in the trace, never on what the scheduler does: a comparison of
policies on one seed is a paired comparison.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from random import Random

from agent_program.errors import InvalidRequest
from benchmarks.replay.trace import USER_WAIT, Program, Trace, Turn

#: Where a source gives no tool times at all: short in-process tools, P50 0.1 s.
DEFAULT_TOOL_S_MEDIAN = 0.1
DEFAULT_TOOL_S_SIGMA = 1.0
#: Human waits: median 84 s and mean 46.7 min in the field; the log-normal with that median, capped so that a run ends.
USER_WAIT_S_MEDIAN = 84.0
USER_WAIT_S_SIGMA = 1.5
USER_WAIT_S_MAX = 1800.0


class ArrivalKind(StrEnum):
    """How programs come in."""

    #: Independent arrivals: exponential gaps.
    POISSON = "poisson"
    #: Gamma gaps with a coefficient of variation of `burstiness`: quiet spells and crowds at the same mean rate.
    BURSTY = "bursty"
    #: A fixed number of programs in flight; the next starts when one ends.
    CLOSED = "closed"
    #: The trace's own arrival times, sped up by `speed_up`.
    RECORDED = "recorded"


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrivals:
    """An arrival process."""

    kind: ArrivalKind = ArrivalKind.POISSON
    #: Programs per second, for open arrivals.
    rate_per_s: float | None = None
    #: Coefficient of variation of the gaps of bursty arrivals; 1 would be Poisson.
    burstiness: float = 4.0
    #: Programs in flight, for closed arrivals.
    concurrency: int | None = None
    speed_up: float = 1.0

    def __post_init__(self) -> None:
        if self.kind in (ArrivalKind.POISSON, ArrivalKind.BURSTY) and not (self.rate_per_s and self.rate_per_s > 0):
            raise InvalidRequest(f"{self.kind.value} arrivals need a rate above 0", param="rate")
        if self.kind is ArrivalKind.CLOSED and not (self.concurrency and self.concurrency > 0):
            raise InvalidRequest("closed arrivals need a concurrency above 0", param="concurrency")
        if self.burstiness <= 0 or self.speed_up <= 0:
            raise InvalidRequest("burstiness and speed-up must be above 0", param="arrivals")


class ToolTimes(StrEnum):
    """Where tool times come from."""

    #: As the trace has them; missing ones are drawn.
    RECORDED = "recorded"
    #: Drawn from measured durations of the same tool class, falling back to the pool of all.
    RESAMPLED = "resampled"


class DeclaredTurns(StrEnum):
    """How well a program's number of turns is told beforehand."""

    #: Not at all.
    NONE = "none"
    EXACT = "exact"
    #: Off by up to 30 % either way.
    WITHIN_30_PERCENT = "within_30_percent"
    #: Off by up to a factor of 2 either way, even on a logarithmic scale.
    WITHIN_FACTOR_2 = "within_factor_2"
    #: A limit that the program stays below: 1 to 4 times its turns, even on a logarithmic scale.
    UPPER_BOUND = "upper_bound"


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadyTurn:
    """A turn with nothing left to draw."""

    input_tokens: int
    prefix_tokens: int
    output_tokens: int
    #: None at the program's end.
    tool: str | None
    #: Seconds of the tool wait after the turn; 0 at the end.
    tool_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadyProgram:
    """A program that is ready to run."""

    #: Index in the workload; identifies it inside a run.
    index: int
    program: Program
    turns: tuple[ReadyTurn, ...]
    #: When it arrives. None: when a place in the closed loop is free, or when its parent's turn ends.
    arrival_s: float | None
    #: How many turns it says it will take; None where it says nothing.
    declared_turns: int | None = None

    @property
    def program_id(self) -> str:
        return self.program.program_id

    def declared_after(self, turn: int) -> int | None:
        """The turns that it says are still to come after `turn` (counted from 0); 0 once it has taken more than it said."""
        return None if self.declared_turns is None else max(0, self.declared_turns - turn - 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Programs ready to run, in order of arrival."""

    name: str
    seed: int
    programs: tuple[ReadyProgram, ...]
    #: Programs in flight where arrivals are a closed loop.
    concurrency: int | None = None


def build_workload(
    trace: Trace,
    *,
    arrivals: Arrivals,
    seed: int,
    programs: int | None = None,
    tool_times: ToolTimes = ToolTimes.RECORDED,
    durations: Mapping[str, Sequence[float]] | None = None,
    tool_time_scale: float = 1.0,
    declared: DeclaredTurns = DeclaredTurns.NONE,
) -> Workload:
    """Choose programs, order and tool times from `seed`.

    Args:
        programs: how many; a trace with more is sampled without replacement, one with fewer is repeated under new ids.
        durations: measured seconds by tool class, for `RESAMPLED`.
        declared: how well programs say how many turns they will take; sub-agents say it of themselves.

    Raises:
        InvalidRequest: recorded arrivals where the trace has none, or nothing to resample from.
    """
    if tool_times is ToolTimes.RESAMPLED and not (durations and any(durations.values())):
        raise InvalidRequest("resampled tool times need measured durations", param="durations")
    roots = [program for program in trace.programs if program.parent is None]
    chosen = _choose(roots, programs, Random(f"{seed}/choose"), keep_order=arrivals.kind is ArrivalKind.RECORDED)
    times = _arrival_times(chosen, arrivals, Random(f"{seed}/arrive"))
    children: dict[str, list[Program]] = {}
    for program in trace.programs:
        if program.parent is not None:
            children.setdefault(program.parent.program_id, []).append(program)

    ready: list[ReadyProgram] = []
    pool = sorted(value for values in (durations or {}).values() for value in values)
    used: dict[str, int] = {}
    for program, arrival_s in zip(chosen, times, strict=True):
        copy = used.get(program.program_id, 0)
        used[program.program_id] = copy + 1
        for member in _family(program, children):
            rng = Random(f"{seed}/tools/{len(ready)}")
            turns = tuple(
                _ready_turn(turn, rng, tool_times, durations or {}, pool, tool_time_scale) for turn in member.turns
            )
            ready.append(
                ReadyProgram(
                    index=len(ready),
                    program=_renamed(member, copy),
                    turns=turns,
                    arrival_s=arrival_s if member is program else None,
                    declared_turns=_declared_turns(len(turns), declared, Random(f"{seed}/declare/{len(ready)}")),
                )
            )
    concurrency = arrivals.concurrency if arrivals.kind is ArrivalKind.CLOSED else None
    return Workload(name=trace.name, seed=seed, programs=tuple(ready), concurrency=concurrency)


def _choose(roots: Sequence[Program], count: int | None, rng: Random, *, keep_order: bool) -> list[Program]:
    if keep_order:
        known = [program for program in roots if program.arrival_s is not None]
        if not known:
            raise InvalidRequest("the trace has no arrival times to replay", param="arrivals")
        return sorted(known, key=lambda program: program.arrival_s or 0.0)[:count]
    wanted = len(roots) if count is None else count
    chosen: list[Program] = []
    while len(chosen) < wanted:
        chosen += rng.sample(list(roots), min(len(roots), wanted - len(chosen)))
    return chosen


def _arrival_times(programs: Sequence[Program], arrivals: Arrivals, rng: Random) -> list[float | None]:
    match arrivals.kind:
        case ArrivalKind.CLOSED:
            return [None] * len(programs)
        case ArrivalKind.RECORDED:
            first = programs[0].arrival_s or 0.0
            return [((program.arrival_s or 0.0) - first) / arrivals.speed_up for program in programs]
        case _:
            rate = arrivals.rate_per_s or 1.0
            shape = 1.0 if arrivals.kind is ArrivalKind.POISSON else arrivals.burstiness**-2
            now_s, times = 0.0, []
            for _ in programs:
                now_s += rng.gammavariate(shape, 1.0 / (rate * shape))
                times.append(now_s)
            return list(times)


def _family(program: Program, children: Mapping[str, list[Program]]) -> list[Program]:
    """A program and all its sub-agents, parents first."""
    family, index = [program], 0
    while index < len(family):
        family += children.get(family[index].program_id, [])
        index += 1
    return family


def _renamed(program: Program, copy: int) -> Program:
    if copy == 0:
        return program
    parent = program.parent and replace(program.parent, program_id=f"{program.parent.program_id}~{copy}")
    return replace(program, program_id=f"{program.program_id}~{copy}", parent=parent)


def _ready_turn(
    turn: Turn,
    rng: Random,
    kind: ToolTimes,
    durations: Mapping[str, Sequence[float]],
    pool: Sequence[float],
    scale: float,
) -> ReadyTurn:
    seconds = 0.0
    if turn.tool is not None:
        # One draw a turn whatever the source, so that the same seed gives the same draws to every variant.
        uniform, normal = rng.random(), rng.gauss(0.0, 1.0)
        if turn.tool == USER_WAIT:
            seconds = turn.tool_s if turn.tool_s is not None else _user_wait_s(normal)
        elif kind is ToolTimes.RESAMPLED:
            seconds = _resampled_s(turn.tool, uniform, durations, pool) * scale
        elif turn.tool_s is not None:
            seconds = turn.tool_s * scale
        else:
            seconds = DEFAULT_TOOL_S_MEDIAN * math.exp(DEFAULT_TOOL_S_SIGMA * normal) * scale
    return ReadyTurn(
        input_tokens=turn.input_tokens,
        prefix_tokens=turn.prefix_tokens,
        output_tokens=turn.output_tokens,
        tool=turn.tool,
        tool_s=seconds,
    )


def _declared_turns(turns: int, declared: DeclaredTurns, rng: Random) -> int | None:
    uniform = rng.random()
    match declared:
        case DeclaredTurns.NONE:
            return None
        case DeclaredTurns.EXACT:
            return turns
        case DeclaredTurns.WITHIN_30_PERCENT:
            return max(1, round(turns * (0.7 + 0.6 * uniform)))
        case DeclaredTurns.WITHIN_FACTOR_2:
            return max(1, round(turns * 2.0 ** (2.0 * uniform - 1.0)))
        case DeclaredTurns.UPPER_BOUND:
            return math.ceil(turns * 4.0**uniform)


def _user_wait_s(normal: float) -> float:
    return min(USER_WAIT_S_MAX, USER_WAIT_S_MEDIAN * math.exp(USER_WAIT_S_SIGMA * normal))


def _resampled_s(tool: str, uniform: float, durations: Mapping[str, Sequence[float]], pool: Sequence[float]) -> float:
    """A measured duration of this tool; parallel calls (`a+b`) take the longest of one draw each at the same quantile."""
    drawn = []
    for name in tool.split("+"):
        samples = durations.get(name) or durations.get(f"Bash:{name}") or pool
        drawn.append(samples[min(len(samples) - 1, int(uniform * len(samples)))])
    return max(drawn)
