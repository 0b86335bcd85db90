"""The comparison with a real engine, on an engine that is known exactly: the replay itself, with a step log."""

from dataclasses import replace

import pytest

from agent_program.errors import PlatformError
from benchmarks.replay import against_engine
from benchmarks.replay.against_engine import EngineRun, around_turn_s, compared, fit_of, report, table, trace_of
from benchmarks.replay.experiment import Cell, Policy, run_cell
from benchmarks.replay.step_log import FittedStepTime, LoggedStep, gap_between_steps_s, read_step_log
from benchmarks.replay.trace import Program, Trace, Turn
from benchmarks.replay.vllm_config import EngineShape
from benchmarks.replay.workload import ArrivalKind, Arrivals
from benchmarks.scripted_programs import ProgramRun, TurnRun, WorkloadShape, draw_programs

#: 30 ms a step, 2 ms a sequence, 0.5 ms a token, 0.1 µs a pair: about the CPU engine.
MACHINE = FittedStepTime(coefficients=(0.03, 2e-3, 5e-4, 1e-7), mape=0.0, steps=0)
BLOCKS = 200


def scripted_trace(programs):
    traced = []
    for program in programs:
        context, turns = 0, []
        for script in program.turns:
            is_last = len(turns) + 1 == len(program.turns)
            turns.append(
                Turn(
                    input_tokens=context + script.new_words,
                    prefix_tokens=context,
                    output_tokens=script.output_tokens,
                    tool=None if is_last else script.tool,
                    tool_s=None if is_last else script.tool_s,
                )
            )
            context += script.new_words + script.output_tokens
        traced.append(Program(program_id=program.program_id, turns=tuple(turns), arrival_s=program.arrival_s))
    return Trace(name="scripted", programs=tuple(traced))


def run_on_the_machine(preset, path):
    """What `run_on_engine` would return if the engine were exactly `MACHINE`."""
    programs = draw_programs(WorkloadShape(programs=8), seed=1)
    policy = Policy.named(preset)
    cell = Cell(
        policy=replace(policy, scheduling={**(policy.scheduling or {}), "step_log_path": str(path)}),
        programs=None,
        load=None,
        arrivals=Arrivals(kind=ArrivalKind.RECORDED),
        shape=EngineShape(
            block_size=against_engine.BLOCK_TOKENS,
            max_batched_tokens=against_engine.STEP_TOKENS_MAX,
            max_running=against_engine.RUNNING_MAX,
            max_model_tokens=against_engine.CONTEXT_TOKENS_MAX,
            kv_tokens=BLOCKS * against_engine.BLOCK_TOKENS,
        ),
        jump=False,
    )
    trace = scripted_trace(programs)
    records = {record.program_id: record for record in run_cell(cell, trace, step_time=MACHINE).run.programs}
    runs = []
    for program in trace.programs:
        record = records[program.program_id]
        turns = tuple(
            TurnRun(
                sent_s=seen.ready_s,
                first_token_s=seen.first_token_s,
                ended_s=seen.end_s,
                prompt_tokens=turn.input_tokens,
                output_tokens=turn.output_tokens,
                cached_tokens=seen.reused_tokens,
            )
            for turn, seen in zip(program.turns, record.turns, strict=True)
        )
        contexts = [before.prompt_tokens + before.output_tokens for before in turns[:-1]]
        recomputed = sum(context - turn.cached_tokens for context, turn in zip(contexts, turns[1:], strict=True))
        runs.append(
            ProgramRun(
                program_id=program.program_id,
                completion_s=record.completion_s,
                first_token_s=record.first_token_wait_s,
                prompt_tokens=sum(turn.prompt_tokens for turn in turns),
                cached_tokens=sum(turn.cached_tokens for turn in turns),
                recomputed_tokens=recomputed,
                reused_tokens=sum(contexts) - recomputed,
                turns=turns,
            )
        )
    return EngineRun(
        seed=1,
        preset=preset,
        blocks=BLOCKS,
        programs=tuple(programs),
        runs=tuple(runs),
        log=tuple(read_step_log(path)),
        around_turn_s=0.0,
        load_average=0.0,
    )


@pytest.mark.parametrize("preset", ["vllm", "continuum"])
def test_an_engine_that_is_its_model_is_predicted_to_the_token(preset, tmp_path):
    run = run_on_the_machine(preset, tmp_path / "steps.jsonl")
    fit = fit_of(run)
    assert fit.coefficients == pytest.approx(MACHINE.coefficients, rel=0.01)
    told = compared(run, fit)
    assert told["real_recomputed_tokens"] > 0
    assert told["replay_recomputed_tokens"] == told["real_recomputed_tokens"]
    assert told["mean_error"] == pytest.approx(0.0, abs=0.002)
    assert told["program_error_mean"] < 0.005


def test_a_report_says_how_far_off_each_preset_is_and_whether_they_keep_their_order(tmp_path):
    runs = [run_on_the_machine(preset, tmp_path / f"{preset}.jsonl") for preset in ("vllm", "continuum")]
    told = report(runs)
    for fit in ("own", "other"):
        # The machine was the same in both runs, so that either log describes it.
        assert set(told[fit]["mean_error"]) == {"vllm", "continuum"}
        assert max(map(abs, told[fit]["mean_error"].values())) < 0.005
        assert told[fit]["is_ordering_the_same"]
    assert "presets in the same order: yes" in table(told)
    assert report(runs[:1])["other"] == {}


def test_the_time_around_a_turn_lengthens_every_wait(tmp_path):
    run = replace(run_on_the_machine("vllm", tmp_path / "steps.jsonl"), around_turn_s=0.25)
    for scripted, traced in zip(run.programs, trace_of(run).programs, strict=True):
        drawn = [turn.tool_s + 0.25 for turn in scripted.turns[:-1]]
        assert [turn.tool_s for turn in traced.turns[:-1]] == pytest.approx(drawn)


def step(at_s, duration_s=0.1):
    return LoggedStep(duration_s=duration_s, turns=1, tokens=1, pairs=1, at_s=at_s)


def turn(sent_s, ended_s):
    return TurnRun(
        sent_s=sent_s, first_token_s=sent_s, ended_s=ended_s, prompt_tokens=1, output_tokens=1, cached_tokens=0
    )


def test_what_a_client_waits_beyond_the_steps_is_the_time_around_a_turn():
    log = [step(1.02), step(1.13), step(2.02), step(2.13)]
    # From 1.02 to 1.23 the engine worked: 0.29 s of the turn's 0.5 s were not its steps. The first turn does not count.
    assert around_turn_s([turn(0.0, 9.0), turn(1.0, 1.5)], log) == pytest.approx(0.29)
    with pytest.raises(PlatformError, match="no step of the turns"):
        around_turn_s([turn(0.0, 1.0), turn(5.0, 6.0)], log)


def test_the_gap_between_steps_counts_only_steps_that_follow_each_other():
    assert gap_between_steps_s([step(1.0), step(1.11), step(1.23), step(9.0)]) == pytest.approx(0.015)
    assert gap_between_steps_s([step(1.0)]) == 0.0
