"""What the turn queue remembers of a turn is what it would see if it looked again: the same replay either way, to the byte."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import replace

import pytest

from benchmarks.replay.trace import Trace
from benchmarks.replay.workload import Arrivals
from engine_replicas.vllm_turn_queue import TurnQueue
from support.replays import agents, replay


def mixed_programs(count: int, seed: int) -> Trace:
    """Programs of different lengths, whose tools have a heavy tail."""
    rng = random.Random(seed)
    programs = []
    for program in agents(count, turns=7, tool_s=3.0).programs:
        turns = [
            replace(turn, tool=rng.choice(["bash", "pytest", "ls"]), tool_s=rng.lognormvariate(0, 1.5))
            for turn in program.turns[: rng.randrange(2, 8)]
        ]
        turns[-1] = replace(turns[-1], tool=None, tool_s=None)
        programs.append(replace(program, turns=tuple(turns)))
    return Trace(name="mixed", programs=tuple(programs))


def look_closely(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the queue forget everything before each step, and ask the admission about every turn."""
    remembered = TurnQueue._look_again

    def look_at_all(queue: TurnQueue) -> None:
        queue._changed.update(request.request_id for request in [*queue._scheduler.waiting, *queue._scheduler.running])
        remembered(queue)

    def ask_of_each(queue: TurnQueue, now_s: float) -> Collection[str]:
        asking = dict(queue._second_tokens) if queue._is_lane_open else {**queue._first_tokens, **queue._second_tokens}
        return {
            turn_id
            for turn_id, tokens in asking.items()
            if not queue._admission.admits(
                tokens, now_s - queue._arrivals.arrived_s(turn_id), queue._working_set(now_s)
            )
        }

    monkeypatch.setattr(TurnQueue, "_look_again", look_at_all)
    monkeypatch.setattr(TurnQueue, "_held_back", ask_of_each)


@pytest.mark.parametrize("preset", ["autellix", "continuum", "adaptive"])
@pytest.mark.parametrize("rate_per_s", [0.5, 3.0])
def test_the_queue_misses_no_change(preset: str, rate_per_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = mixed_programs(24, seed=3)
    remembering = replay(preset, trace, arrivals=Arrivals(rate_per_s=rate_per_s))
    look_closely(monkeypatch)
    assert replay(preset, trace, arrivals=Arrivals(rate_per_s=rate_per_s)) == remembering
