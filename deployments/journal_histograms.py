"""Distributions in the journal's counters: how long programs, their turns and their waits took.

A bucket is a counter like any other (`<name>/<position>`, and `<name>/sum`), moved where the step is stored, so that each step counts
once whichever process reports it. Buckets are told apart by position: to change a distribution's bounds, give it another name.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent_program.histogram import PROGRAM_BOUNDS_S, TURN_BOUNDS, WAIT_BOUNDS_S
from deployments.program import ProgramRecord
from deployments.steps import Step, StepKind


@dataclass(frozen=True, kw_only=True, slots=True)
class Distribution:
    """One histogram."""

    #: Of its counters.
    name: str
    #: Of its metric.
    family: str
    text: str
    bounds: Sequence[float]


PROGRAM = Distribution(
    name="program_s",
    family="continuum_program_duration_seconds",
    text="Time from a program's submission to its end.",
    bounds=PROGRAM_BOUNDS_S,
)
START = Distribution(
    name="start_s",
    family="continuum_program_start_delay_seconds",
    text="Time from a program's submission until a runner takes it.",
    bounds=WAIT_BOUNDS_S,
)
LENGTH = Distribution(
    name="length", family="continuum_program_length_turns", text="Turns of programs that ended.", bounds=TURN_BOUNDS
)
TURN = Distribution(
    name="turn_s",
    family="continuum_program_turn_seconds",
    text="Time of a finished turn as its runner saw it, waits for a replica included.",
    bounds=WAIT_BOUNDS_S,
)
TOOL_WAIT = Distribution(
    name="tool_wait_s",
    family="continuum_program_tool_wait_seconds",
    text="Time from the start of a turn's first tool to the end of its last one.",
    bounds=WAIT_BOUNDS_S,
)
DISTRIBUTIONS = (PROGRAM, START, LENGTH, TURN, TOOL_WAIT)


def increments(steps: Iterable[Step], record: ProgramRecord) -> Iterable[tuple[str, float]]:
    """How steps move the counters of the distributions; `record` is the one that they lead to."""
    for step in steps:
        match step.kind:
            case StepKind.PROGRAM_CLAIMED if record.started_at == step.at:
                yield from _counted(START, step.at - record.created_at)
            case StepKind.TURN_FINISHED:
                yield from _counted(TURN, step.data["seconds"])
            case StepKind.TOOLS_FINISHED:
                yield from _counted(TOOL_WAIT, step.data["seconds"])
            case StepKind.PROGRAM_ENDED:
                yield from _counted(PROGRAM, step.at - record.created_at)
                yield from _counted(LENGTH, record.turns)


def _counted(distribution: Distribution, value: float) -> Iterable[tuple[str, float]]:
    value = max(0.0, value)  # clocks of two machines may disagree
    yield f"{distribution.name}/{bisect_left(distribution.bounds, value)}", 1
    yield f"{distribution.name}/sum", value


def plain(distribution: Distribution, counters: Mapping[str, float]) -> dict[str, Any]:
    """The distribution as `agent_program.histogram` has it."""
    return {
        "bounds": list(distribution.bounds),
        "counts": [counters.get(f"{distribution.name}/{n}", 0) for n in range(len(distribution.bounds) + 1)],
        "sum": counters.get(f"{distribution.name}/sum", 0.0),
    }
