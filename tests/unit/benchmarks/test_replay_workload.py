"""Workloads: arrivals and tool times drawn from a seed."""

import itertools
import statistics

import pytest

from agent_program.errors import InvalidRequest
from benchmarks.replay.generators import GENERATORS, generate
from benchmarks.replay.trace import USER_WAIT, Parent, Program, Trace, Turn, load_trace, pooled_eta
from benchmarks.replay.workload import (
    ArrivalKind,
    Arrivals,
    DeclaredTurns,
    ReadyProgram,
    ToolTimes,
    build_workload,
)
from support.traces import trace_path


def two_turns(program_id: str, tool: str = "bash", tool_s: float | None = None, **fields: object) -> Program:
    first = Turn(input_tokens=100, prefix_tokens=0, output_tokens=10, tool=tool, tool_s=tool_s)
    last = Turn(input_tokens=120, prefix_tokens=110, output_tokens=10, tool=None, tool_s=None)
    return Program(program_id=program_id, turns=(first, last), **fields)  # type: ignore[arg-type]


TRACE = Trace(name="t", programs=tuple(two_turns(str(index)) for index in range(50)))


def test_one_seed_gives_one_workload():
    arrivals = Arrivals(rate_per_s=0.5)
    assert build_workload(TRACE, arrivals=arrivals, seed=3) == build_workload(TRACE, arrivals=arrivals, seed=3)
    assert build_workload(TRACE, arrivals=arrivals, seed=3) != build_workload(TRACE, arrivals=arrivals, seed=4)


@pytest.mark.parametrize("kind", [ArrivalKind.POISSON, ArrivalKind.BURSTY])
def test_open_arrivals_keep_their_rate(kind):
    work = build_workload(TRACE, arrivals=Arrivals(kind=kind, rate_per_s=2.0), seed=1, programs=4000)
    times = [program.arrival_s for program in work.programs]
    assert times == sorted(times)
    assert times[-1] == pytest.approx(4000 / 2.0, rel=0.15)


def test_bursty_arrivals_have_the_asked_variation():
    work = build_workload(TRACE, arrivals=Arrivals(kind=ArrivalKind.BURSTY, rate_per_s=1.0), seed=1, programs=4000)
    times = [program.arrival_s for program in work.programs]
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(4.0, rel=0.2)


def test_recorded_arrivals_start_at_zero_and_speed_up():
    trace = Trace(name="t", programs=(two_turns("b", arrival_s=30.0), two_turns("a", arrival_s=10.0)))
    work = build_workload(trace, arrivals=Arrivals(kind=ArrivalKind.RECORDED, speed_up=4.0), seed=1)
    assert [(program.program_id, program.arrival_s) for program in work.programs] == [("a", 0.0), ("b", 5.0)]


def test_a_trace_without_times_cannot_be_replayed_at_its_own():
    with pytest.raises(InvalidRequest, match="no arrival times"):
        build_workload(TRACE, arrivals=Arrivals(kind=ArrivalKind.RECORDED), seed=1)


@pytest.mark.parametrize(
    "arguments",
    [
        {"rate_per_s": 0},
        {"kind": ArrivalKind.CLOSED},
        {"rate_per_s": 1, "burstiness": 0},
        {"rate_per_s": 1, "speed_up": 0},
    ],
)
def test_arrivals_that_make_no_sense_are_refused(arguments):
    with pytest.raises(InvalidRequest):
        Arrivals(**arguments)


def test_a_short_trace_is_repeated_under_new_ids():
    work = build_workload(TRACE, arrivals=Arrivals(rate_per_s=1.0), seed=1, programs=120)
    assert len({program.program_id for program in work.programs}) == 120


def test_sub_agents_come_with_their_parent_and_follow_its_name():
    parent = two_turns("lead")
    child = two_turns("sub", parent=Parent(program_id="lead", turn=0))
    work = build_workload(
        Trace(name="t", programs=(parent, child)), arrivals=Arrivals(rate_per_s=1.0), seed=1, programs=2
    )
    assert [program.program_id for program in work.programs] == ["lead", "sub", "lead~1", "sub~1"]
    assert work.programs[3].program.parent == Parent(program_id="lead~1", turn=0)
    assert [program.arrival_s is None for program in work.programs] == [False, True, False, True]


def test_resampled_times_come_from_the_tools_own_measurements():
    trace = Trace(
        name="t", programs=tuple(two_turns(str(i), tool=tool, tool_s=99.0) for i, tool in enumerate(("ls", "git", "x")))
    )
    work = build_workload(
        trace,
        arrivals=Arrivals(rate_per_s=1.0),
        seed=1,
        programs=300,
        tool_times=ToolTimes.RESAMPLED,
        durations={"ls": [0.1, 0.2], "Bash:git": [5.0]},
    )
    drawn: dict[str, set[float]] = {}
    for program in work.programs:
        drawn.setdefault(program.turns[0].tool, set()).add(program.turns[0].tool_s)
    # An unknown tool draws from all measurements.
    assert drawn == {"ls": {0.1, 0.2}, "git": {5.0}, "x": {0.1, 0.2, 5.0}}


