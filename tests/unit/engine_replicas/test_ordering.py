"""Which turn comes first."""

from engine_replicas.ordering import Fcfs, OrderedTurn, ProgramFcfs


def turn(arrival_s: float, *, preempted: bool = False, retained: bool = False) -> OrderedTurn:
    return OrderedTurn(is_preempted=preempted, is_retained=retained, program_arrival_s=arrival_s)


def test_fcfs_leaves_the_engines_order_alone() -> None:
    assert not Fcfs().reorders


def test_preempted_turns_come_before_retained_ones_and_those_before_the_earlier_program() -> None:
    early, retained, preempted = turn(1.0), turn(2.0, retained=True), turn(3.0, preempted=True)
    assert sorted([early, retained, preempted], key=ProgramFcfs().waiting_key) == [preempted, retained, early]


def test_among_equals_the_program_that_arrived_first_runs_first() -> None:
    turns = [turn(3.0), turn(1.0), turn(2.0)]
    assert [t.program_arrival_s for t in sorted(turns, key=ProgramFcfs().waiting_key)] == [1.0, 2.0, 3.0]


def test_the_program_that_arrived_last_is_preempted_first() -> None:
    turns = [turn(3.0, retained=True), turn(1.0, preempted=True), turn(2.0)]
    assert max(turns, key=ProgramFcfs().running_key).program_arrival_s == 3.0
