"""Small replays: a pool that a handful of programs overfills, so that policies differ within seconds."""

from typing import Any

from benchmarks.replay.experiment import Cell, CellResult, Policy, run_cell
from benchmarks.replay.trace import Program, Trace, Turn
from benchmarks.replay.vllm_config import EngineShape
from benchmarks.replay.workload import Arrivals

SMALL = EngineShape(kv_tokens=24_000, max_batched_tokens=1024, max_model_tokens=16_384)


def agents(
    count: int, *, turns: int = 6, first: int = 2_000, new: int = 300, output: int = 80, tool_s: float = 1.0
) -> Trace:
    """Agents of one shape."""
    programs = []
    for index in range(count):
        prefix, steps = 0, []
        for turn in range(turns):
            added = first if turn == 0 else new
            is_last = turn + 1 == turns
            steps.append(
                Turn(
                    input_tokens=prefix + added,
                    prefix_tokens=prefix,
                    output_tokens=output + 7 * (index % 5),
                    tool=None if is_last else "bash",
                    tool_s=None if is_last else tool_s,
                )
            )
            prefix += added + steps[-1].output_tokens
        programs.append(Program(program_id=f"agent-{index}", turns=tuple(steps)))
    return Trace(name="agents", programs=tuple(programs))


def replay(policy: str, trace: Trace, *, rate_per_s: float = 2.0, seed: int = 1, **cell: Any) -> CellResult:
    """Run a trace under a policy on a small engine."""
    cell = {"shape": SMALL, "arrivals": Arrivals(rate_per_s=rate_per_s), **cell}
    return run_cell(Cell(policy=Policy.named(policy), seed=seed, load=None, programs=None, **cell), trace)
