"""Without program ids, and with the policies of the `vllm` preset, the scheduler is vLLM's own, step by step."""

import random
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest

from engine_replicas.config import SchedulingPreset
from support.engine_core import SchedulerHarness, prompt

Build = Callable[..., SchedulerHarness]
POOL = {"blocks": 30, "max_num_seqs": 6, "step_tokens_max": 128}


def trace(engine: SchedulerHarness, seed: int, *, program_of: Callable[[int], str | None]) -> list[Any]:
    """What the engine schedules, step by step, under random arrivals and aborts; the pool is too small for all."""
    rng = random.Random(seed)
    steps: list[Any] = []
    submitted = 0
    while submitted < 25 or engine.scheduler.has_requests():
        if submitted < 25 and rng.random() < 0.3:
            engine.submit(
                f"r{submitted}",
                prompt(rng.randrange(4), rng.randint(1, 200)),
                program=program_of(submitted),
                output_tokens=rng.randint(1, 60),
            )
            submitted += 1
        if rng.random() < 0.02 and engine.scheduler.requests:
            engine.abort(rng.choice(sorted(engine.scheduler.requests)))
        engine.step()
        steps.append(
            (
                [request.request_id for request in engine.scheduler.running],
                [request.request_id for request in engine.scheduler.waiting],
                sorted((name, request.num_computed_tokens) for name, request in engine.scheduler.requests.items()),
                engine.free_blocks,
                engine.clock.now_s(),
            )
        )
    stats = engine.scheduler.make_stats()
    assert stats is not None
    steps.append(asdict(stats.prefix_cache_stats))
    return steps


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("preset", [preset.value for preset in SchedulingPreset])
def test_without_program_ids_every_step_is_stock(engine: Build, preset: str, seed: int) -> None:
    ours = trace(engine(preset=preset, pool=POOL), seed, program_of=lambda _: None)
    assert ours == trace(engine(is_stock=True, pool=POOL), seed, program_of=lambda _: None)


@pytest.mark.parametrize("seed", range(8))
def test_with_program_ids_the_vllm_preset_is_stock(engine: Build, seed: int) -> None:
    def program_of(index: int) -> str:
        return f"p{index % 7}"

    ours = trace(engine(preset="vllm", pool=POOL), seed, program_of=program_of)
    assert ours == trace(engine(is_stock=True, pool=POOL), seed, program_of=program_of)
