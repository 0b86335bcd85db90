"""What an engine remembers of programs, and that it forgets."""

from agent_program.ids import ProgramId, TenantId
from engine_replicas.retention.programs import Branch, Program, ProgramTable

TENANT = TenantId("default")


def arrive(table: ProgramTable, name: str, now_s: float) -> tuple[Program, tuple[Program, ...]]:
    return table.arrived(ProgramId(name), TENANT, now_s)


def test_a_program_keeps_its_arrival_however_often_it_comes() -> None:
    table = ProgramTable(programs_max=10, idle_max_s=100.0)
    arrive(table, "a", 1.0)
    assert arrive(table, "a", 50.0)[0].arrived_s == 1.0


def test_beyond_the_limit_the_least_recently_active_program_is_forgotten() -> None:
    table = ProgramTable(programs_max=2, idle_max_s=1e9)
    a, _ = arrive(table, "a", 1.0)
    arrive(table, "b", 2.0)
    table.active(a, 3.0)
    _, forgotten = arrive(table, "c", 4.0)
    assert [program.program_id for program in forgotten] == ["b"]


def test_a_program_with_live_turns_is_never_forgotten() -> None:
    table = ProgramTable(programs_max=1, idle_max_s=10.0)
    a, _ = arrive(table, "a", 1.0)
    a.live_turns = 1
    for index in range(50):
        arrive(table, f"b{index}", 1000.0 + index)
    assert table.get(ProgramId("a")) is a
    assert len(table) <= 3


def test_a_silent_program_is_forgotten() -> None:
    table = ProgramTable(programs_max=100, idle_max_s=10.0)
    arrive(table, "a", 1.0)
    _, forgotten = arrive(table, "b", 11.5)
    assert [program.program_id for program in forgotten] == ["a"]


def test_under_any_stream_of_ids_the_table_is_bounded() -> None:
    table = ProgramTable(programs_max=100, idle_max_s=1e9)
    for index in range(5000):
        arrive(table, f"p{index}", float(index))
    assert len(table) == 100


def test_a_program_that_ended_can_be_recalled_for_a_while() -> None:
    table = ProgramTable(programs_max=100, idle_max_s=1e9)
    for index in range(2000):
        table.end(arrive(table, f"p{index}", float(index))[0])
    assert len(table) == 0
    assert table.recall(ProgramId("p1999")) is not None
    assert table.recall(ProgramId("p0")) is None


def test_another_program_under_the_id_of_one_that_ended_is_not_it() -> None:
    table = ProgramTable(programs_max=100, idle_max_s=1e9)
    old, _ = arrive(table, "a", 1.0)
    table.end(old)
    new, _ = arrive(table, "a", 2.0)
    table.end(old)
    assert table.get(ProgramId("a")) is new


def test_branches_and_decisions_of_a_program_are_bounded() -> None:
    program, _ = arrive(ProgramTable(programs_max=10, idle_max_s=1.0), "a", 0.0)
    for index in range(1000):
        program.turn_ended(f"branch-{index}", Branch(finished_s=float(index), context_tokens=1))
        program.decided("turn_finished", float(index))
    assert (len(program.branches), len(program.decisions), program.turns_finished) == (64, 16, 1000)
    assert "branch-999" in program.branches
