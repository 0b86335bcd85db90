"""Trace files: what is read, what is refused, and the traps of recorded traces."""

import itertools
import json

import pytest

from agent_program.errors import InvalidRequest
from benchmarks.replay.trace import Program, Trace, Turn, load_trace, pooled_eta, program_from_dict, save_trace


def turn(new: int, output: int, prefix: int = 0, tool: str | None = "bash", tool_s: float | None = 1.0) -> dict:
    return {
        "input_tokens": prefix + new,
        "prefix_tokens": prefix,
        "new_input_tokens": new,
        "output_tokens": output,
        "tool": tool,
        "tool_s": tool_s,
    }


def row(*turns: dict, **fields: object) -> dict:
    return {"program_id": "p", "arrival_s": None, "kind": "task", "turns": list(turns), **fields}


def program(*turns: dict, **fields: object) -> Program:
    return program_from_dict(row(*turns, **fields), prefix_namespace="file")


def test_the_last_turn_has_no_tool_even_if_the_source_names_one():
    last = program(turn(100, 10), turn(20, 5, prefix=110, tool="submit", tool_s=3.0)).turns[-1]
    assert (last.tool, last.tool_s) == (None, None)


def test_a_tool_time_that_the_source_does_not_know_stays_unknown():
    assert program(turn(100, 10, tool_s=None), turn(20, 5, prefix=110)).turns[0].tool_s is None


def test_a_turn_in_the_middle_without_a_tool_still_waits():
    assert program(turn(100, 10, tool=None), turn(20, 5, prefix=110)).turns[0].tool == "unknown"


def test_nothing_of_a_program_is_cached_before_its_first_turn():
    assert program(turn(100, 10, prefix=400)).turns[0].prefix_tokens == 0


def test_a_prompt_that_is_cached_whole_still_computes_its_last_token():
    second = program(turn(100, 10), turn(0, 5, prefix=110)).turns[1]
    assert (second.input_tokens, second.new_input_tokens) == (110, 1)


def test_an_empty_answer_still_samples_a_token():
    assert program(turn(100, 0)).turns[0].output_tokens == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_tokens": 999}, "is not input_tokens"),
        ({"tool_s": -1.0}, "negative"),
        ({"prefix_tokens": "many"}, "not a program"),
    ],
)
def test_a_bad_line_is_named(tmp_path, change, message):
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(row(turn(10, 1))) + "\n" + json.dumps(row(turn(10, 1) | change)) + "\n")
    with pytest.raises(InvalidRequest, match=message) as refused:
        load_trace(path)
    assert "bad.jsonl line 2" in refused.value.message


def test_a_missing_or_empty_file_is_refused(tmp_path):
    with pytest.raises(InvalidRequest, match="cannot read"):
        load_trace(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(InvalidRequest, match="no program"):
        load_trace(tmp_path / "empty.jsonl")


def test_a_saved_trace_is_read_back_the_same(tmp_path):
    trace = Trace(
        name="t",
        programs=(
            program(turn(100, 10), turn(20, 5, prefix=110), shared_prefix="sys", shared_prefix_tokens=64),
            program(turn(50, 10), parent={"program_id": "p", "turn": 0}, arrival_s=3.5),
        ),
    )
    save_trace(trace, tmp_path / "t.jsonl")
    assert load_trace(tmp_path / "t.jsonl").programs == trace.programs
    assert load_trace(tmp_path / "t.jsonl").digest == trace.digest


def test_programs_that_do_not_fit_are_left_out_and_counted():
    trace = Trace(name="t", programs=(program(turn(100, 10)), program(turn(5_000, 10))))
    fitting = trace.within(1_000)
    assert len(fitting.programs) == 1
    assert fitting.left_out == (("longer than 1000 tokens", 1),)


def test_a_scaled_trace_keeps_its_prefixes_within_what_was_computed():
    trace = Trace(name="t", programs=(program(turn(101, 11), turn(21, 7, prefix=112), turn(33, 3, prefix=60)),))
    turns = trace.scaled(0.4).programs[0].turns
    for before, after in itertools.pairwise(turns):
        assert after.prefix_tokens <= before.input_tokens + before.output_tokens
        assert after.new_input_tokens >= 1


def lengths(*counts: int) -> list[Program]:
    one = Turn(input_tokens=1, prefix_tokens=0, output_tokens=1, tool=None, tool_s=None)
    return [Program(program_id=str(index), turns=(one,) * count) for index, count in enumerate(counts)]


def test_eta_is_1_for_programs_of_one_length_and_falls_as_lengths_spread():
    assert pooled_eta(lengths(10, 10, 10)) == pytest.approx(1.0)
    assert 0 < pooled_eta(lengths(8, 10, 12)) < 1
    assert pooled_eta(lengths(2, 2, 2, 2, 2, 60)) < pooled_eta(lengths(8, 10, 12))
