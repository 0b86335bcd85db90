"""What a placement costs: `python -m benchmarks.placement [--json] [--quick]`.

Drives the router as it runs under Ray Serve, with 10, 100 and 1,000 replicas and up to a million bound programs, in one process.
Ray is left out, and the store agrees with every wish at once: a round trip to a real one comes on top of the kinds *new* and
*confirm*, as it does in production.

- `decision_us`, one decision. *bound*: a turn of a program whose binding is fresh here. *confirm*: the same after the copy went
  stale, so the store is asked. *new*: a program never seen, which binds it and re-scores its replica. *tied*: a new sub-program of a
  known one, whose prompt begins as many others do. Each is the median over
  rounds of many decisions, because machines are shared; the turn's sending and ending are part of the decision.
- `report_us`: taking in a broadcast, per replica, when every replica's report changed.
- `bytes_per_program`: what a bound program adds to the process (its id, its entry, its share of the tables), by the growth of
  resident memory. Each row has a process of its own, so that none grows into what another left.

`decision_us_1000_replicas` is the slowest kind at 1,000 replicas and the most programs; `bytes_per_program` is the largest one.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable, Coroutine
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from agent_program.clock import ManualClock
from agent_program.ids import ProgramId, ReplicaId
from continuum_router.affinity import Affinity, PrefixMark
from continuum_router.config import RouterSettings
from continuum_router.placement import Placement
from continuum_router.program_router import ProgramRouter
from continuum_router.replica_view import ReplicaView

REPLICAS = (10, 100, 1_000)
PROGRAMS = (10_000, 100_000, 1_000_000)
#: Longer than the clock moves while a row's programs are bound.
_FRESH_S = 60.0
_ROUNDS = 9
_DECISIONS_PER_ROUND = 2_000
#: A broadcast of a thousand changed reports takes milliseconds; this many give a steady median.
_BROADCASTS = 15


class AgreeingStore:
    """A store without memory or distance: whatever is wished stands."""

    async def get(self, program_id: ProgramId) -> ReplicaId | None:
        return None

    async def bind(self, program_id: ProgramId, wanted: ReplicaId, *, replacing: ReplicaId | None = None) -> ReplicaId:
        return wanted

    async def release(self, program_id: ProgramId, replica_id: ReplicaId) -> bool:
        return True

    async def close(self) -> None: ...


class Subject:
    """One router with its replicas, and programs by number."""

    def __init__(self, replicas: int, programs: int) -> None:
        self.clock = ManualClock()
        # Room for two generations of all programs, so that none is forgotten while it is measured.
        room = 4 * programs + 8 * _ROUNDS * _DECISIONS_PER_ROUND
        settings = RouterSettings(programs_cached_max=room, binding_fresh_s=_FRESH_S)
        self.router = ProgramRouter(bindings=AgreeingStore(), settings=settings, clock=self.clock)
        self.replicas = [ReplicaId(f"{number:08x}") for number in range(replicas)]
        self.report(0)

    def report(self, number: int) -> None:
        """Every replica reports something else than before."""
        self.router.replace_replicas(
            ReplicaView.from_report(
                name,
                256,
                {
                    "running": (index + number) % 7,
                    "total_blocks": 1000,
                    "free_blocks": 500 + (index * 31 + number) % 400,
                },
            )
            for index, name in enumerate(self.replicas)
        )

    def tied_turn(self, program_id: ProgramId) -> None:
        """The first turn of a sub-program; one of a hundred beginnings."""
        number = hash(program_id)
        prefix = PrefixMark(fingerprint=number % 100, tokens=2048)
        affinity = Affinity(parent=program_name(number % 1000), prefix=prefix)
        self.turn(program_id, lambda: affinity)

    def turn(self, program_id: ProgramId, affinity: Callable[[], Affinity] | None = None) -> None:
        """A turn of the program: placed, sent, ended; a microsecond later than the one before."""
        self.clock.advance(1e-6)
        placement = _finish(self.router.place(program_id, affinity=affinity))
        assert placement is not None
        self.router.fleet.turn_sent(placement.replica_id)
        self.router.fleet.turn_ended(placement.replica_id)


def _finish(decision: Coroutine[Any, Any, Placement | None]) -> Placement | None:
    # Nothing here waits, so that a coroutine ends at its first step and no event loop is measured.
    try:
        decision.send(None)
    except StopIteration as end:
        value: Placement | None = end.value
        return value
    raise AssertionError("a decision waited")


def program_name(number: int) -> ProgramId:
    """An id of the length that the platform gives."""
    return ProgramId(f"prog_{number:032x}")


def measure(replicas: int, programs: int) -> dict[str, Any]:
    """One row: `programs` programs bound over `replicas` replicas."""
    subject = Subject(replicas, programs)
    gc.collect()
    before = _resident_bytes()
    for number in range(programs):
        subject.turn(program_name(number))
    gc.collect()
    grown = _resident_bytes() - before

    decisions = _DECISIONS_PER_ROUND
    stride = 7919  # a prime: neighbours in the measurement are not neighbours in memory
    known = [program_name(number * stride % programs) for number in range(_ROUNDS * decisions)]
    fresh = [program_name(programs + number) for number in range(_ROUNDS * decisions)]
    children = [program_name(2 * programs + number) for number in range(_ROUNDS * decisions)]

    def stale(program_id: ProgramId) -> None:
        subject.clock.advance(2 * _FRESH_S)
        subject.turn(program_id)

    return {
        "replicas": replicas,
        "programs": programs,
        "bytes_per_program": round(grown / programs, 1),
        "decision_us": {
            "bound": _median_us(subject.turn, known),
            "confirm": _median_us(stale, known),
            "new": _median_us(subject.turn, fresh),
            "tied": _median_us(subject.tied_turn, children),
        },
        "report_us": _report_us(subject, replicas),
    }


def _median_us(decide: Callable[[ProgramId], None], program_ids: list[ProgramId]) -> float:
    rounds = []
    for start in range(0, len(program_ids), _DECISIONS_PER_ROUND):
        batch = program_ids[start : start + _DECISIONS_PER_ROUND]
        began_s = time.perf_counter()
        for program_id in batch:
            decide(program_id)
        rounds.append((time.perf_counter() - began_s) / len(batch) * 1e6)
    return round(statistics.median(rounds), 2)


def _report_us(subject: Subject, replicas: int) -> float:
    times = []
    for number in range(1, _BROADCASTS + 1):
        began_s = time.perf_counter()
        subject.report(number)
        times.append((time.perf_counter() - began_s) / replicas * 1e6)
    return round(statistics.median(times), 2)


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def run(*, programs_max: int) -> dict[str, Any]:
    """Every row up to `programs_max` programs, and the two numbers that sum them up."""
    grid = []
    for replicas in REPLICAS:
        for programs in PROGRAMS:
            if programs <= programs_max:
                with get_context("spawn").Pool(1) as process:
                    grid.append(process.apply(measure, (replicas, programs)))
                print(_line(grid[-1]), file=sys.stderr)
    largest = grid[-1]
    slowest = max(largest["decision_us"].values())
    return {
        "decision_us_1000_replicas": slowest,
        "decisions_per_s_1000_replicas": round(1e6 / slowest),
        "bytes_per_program": max(row["bytes_per_program"] for row in grid),
        "grid": grid,
    }


def _line(row: dict[str, Any]) -> str:
    kinds = "  ".join(f"{kind} {us:6.2f} µs" for kind, us in row["decision_us"].items())
    return (
        f"{row['replicas']:>5} replicas {row['programs']:>9} programs  {kinds}  "
        f"report {row['report_us']:.2f} µs  {row['bytes_per_program']:.0f} bytes a program"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.placement", description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the result as JSON on standard output")
    parser.add_argument("--quick", action="store_true", help="up to 100,000 programs only")
    options = parser.parse_args()
    result = run(programs_max=100_000 if options.quick else max(PROGRAMS))
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        print(
            f"{result['decision_us_1000_replicas']} µs a decision (the slowest kind, 1,000 replicas), "
            f"{result['bytes_per_program']} bytes a bound program"
        )


if __name__ == "__main__":
    main()
