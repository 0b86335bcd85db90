"""How long a program takes with an engine to itself and every token reused. Pure.

The yardstick of slowdown, and, summed over programs, of how much load a deployment can take.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.replay.step_time import StepLoad, StepTimeModel
from benchmarks.replay.trace import Program, Turn
from benchmarks.replay.workload import ReadyProgram, ReadyTurn


def alone_s(program: ReadyProgram, step_time: StepTimeModel, chunk_tokens: int) -> float:
    """Completion time of a program that shares the engine with nobody and never loses KV; sub-agents left out."""
    return sum(_turn_alone_s(turn, step_time, chunk_tokens) + turn.tool_s for turn in program.turns)


def _turn_alone_s(turn: ReadyTurn, step_time: StepTimeModel, chunk_tokens: int) -> float:
    decode = StepLoad(decode_seqs=1, decode_kv_tokens=turn.input_tokens + turn.output_tokens / 2)
    return prefill_s(turn, step_time, chunk_tokens) + (turn.output_tokens - 1) * step_time.step_s(decode)


def prefill_s(turn: ReadyTurn | Turn, step_time: StepTimeModel, chunk_tokens: int) -> float:
    """Time to compute a turn's new tokens in chunks, with nobody else on the engine."""
    seconds, done = 0.0, turn.prefix_tokens
    while done < turn.input_tokens:
        chunk = min(chunk_tokens, turn.input_tokens - done)
        seconds += step_time.step_s(StepLoad(prefill=[(chunk, done)]))
        done += chunk
    return seconds


def saturation_rate_per_s(
    programs: Sequence[Program], step_time: StepTimeModel, *, kv_tokens: int, chunk_tokens: int, running_max: int
) -> float:
    """Programs per second at which the GPU has no idle time left, were nothing ever computed twice: load 1.

    Decodes are taken to run in batches that fill the KV cache with mean contexts, prefills to be spread over them.
    Tools, recomputation and queueing leave a real engine below this.
    """
    turns = [turn for program in programs for turn in program.turns]
    roots = max(1, sum(1 for program in programs if program.parent is None))
    output = sum(turn.output_tokens for turn in turns)
    context = sum((turn.input_tokens + turn.output_tokens / 2) * turn.output_tokens for turn in turns) / output
    batch = max(1, min(running_max, int(kv_tokens / context)))
    decode_step_s = step_time.step_s(StepLoad(decode_seqs=batch, decode_kv_tokens=batch * context))
    idle_step_s = step_time.step_s(StepLoad(decode_seqs=1))
    prefill_total_s = 0.0
    for turn in turns:
        alone = prefill_s(turn, step_time, chunk_tokens)
        # A chunk that shares its step with decodes pays the step's fixed cost once.
        chunks = -(-turn.new_input_tokens // chunk_tokens)
        prefill_total_s += max(alone - chunks * idle_step_s, alone * 0.1)
    return roots / (output * decode_step_s / batch + prefill_total_s)
