"""Which turn comes first."""

from engine_replicas.ordering import Arrivals, Fcfs, OrderedTurn, ProgramFcfs


def turn(arrival_s: float, *, preempted: bool = False, retained: bool = False, overdue: bool = False) -> OrderedTurn:
    return OrderedTurn(is_overdue=overdue, is_preempted=preempted, is_retained=retained, program_arrival_s=arrival_s)


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


def test_a_turn_that_has_waited_too_long_comes_before_all() -> None:
    turns = [turn(1.0, preempted=True), turn(2.0, retained=True), turn(9.0, overdue=True)]
    assert min(turns, key=ProgramFcfs().waiting_key).program_arrival_s == 9.0


def test_a_turn_is_overdue_when_it_has_waited_longer_than_the_limit() -> None:
    arrivals = Arrivals(wait_max_s=10.0)
    arrivals.arrived("a", 0.0)
    arrivals.arrived("b", 5.0)
    assert not arrivals.find_overdue(10.0)
    assert arrivals.find_overdue(10.1)
    assert not arrivals.find_overdue(10.2)
    assert (arrivals.is_overdue("a"), arrivals.is_overdue("b")) == (True, False)


def test_a_turn_that_runs_or_has_left_is_not_overdue() -> None:
    arrivals = Arrivals(wait_max_s=10.0)
    for name in ("early", "late", "gone"):
        arrivals.arrived(name, 0.0)
    arrivals.scheduled("early")
    assert arrivals.find_overdue(11.0)
    arrivals.scheduled("late")
    arrivals.left("gone")
    assert not any(arrivals.is_overdue(name) for name in ("early", "late", "gone"))
    assert not arrivals.find_overdue(100.0)


def test_turns_that_left_are_forgotten() -> None:
    arrivals = Arrivals(wait_max_s=10.0)
    for index in range(100):
        arrivals.arrived(f"t{index}", float(index))
        arrivals.left(f"t{index}")
    assert (len(arrivals), arrivals.arrived_s("t5")) == (0, 0.0)