def test_parallel_calls_take_as_long_as_the_longest():
    work = build_workload(
        Trace(name="t", programs=(two_turns("p", tool="ls+git"),)),
        arrivals=Arrivals(rate_per_s=1.0),
        seed=1,
        tool_times=ToolTimes.RESAMPLED,
        durations={"ls": [0.1], "git": [5.0]},
    )
    assert work.programs[0].turns[0].tool_s == 5.0


def test_a_wait_for_a_person_is_never_resampled_from_tools():
    work = build_workload(
        Trace(name="t", programs=(two_turns("p", tool=USER_WAIT, tool_s=42.0),)),
        arrivals=Arrivals(rate_per_s=1.0),
        seed=1,
        tool_times=ToolTimes.RESAMPLED,
        durations={"ls": [0.1]},
    )
    assert work.programs[0].turns[0].tool_s == 42.0


def test_resampling_from_nothing_is_refused():
    with pytest.raises(InvalidRequest, match="measured durations"):
        build_workload(TRACE, arrivals=Arrivals(rate_per_s=1.0), seed=1, tool_times=ToolTimes.RESAMPLED)


# --- declared turns ----------------------------------------------------------------------------------------------------


def declared(kind):
    trace = generate("memoryless", programs=400, seed=1)
    work = build_workload(trace, arrivals=Arrivals(rate_per_s=1.0), seed=1, declared=kind)
    return [(program.declared_turns, len(program.turns)) for program in work.programs]


@pytest.mark.parametrize(
    ("kind", "least", "most", "middle"),
    [
        (DeclaredTurns.EXACT, 1.0, 1.0, 1.0),
        (DeclaredTurns.WITHIN_30_PERCENT, 0.7, 1.3, 1.0),
        (DeclaredTurns.WITHIN_FACTOR_2, 0.5, 2.0, 1.0),
        (DeclaredTurns.UPPER_BOUND, 1.0, 4.0, 2.0),
    ],
)
def test_declared_turns_are_wrong_by_no_more_than_their_kind(kind, least, most, middle):
    pairs = [(said, turns) for said, turns in declared(kind) if turns >= 10]
    ratios = [said / turns for said, turns in pairs]
    # A declaration is a whole number: at most one turn beside the ratio drawn.
    assert all(least * turns - 1 < said < most * turns + 1 for said, turns in pairs)
    assert statistics.median(ratios) == pytest.approx(middle, rel=0.15)


def test_nothing_is_declared_unless_asked_for():
    assert {said for said, _ in declared(DeclaredTurns.NONE)} == {None}


def test_what_is_left_counts_down_and_never_below_none():
    program = ReadyProgram(index=0, program=TRACE.programs[0], turns=(), arrival_s=0.0, declared_turns=3)
    assert [program.declared_after(turn) for turn in range(5)] == [2, 1, 0, 0, 0]


def test_declaring_changes_nothing_else_of_a_workload():
    plain, told = (
        build_workload(TRACE, arrivals=Arrivals(rate_per_s=1.0), seed=1, declared=kind)
        for kind in (DeclaredTurns.NONE, DeclaredTurns.UPPER_BOUND)
    )
    assert [(p.arrival_s, p.turns) for p in plain.programs] == [(p.arrival_s, p.turns) for p in told.programs]


# --- generators --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GENERATORS)
def test_a_generator_is_a_function_of_its_seed(name):
    assert generate(name, programs=20, seed=1) == generate(name, programs=20, seed=1)
    assert generate(name, programs=20, seed=1).digest != generate(name, programs=20, seed=2).digest


@pytest.mark.parametrize("name", GENERATORS)
def test_generated_turns_add_up(name):
    for program in generate(name, programs=30, seed=5).programs:
        for before, after in zip(program.turns, program.turns[1:], strict=False):
            assert after.prefix_tokens == before.input_tokens + before.output_tokens
            assert before.tool is not None
            assert before.tool_s is not None
        assert program.turns[-1].tool is None
        assert min(turn.new_input_tokens for turn in program.turns) >= 1


@pytest.mark.parametrize(
    ("name", "turns", "tool_s", "tokens", "scale"),
    [
        ("swebench", (10.9, 2.1), (0.925, 3.550), (70_126, 19_732), 1.0),
        # The paper ran it with every length multiplied by 0.4.
        ("bfcl", (6.3, 2.3), (1.923, 2.133), (93_256, 68_687), 0.4),
    ],
)
def test_the_papers_workloads_have_the_papers_statistics(name, turns, tool_s, tokens, scale):
    programs = generate(name, programs=4000, seed=1).programs

    def is_close(values, published, spread):
        mean, deviation = published
        assert statistics.mean(values) == pytest.approx(mean, rel=0.05)
        assert statistics.pstdev(values) == pytest.approx(deviation, rel=spread)

    is_close([len(program.turns) for program in programs], turns, 0.1)
    # A sample's deviation of so heavy a tail is itself uncertain.
    is_close([turn.tool_s for program in programs for turn in program.turns[:-1]], tool_s, 0.25)
    is_close([program.peak_tokens / scale for program in programs], tokens, 0.15)


