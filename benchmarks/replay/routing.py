"""Production's router in virtual time: which replica a program's turns go to.

`ProgramRouter` is the class that Ray Serve's router wraps, with bindings in memory instead of Redis; nothing of it is copied
here. It sees replicas as it does in production: a report of each replica every `routing_stats_period_s`, corrected in between
by the turns that it sent and those that ended. One router stands for all of them, as if one process took every request; what
the views of several routers would differ by is not modelled. Placing takes no time.

The router's calls are coroutines that wait for the store. This store answers at once, so they are run to their end where they
are called; one that would wait for anything else is an error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from agent_program.clock import Clock
from agent_program.errors import PlatformError
from agent_program.ids import ProgramId, ReplicaId
from continuum_router.bindings import MemoryBindings
from continuum_router.config import RouterSettings
from continuum_router.program_router import Intent, ProgramRouter
from continuum_router.replica_view import ReplicaView

#: Turns that Serve lets one engine replica work on at once.
TURNS_PER_REPLICA_MAX = 4096

_T = TypeVar("_T")


class NowhereToGo(PlatformError):
    """No replica lives."""

    code = "no_replica"


class Reporting(Protocol):
    """A replica as the router hears of it."""

    @property
    def is_lost(self) -> bool:
        """It has died."""
        ...

    def report(self) -> Mapping[str, object]:
        """What `record_routing_stats` returns in production."""
        ...


class ReplayRouter:
    """Places turns on replicas, which are known by their index."""

    def __init__(self, replicas: Sequence[Reporting], *, clock: Clock, settings: RouterSettings) -> None:
        self._replicas, self._clock, self._settings = replicas, clock, settings
        self._router = ProgramRouter(
            bindings=MemoryBindings(clock=clock, ttl_s=settings.binding_ttl_s), settings=settings, clock=clock
        )
        self._next_report_s = 0.0
        #: Placements by reason.
        self.reasons: Counter[str] = Counter()

    def hear_reports(self) -> None:
        """Take the replicas' reports if a period is over. Nothing changes between two events, so the first event after a
        period's end still finds what there was to report then."""
        now_s = self._clock.now_s()
        if now_s < self._next_report_s:
            return
        period_s = self._settings.routing_stats_period_s
        self._next_report_s = (now_s // period_s + 1) * period_s
        self._router.replace_replicas(
            ReplicaView.from_report(_name(index), TURNS_PER_REPLICA_MAX, replica.report())
            for index, replica in enumerate(self._replicas)
            if not replica.is_lost
        )

    def place(self, program_id: ProgramId) -> int:
        """The replica for a turn of the program, which is bound to it from then on.

        Raises:
            NowhereToGo: no replica lives.
        """
        return self._placed(self._router.place(program_id, Intent.BIND))

    def find(self, program_id: ProgramId) -> int:
        """The replica for news of the program, which binds nothing.

        Raises:
            NowhereToGo: no replica lives.
        """
        return self._placed(self._router.place(program_id, Intent.FOLLOW))

    def turn_sent(self, replica: int) -> None:
        """A turn was sent."""
        self._router.fleet.turn_sent(_name(replica))

    def turn_ended(self, replica: int) -> None:
        """A turn came back."""
        self._router.fleet.turn_ended(_name(replica))

    def program_over(self, program_id: ProgramId) -> None:
        """The program's binding ends."""
        _run(self._router.release(program_id))

    def lose(self, replica: int) -> None:
        """The replica was seen dying."""
        self._router.lose_replica(_name(replica))

    def _placed(self, placing: Coroutine[Any, Any, Any]) -> int:
        placement = _run(placing)
        if placement is None:
            raise NowhereToGo("no replica lives")
        self.reasons[placement.reason.value] += 1
        return int(placement.replica_id.removeprefix("replica-"))


def _name(replica: int) -> ReplicaId:
    return ReplicaId(f"replica-{replica}")


def _run(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine that never has to wait."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    coroutine.close()
    raise RuntimeError("the router waits for something that does not happen in virtual time")
