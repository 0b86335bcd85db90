import pytest

from benchmarks.scripted_programs import WorkloadShape, draw_programs, working_set_tokens
from benchmarks.summary import percentile, spread


def test_one_seed_is_one_workload() -> None:
    shape = WorkloadShape()
    assert draw_programs(shape, seed=3) == draw_programs(shape, seed=3)
    assert draw_programs(shape, seed=3) != draw_programs(shape, seed=4)


def test_sizes_and_times_stay_within_the_shape() -> None:
    shape = WorkloadShape(programs=40)
    programs = draw_programs(shape, seed=1)
    assert len({program.program_id for program in programs}) == 40
    assert [program.arrival_s for program in programs] == sorted(program.arrival_s for program in programs)
    for program in programs:
        assert shape.turns[0] <= len(program.turns) <= shape.turns[1]
        assert program.turns[-1].tool_s == 0.0
        assert all(0 < turn.tool_s <= shape.tool_s_max for turn in program.turns[:-1])
        assert shape.first_words[0] <= program.turns[0].new_words <= shape.first_words[1]


def test_the_working_set_is_the_sum_of_the_final_contexts() -> None:
    programs = draw_programs(WorkloadShape(programs=3), seed=1)
    by_hand = sum(turn.new_words + turn.output_tokens for program in programs for turn in program.turns)
    assert working_set_tokens(programs) == by_hand


def test_percentile_interpolates_between_neighbours() -> None:
    # positions 0..3 hold 1, 2, 3, 10; the median sits at 1.5 → 2.5; P95 at 2.85 → 3 + 0.85·7 = 8.95
    assert percentile([10, 1, 3, 2], 0.5) == pytest.approx(2.5)
    assert percentile([10, 1, 3, 2], 0.95) == pytest.approx(8.95)
    assert spread([10, 1, 3, 2])["mean"] == pytest.approx(4.0)


@pytest.mark.parametrize(("values", "share"), [([], 0.5), ([1.0], -0.1), ([1.0], 1.1)])
def test_percentile_refuses_what_has_no_answer(values: list[float], share: float) -> None:
    with pytest.raises(ValueError, match="percentile needs"):
        percentile(values, share)
