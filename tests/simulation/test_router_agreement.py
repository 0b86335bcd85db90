"""Several routers over one store under any order of events: nobody is sent to a replica known to be dead, nobody moves without
cause, and once things are calm all routers agree.

The routers, fleet, table and binding rule are the real ones; replicas, the store's absence and time are under the machine's
control. A death is learned by each router at a time of its own, and a router may hold a live replica for dead.
"""

from __future__ import annotations

import asyncio

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from agent_program.clock import ManualClock
from agent_program.ids import ProgramId, ReplicaId
from continuum_router.bindings import MemoryBindings
from continuum_router.config import RouterSettings
from continuum_router.placement import Placement, Reason
from continuum_router.program_router import Intent, ProgramRouter
from continuum_router.replica_view import ReplicaView
from support.switchable_bindings import SwitchableBindings

ROUTERS = 3
PROGRAMS = [ProgramId(f"p{number}") for number in range(6)]
SETTINGS = RouterSettings(
    binding_ttl_s=1000.0, binding_fresh_s=1.0, store_retry_s=1.0, unknown_replica_grace_s=0.0,
    lost_replica_quarantine_s=2.0, programs_cached_max=8,
)  # fmt: skip
routers = st.integers(0, ROUTERS - 1)
programs = st.sampled_from(PROGRAMS)


