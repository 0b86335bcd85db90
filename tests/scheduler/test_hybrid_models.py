"""Models with several kinds of KV cache: what is held is what the next turn finds, no less and no more."""

from pathlib import Path

import pytest

from engine_replicas.config import SchedulingSettings
from support.engine_core import SchedulerHarness, full_attention, prompt, sliding_window

FOREVER = SchedulingSettings(retention="static_ttl", ttl_s=1000, ttl_max_s=1000)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(
    ("layers", "interval", "tokens"),
    [
        # Prompt 300, output 151: KV of 450 tokens, 28 full blocks.
        (["full"], None, 448),
        (["full", "window"], None, 448),
        # vLLM's default keeps only the end of the prompt in the sliding window's group.
        (["full", "window"], 0, 288),
        (["window"], None, 448),
    ],
)
def test_what_is_held_is_what_the_next_turn_finds(
    model: Path, layers: list[str], interval: int | None, tokens: int, is_async: bool
) -> None:
    specs = [full_attention(16) if layer == "full" else sliding_window(16, 64) for layer in layers]
    engine = SchedulerHarness(model, FOREVER, blocks=120, specs=specs, retention_interval=interval, is_async=is_async)
    context = engine.run_turn("a1", prompt(1, 300), program="a", output_tokens=151)
    (lease,) = engine.scheduler.continuum_explain("a")["leases"]
    assert lease["tokens"] == tokens
    for index in range(6):
        engine.run_turn(f"crowd{index}", prompt(50 + index, 400), output_tokens=20)
    engine.run_turn("a2", context + prompt(2, 30), program="a")
    assert engine.hits["a2"] == tokens
    engine.clock.advance(2000)
    engine.stats()
    assert engine.free_blocks == engine.total_blocks
    assert engine.scheduler.reset_prefix_cache()


def test_blocks_outside_a_window_are_not_held(model: Path) -> None:
    engine = SchedulerHarness(model, FOREVER, blocks=120, specs=[sliding_window(16, 64)])
    engine.run_turn("a1", prompt(1, 300), program="a")
    # 299 tokens: a window of 64 in blocks of 16 needs the last four full blocks.
    assert engine.stats()["retained_blocks"] == 4