def test_what_is_left_of_a_swebench_program_falls_as_in_the_paper_though_further():
    # Its Fig. 3, read off: a median of about 72k tokens to come at the first turn, about 12k from the thirteenth on.
    programs = generate("swebench", programs=4000, seed=1).programs

    def to_come(program, turn):
        return sum(one.new_input_tokens + one.output_tokens for one in program.turns[turn:])

    assert statistics.median(to_come(program, 0) for program in programs) == pytest.approx(72_000, rel=0.1)
    late = [to_come(program, turn) for program in programs for turn in range(12, len(program.turns))]
    # Ours spread their context evenly over the turns: less is left at the end than the paper's programs have.
    assert 4_000 < statistics.median(late) < 12_000


def test_heavy_tailed_tools_are_those_of_the_field():
    times = sorted(
        turn.tool_s for program in generate("heavy_tail", programs=3000, seed=1).programs for turn in program.turns[:-1]
    )

    def share_below(seconds):
        return sum(time < seconds for time in times) / len(times)

    # TraceLab: 60.9 %, 88.2 % and 96.0 %; a median of 0.285 s.
    assert [share_below(seconds) for seconds in (1, 10, 60)] == pytest.approx([0.609, 0.882, 0.96], abs=0.04)
    assert statistics.median(times) == pytest.approx(0.285, rel=0.2)
    assert sum(time for time in times if time > 60) / sum(times) > 0.7


def test_interactive_programs_are_those_of_the_field():
    programs = generate("interactive", programs=4000, seed=1).programs
    lengths = sorted(len(program.turns) for program in programs)
    waits = sorted(turn.tool_s for program in programs for turn in program.turns[:-1])
    # Weka's tasks: P50 4 and P90 32 turns; waits of 9 and 77 s; 12 % over a minute; a first prompt of 125k x 0.4.
    assert lengths[2000] == pytest.approx(4, abs=1)
    assert lengths[3600] == pytest.approx(32, rel=0.15)
    assert waits[len(waits) // 2] == pytest.approx(9.0, rel=0.1)
    assert waits[int(0.9 * len(waits))] == pytest.approx(77.0, rel=0.1)
    assert sum(wait > 60 for wait in waits) / len(waits) == pytest.approx(0.12, abs=0.02)
    assert statistics.mean(program.turns[0].input_tokens for program in programs) == pytest.approx(50_000, rel=0.1)
    assert pooled_eta(programs) < 0.05


def test_the_replications_workload_has_its_medians():
    programs = generate("swesmith", programs=500, seed=1).programs
    turns = [turn for program in programs for turn in program.turns]
    assert len(turns) / len(programs) == pytest.approx(17.9, rel=0.05)
    assert statistics.median(turn.input_tokens for turn in turns) == pytest.approx(6_945, rel=0.1)
    assert statistics.median(turn.output_tokens for turn in turns) == pytest.approx(30, rel=0.1)


def test_lengths_are_memoryless_where_they_should_be():
    assert abs(pooled_eta(generate("memoryless", programs=3000, seed=1).programs)) < 0.1
    assert pooled_eta(generate("swebench", programs=500, seed=1).programs) > 0.6


def test_drift_makes_later_tools_ten_times_as_slow():
    programs = generate("drift", programs=1000, seed=1).programs
    early, late = (
        statistics.median(turn.tool_s for program in half for turn in program.turns[:-1])
        for half in (programs[:500], programs[500:])
    )
    assert late / early == pytest.approx(10, rel=0.3)


def test_sub_agents_point_at_a_turn_that_is_not_the_last():
    programs = {program.program_id: program for program in generate("subagents", programs=60, seed=1).programs}
    children = [program for program in programs.values() if program.parent is not None]
    assert children
    for child in children:
        assert child.parent.turn < len(programs[child.parent.program_id].turns) - 1


def test_an_unknown_generator_is_refused():
    with pytest.raises(InvalidRequest, match="known: bfcl"):
        generate("nothing", programs=1, seed=1)


# --- recorded traces ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "programs", "turns", "eta"),
    [
        ("swebench_minisweagent_gemini3pro.jsonl", 500, 20_163, 0.21),
        ("agentcgroup_haiku45.jsonl", 45, 786, 0.41),
        ("weka_claude_code_tasks.jsonl", 3_491, 40_559, -0.08),
        ("bfcl_multi_turn_base.jsonl", 200, 1_876, 0.64),
        ("taubench_gpt4o_airline.jsonl", 200, 2_454, 0.31),
        ("swesmith_with_timings.jsonl", 5, 125, 0.86),
        ("tracelab_examples.jsonl", 2, 19, None),
    ],
)
def test_recorded_traces_load_whole(name, programs, turns, eta):
    trace = load_trace(trace_path(name))
    assert len(trace.programs) == programs
    assert sum(len(program.turns) for program in trace.programs) == turns
    if eta is not None:
        assert pooled_eta(trace.programs) == pytest.approx(eta, abs=0.01)
