"""The process's own copy of the bindings: bounded, exact in its counts, forgetting the idle."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from agent_program.ids import ProgramId, ReplicaId
from continuum_router.program_table import ProgramTable

A, B = ReplicaId("a"), ReplicaId("b")
P, Q = ProgramId("p"), ProgramId("q")


def table(capacity: int = 100, ttl_s: float = 10.0) -> ProgramTable:
    return ProgramTable(capacity=capacity, ttl_s=ttl_s)


def test_a_program_moves_and_the_counts_with_it() -> None:
    bound = table()
    assert bound.put(P, A, confirmed_s=1.0) is None
    assert bound.put(P, B, confirmed_s=None) == A
    entry = bound.get(P)
    assert entry is not None
    assert (entry.replica_id, entry.confirmed_s) == (B, None)
    assert (bound.programs_on(A), bound.programs_on(B)) == (0, 1)


def test_dropping_twice_changes_nothing_the_second_time() -> None:
    bound = table()
    bound.put(P, A, confirmed_s=1.0)
    assert bound.drop(P) is not None
    assert bound.drop(P) is None
    assert (len(bound), bound.programs_on(A)) == (0, 0)


def test_a_program_that_is_used_survives_and_an_idle_one_goes_between_one_and_two_times_to_live() -> None:
    bound = table(ttl_s=10.0)
    bound.put(P, A, confirmed_s=0.0)
    bound.put(Q, B, confirmed_s=0.0)
    assert bound.rotate(now_s=9.0) == set()
    bound.rotate(now_s=10.0)
    assert bound.get(Q) is not None
    assert bound.rotate(now_s=20.0) == {A}
    assert bound.get(P) is None
    assert bound.get(Q) is not None


def test_when_full_the_least_recently_used_half_goes() -> None:
    bound = table(capacity=10)
    for number in range(1000):
        bound.put(ProgramId(f"p{number}"), A, confirmed_s=0.0)
        bound.rotate(now_s=0.0)
        assert len(bound) <= 10
    assert bound.get(ProgramId("p999")) is not None
    assert bound.programs_on(A) == len(bound)


def test_a_table_without_room_for_two_generations_is_refused() -> None:
    with pytest.raises(ValueError, match="two entries"):
        table(capacity=1)


class CountsStayExact(RuleBasedStateMachine):
    """Whatever happens, the counts per replica are those of the entries that can be found."""

    programs = st.sampled_from([ProgramId(f"p{number}") for number in range(12)])
    replicas = st.sampled_from([A, B, ReplicaId("c")])

    def __init__(self) -> None:
        super().__init__()
        self.table = ProgramTable(capacity=6, ttl_s=5.0)
        self.now_s = 0.0

    @rule(program=programs, replica=replicas)
    def put(self, program: ProgramId, replica: ReplicaId) -> None:
        self.table.put(program, replica, confirmed_s=self.now_s)
        self.table.rotate(now_s=self.now_s)
        entry = self.table.get(program)
        assert entry is not None
        assert entry.replica_id == replica

    @rule(program=programs)
    def get(self, program: ProgramId) -> None:
        self.table.get(program)

    @rule(program=programs)
    def drop(self, program: ProgramId) -> None:
        self.table.drop(program)
        assert self.table.get(program) is None

    @rule(seconds=st.floats(0, 12))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.table.rotate(now_s=self.now_s)

    @invariant()
    def counts_add_up(self) -> None:
        assert sum(self.table.programs_on(replica) for replica in (A, B, ReplicaId("c"))) == len(self.table)
        assert len(self.table) == len(set(self.table.programs())) <= 6


TestCountsStayExact = CountsStayExact.TestCase
TestCountsStayExact.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