class Routers(RuleBasedStateMachine):
    """The events, and what must hold after each."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.clock = ManualClock()
        self.store = MemoryBindings(clock=self.clock, ttl_s=SETTINGS.binding_ttl_s)
        self.switches = [SwitchableBindings(self.store) for _ in range(ROUTERS)]
        self.routers: list[ProgramRouter] = []
        self.born = 0
        self.alive: dict[ReplicaId, bool] = {}  # → is draining
        #: What each router has been told to be alive.
        self.believed: list[set[ReplicaId]] = [set() for _ in range(ROUTERS)]
        #: Where each program is, as long as nothing has happened that may move it.
        self.home: dict[ProgramId, ReplicaId] = {}
        #: When something last happened that may move programs: until copies made before are no longer fresh, routers may
        #: disagree, as documented.
        self.disturbed_s = -10.0

    @initialize(count=st.integers(1, 3))
    def start(self, count: int) -> None:
        self.routers = [ProgramRouter(bindings=switch, settings=SETTINGS, clock=self.clock) for switch in self.switches]
        for _ in range(count):
            self.add_replica()

    def teardown(self) -> None:
        if self.routers:
            self._calm_down()
            self.runner.run(self._close())
        self.runner.close()

    # Replicas

    @precondition(lambda self: len(self.alive) < 5)
    @rule()
    def add_replica(self) -> None:
        self.born += 1
        replica = ReplicaId(f"r{self.born}")
        self.alive[replica] = False
        for index in range(ROUTERS):
            self.believed[index].add(replica)
            self._tell(index)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def a_replica_dies(self, data: st.DataObject) -> None:
        replica = data.draw(st.sampled_from(sorted(self.alive)))
        del self.alive[replica]
        self._may_move(replica)

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), draining=st.booleans())
    def a_replica_drains_or_stops_draining(self, data: st.DataObject, draining: bool) -> None:
        replica = data.draw(st.sampled_from(sorted(self.alive)))
        self.alive[replica] = draining
        self._may_move(replica)
        for index in range(ROUTERS):
            self._tell(index)

    @rule(index=routers)
    def a_router_hears_the_news(self, index: int) -> None:
        self.believed[index] = set(self.alive)
        self._tell(index)

    @rule(index=routers, data=st.data())
    def a_router_sees_a_replica_die_rightly_or_not(self, index: int, data: st.DataObject) -> None:
        if not self.believed[index]:
            return
        replica = data.draw(st.sampled_from(sorted(self.believed[index])))
        self.believed[index].discard(replica)
        self.routers[index].lose_replica(replica)
        self._may_move(replica)

    # The store and time

    @rule(index=routers, away=st.booleans())
    def the_store_goes_or_comes_back(self, index: int, away: bool) -> None:
        self.switches[index].away = away

    @rule()
    def the_store_loses_everything(self) -> None:
        self.runner.run(self.store.close())
        self.home.clear()  # a router without a copy places a program anew
        self.disturbed_s = self.clock.now_s()

    @rule(seconds=st.floats(0, 5))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)

    # Programs

    @rule(index=routers, program=programs)
    def a_turn_is_placed(self, index: int, program: ProgramId) -> None:
        knew_all = self.believed[index] == set(self.alive) and not self.switches[index].away
        was_away = self.routers[index].is_store_away
        placement = self.runner.run(self.routers[index].place(program))
        self._check(index, placement)
        if placement is None:
            return
        if program in self.home:
            if self.switches[index].away or was_away:
                del self.home[program]  # decided without the store: another router may decide otherwise
                self.disturbed_s = self.clock.now_s()
            else:
                assert placement.replica_id == self.home[program], f"moved without cause ({placement.reason})"
        elif knew_all and not was_away and self._is_calm():
            self.home[program] = placement.replica_id

    @rule(index=routers, program=programs)
    def an_event_follows_its_program(self, index: int, program: ProgramId) -> None:
        placement = self.runner.run(self.routers[index].place(program, Intent.FOLLOW))
        self._check(index, placement)

    @rule(index=routers, program=programs)
    def a_program_ends(self, index: int, program: ProgramId) -> None:
        self.runner.run(self.routers[index].release(program))
        self.home.pop(program, None)
        self.disturbed_s = self.clock.now_s()

    @invariant()
    def tables_stay_bounded(self) -> None:
        for router in self.routers:
            assert router.programs_known <= SETTINGS.programs_cached_max
            assert router.unconfirmed_count <= SETTINGS.programs_cached_max

    # Details

    def _check(self, index: int, placement: Placement | None) -> None:
        usable = [name for name in self.believed[index] if name in self.routers[index].fleet]
        assert (placement is None) == (not usable)
        if placement is not None:
            assert placement.replica_id in usable

    def _is_calm(self) -> bool:
        is_settled = self.clock.now_s() - self.disturbed_s > SETTINGS.binding_fresh_s
        return is_settled and all(
            not router.is_store_away and not switch.away and router.unconfirmed_count == 0
            for router, switch in zip(self.routers, self.switches, strict=True)
        )

    def _may_move(self, replica: ReplicaId) -> None:
        self.home = {program: home for program, home in self.home.items() if home != replica}
        self.disturbed_s = self.clock.now_s()

    def _tell(self, index: int) -> None:
        self.routers[index].replace_replicas(
            ReplicaView(replica_id=name, turns_max=64, is_draining=self.alive.get(name, False))
            for name in sorted(self.believed[index])
        )

    def _calm_down(self) -> None:
        """The store is back, the news is out, copies are no longer fresh: now all must agree."""
        if not self.alive:
            self.add_replica()
        for index in range(ROUTERS):
            self.switches[index].away = False
            self.believed[index] = set(self.alive)
        self.clock.advance(10.0)
        for index, router in enumerate(self.routers):
            self._tell(index)
            is_done = self.runner.run(router.reconcile()) or self.runner.run(router.reconcile())
            assert is_done, "not everything reached the store"
        for program in PROGRAMS:
            placements = [self.runner.run(router.place(program)) for router in self.routers]
            where = {placement.replica_id for placement in placements if placement is not None}
            assert len(where) == 1, f"{program} is in {where}"
            assert where <= set(self.alive)
            again = self.runner.run(self.routers[0].place(program))
            assert again is not None
            assert again.reason is Reason.BOUND

    async def _close(self) -> None:
        for router in self.routers:
            await router.close()


TestRouters = Routers.TestCase
TestRouters.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
