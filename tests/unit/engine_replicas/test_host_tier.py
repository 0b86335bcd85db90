"""What of a tier's content nobody will ask for again."""

from agent_program.ids import ProgramId
from engine_replicas.host_tier import ChunkOwners

A, B = ProgramId("a"), ProgramId("b")


def test_what_one_program_alone_used_dies_with_it_the_end_of_its_context_first() -> None:
    owners = ChunkOwners()
    owners.used([b"1", b"2"], A)
    owners.used([b"1", b"2", b"3"], A)
    owners.used([b"4"], B)
    assert owners.ended(A) == [b"3", b"2", b"1"]
    assert owners.ended(B) == [b"4"]
    assert len(owners) == 0


def test_what_several_programs_used_outlives_each_of_them() -> None:
    owners = ChunkOwners()
    owners.used([b"system", b"1"], A)
    owners.used([b"system", b"2"], B)
    assert owners.ended(A) == [b"1"]
    assert owners.ended(B) == [b"2"]


def test_what_a_turn_without_a_program_used_belongs_to_none() -> None:
    owners = ChunkOwners()
    owners.used([b"1"], None)
    owners.used([b"1", b"2"], A)
    owners.used([b"2"], None)
    assert owners.ended(A) == []


def test_a_chunk_that_left_and_comes_back_starts_anew() -> None:
    owners = ChunkOwners()
    owners.used([b"1", b"2"], A)
    owners.gone([b"1", b"never there"])
    owners.used([b"1"], B)
    assert owners.ended(A) == [b"2"]
    assert owners.ended(B) == [b"1"]


def test_ending_twice_or_without_ever_having_used_anything_changes_nothing() -> None:
    owners = ChunkOwners()
    owners.used([b"1"], A)
    owners.ended(A)
    assert owners.ended(A) == []
    assert owners.ended(B) == []


def test_it_remembers_no_more_than_the_tier_holds() -> None:
    owners = ChunkOwners()
    for number in range(1000):
        chunk = number.to_bytes(4, "big")
        owners.used([chunk], ProgramId(f"p{number % 7}"))
        if number >= 10:
            owners.gone([(number - 10).to_bytes(4, "big")])
    assert len(owners) == 10
    owners.clear()
    assert len(owners) == 0
