"""The fleet's order, kept up by small steps, is the one that scoring every replica afresh would give."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from agent_program.ids import ReplicaId
from continuum_router.config import LoadWeights
from continuum_router.placement import Fleet, load_turns
from continuum_router.replica_view import KvReport, ReplicaView

WEIGHTS = LoadWeights()
replicas = st.sampled_from([ReplicaId(f"r{number}") for number in range(6)])
kv_reports = st.builds(
    lambda free, retained: KvReport(total_blocks=100, free_blocks=free, retained_blocks=retained),
    st.integers(0, 50),
    st.integers(0, 50),
)
views = st.builds(
    ReplicaView,
    replica_id=replicas,
    turns_max=st.integers(1, 6),
    waiting=st.integers(0, 4),
    running=st.integers(0, 4),
    queued_tokens=st.integers(0, 20_000),
    kv=st.none() | kv_reports,
    is_draining=st.booleans(),
)


class FleetOrder(RuleBasedStateMachine):
    """A model beside the fleet: plain dictionaries, everything computed anew."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet = Fleet(weights=WEIGHTS, seed=3, quarantine_s=2.0, report_period_s=1.0)
        self.now_s = 0.0
        self.views: dict[ReplicaId, ReplicaView] = {}
        self.programs: dict[ReplicaId, int] = {}
        self.in_flight: dict[ReplicaId, int] = {}
        self.others: dict[ReplicaId, int] = {}
        self.reported_s: dict[ReplicaId, float] = {}
        self.quarantine_ends_s: dict[ReplicaId, float] = {}

    @rule(listed=st.lists(views, unique_by=lambda view: view.replica_id), seconds=st.floats(0, 1))
    def a_broadcast_arrives(self, listed: list[ReplicaView], seconds: float) -> None:
        self.now_s += seconds
        self.fleet.replace(listed, now_s=self.now_s)
        kept = {v.replica_id: v for v in listed if self.now_s >= self.quarantine_ends_s.get(v.replica_id, 0.0)}
        for name in set(self.views) - set(kept):
            self._forget(name)
        for name, view in kept.items():
            if view != self.views.get(name) or self.now_s - self.reported_s[name] >= 1.0:
                self.others[name] = max(0, view.waiting + view.running - self.in_flight.get(name, 0))
                self.reported_s[name] = self.now_s
        self.views = kept

    @rule(replica=replicas)
    def one_dies(self, replica: ReplicaId) -> None:
        self.fleet.lose(replica, now_s=self.now_s)
        self.quarantine_ends_s[replica] = self.now_s + 2.0
        self.views.pop(replica, None)
        self._forget(replica)

    @rule(replica=replicas)
    def a_turn_is_sent(self, replica: ReplicaId) -> None:
        self.fleet.turn_sent(replica)
        if replica in self.views:
            self.in_flight[replica] = self.in_flight.get(replica, 0) + 1

    @rule(replica=replicas)
    def a_turn_ends(self, replica: ReplicaId) -> None:
        self.fleet.turn_ended(replica)
        if self.in_flight.get(replica):
            self.in_flight[replica] -= 1

    @rule(replica=replicas, count=st.integers(0, 9))
    def programs_are_counted(self, replica: ReplicaId, count: int) -> None:
        self.fleet.set_programs(replica, count)
        if replica in self.views:
            self.programs[replica] = count

    @rule(seconds=st.floats(0, 3))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    @invariant()
    def the_order_is_kept_exactly(self) -> None:
        self.fleet.check_integrity()

    @invariant()
    def the_choice_is_among_the_best(self) -> None:
        chosen = self.fleet.choose("some-program")
        assert (chosen is None) == (not self.views)
        if chosen is None:
            return
        assert self._rank(chosen) == min(map(self._rank, self.views))

    def _rank(self, name: ReplicaId) -> tuple[bool, bool, int]:
        view = self.views[name]
        turns = self.others[name] + self.in_flight.get(name, 0)
        load = load_turns(view, turns=turns, programs=self.programs.get(name, 0), weights=WEIGHTS)
        return view.is_draining, not view.is_draining and turns >= view.turns_max, round(64 * load)

    def _forget(self, name: ReplicaId) -> None:
        self.programs.pop(name, None)
        self.in_flight.pop(name, None)


TestFleetOrder = FleetOrder.TestCase
TestFleetOrder.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
