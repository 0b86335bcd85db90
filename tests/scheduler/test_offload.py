"""Leases over a tier below: vLLM's own offloading connector with a worker that only waits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine_replicas.config import SchedulingSettings
from support.engine_core import SchedulerHarness, prompt
from support.offloading import OffloadingHarness

Build = Callable[..., OffloadingHarness]
OPEN = {
    "retained_fraction_max": 1.0,
    "program_retained_fraction_max": 1.0,
    "tenant_retained_fraction_max": 1.0,
}
ADAPTIVE = {"preset": "adaptive", **OPEN}
FOREVER = {"retention": "static_ttl", "ttl_s": 1000, "ttl_max_s": 1000, **OPEN}


@pytest.fixture(params=["sync", "async"])
def tiered(model: Path, request: pytest.FixtureRequest) -> Build:
    """Builds engines with a host tier: `tiered(preset="adaptive", pool={"blocks": 40, "host_chunks": 200})`."""

    def build(*, pool: dict[str, Any], **settings: Any) -> OffloadingHarness:
        return OffloadingHarness(model, SchedulingSettings(**settings), is_async=request.param == "async", **pool)

    return build


def crowd(engine: SchedulerHarness, *, seed: int = 50, turns: int = 4) -> None:
    """Other turns that together push everything unheld off the GPU."""
    for index in range(turns):
        engine.run_turn(f"crowd{seed + index}", prompt(seed + index, 400))


def back_again(engine: OffloadingHarness, name: str, context: list[int], turn: int) -> list[int]:
    """The program's next turn, after a crowd."""
    crowd(engine, seed=100 + 10 * turn)
    return engine.run_turn(f"{name}-{turn}", context + prompt(200 + turn, 16), program=name)


def test_what_the_gpu_lost_is_loaded_and_the_load_is_measured(tiered: Build) -> None:
    engine = tiered(preset="vllm", pool={"blocks": 40, "host_chunks": 400, "load_s": 0.5})
    context = engine.run_turn("a-1", prompt(1, 320), program="a")
    context = back_again(engine, "a", context, 2)
    assert "a-2" in engine.loads
    stats = engine.stats()
    assert (stats["reload_loads"], stats["recomputed_tokens"]) == (1, 0)


def test_a_turn_that_finds_all_on_the_gpu_loads_nothing(tiered: Build) -> None:
    engine = tiered(**FOREVER, pool={"blocks": 80, "host_chunks": 400})
    context = engine.run_turn("a-1", prompt(1, 320), program="a")
    context = back_again(engine, "a", context, 2)
    assert engine.loads == {}
    assert engine.stats()["leases"]["reused"] == 1


def test_a_lease_ends_when_the_load_for_its_turn_starts_and_not_when_it_is_done(tiered: Build) -> None:
    engine = tiered(**FOREVER, pool={"blocks": 60, "host_chunks": 400})
    context = engine.run_turn("a-1", prompt(1, 320), program="a")
    # A longer branch of the same context was computed by a request of no program: the tier has what the lease has not.
    longer = engine.run_turn("plain", context + prompt(7, 160))
    crowd(engine)
    engine.load_s = 5.0
    engine.submit("a-2", longer + prompt(8, 16), program="a")
    engine.run(lambda: "a-2" in engine.loads)
    assert "a-2" not in engine.first_scheduled
    assert engine.stats()["live_leases"] == 0
    assert engine.stats()["lease_ends"] == {"next_turn_scheduled": 1}
    engine.run()
    assert len(engine.outputs["a-2"]) == 1


def test_where_loading_is_cheap_adaptive_holds_nothing(tiered: Build) -> None:
    engine = tiered(**ADAPTIVE, pool={"blocks": 60, "host_chunks": 2000, "load_s": 0.001, "step_tokens_max": 64})
    # What a prefill costs, and what a load does: programs whose context the GPU has lost come back.
    contexts = {
        f"p{index}": engine.run_turn(f"p{index}-1", prompt(index, 320), program=f"p{index}") for index in range(6)
    }
    for turn in range(2, 6):
        for name in contexts:
            engine.scheduler.continuum_release(name)
        crowd(engine, seed=100 + 10 * turn)
        contexts = {
            name: engine.run_turn(f"{name}-{turn}", context + prompt(200 + turn, 16), program=name)
            for name, context in contexts.items()
        }
    for name, context in contexts.items():
        back_again(engine, name, context, 9)
    stats = engine.stats()
    assert stats["reload_loads"] >= 4
    assert stats["reload_s_per_1k"] < 0.25 * stats["prefill_reload_s_per_1k"]
    assert engine.scheduler.continuum_explain("p5")["leases"] == []
    assert engine.scheduler.continuum_explain("p5")["decisions"][-1]["decision"] == "reload_is_cheap"


def test_where_loading_is_as_dear_as_computing_adaptive_goes_on_holding(tiered: Build) -> None:
    engine = tiered(**ADAPTIVE, pool={"blocks": 60, "host_chunks": 2000, "load_s": 2.0})
    context = engine.run_turn("a-1", prompt(1, 320), program="a")
    for turn in range(2, 8):
        engine.scheduler.reset_prefix_cache()
        context = back_again(engine, "a", context, turn)
    assert engine.stats()["reload_loads"] >= 4
    assert len(engine.scheduler.continuum_explain("a")["leases"]) == 1


@pytest.mark.parametrize(
    "settings", [ADAPTIVE, FOREVER, {"preset": "continuum"}], ids=["adaptive", "forever", "continuum"]
)
def test_leases_and_loads_together_keep_the_engine_going(tiered: Build, settings: dict[str, Any]) -> None:
    engine = tiered(**settings, pool={"blocks": 44, "host_chunks": 120, "step_tokens_max": 128, "load_s": 0.3})
    contexts = {f"p{index}": prompt(index, 200) for index in range(6)}
    for turn in range(1, 5):
        for name, context in contexts.items():
            engine.submit(f"{name}-{turn}", context, program=name, output_tokens=30)
        engine.run(steps_max=3000)
        contexts = {
            name: [*context, *engine.outputs[f"{name}-{turn}"], *prompt(300 + turn, 20)]
            for name, context in contexts.items()
        }
    assert {len(answer) for answer in engine.outputs.values()} == {30}
    assert engine.loads
    engine.scheduler.reset_prefix_cache()
    engine.run()
    assert engine.free_blocks == engine.total_blocks


def test_a_cancelled_load_leaves_no_block_and_no_lease_behind(tiered: Build) -> None:
    engine = tiered(**FOREVER, pool={"blocks": 40, "host_chunks": 400, "load_s": 50.0})
    context = engine.run_turn("a-1", prompt(1, 320), program="a")
    engine.scheduler.reset_prefix_cache()
    crowd(engine)
    engine.submit("a-2", context + prompt(2, 16), program="a")
    engine.run(lambda: "a-2" in engine.loads)
    engine.abort("a-2")
    engine.run(steps_max=50)
    assert engine.free_blocks == engine.total_blocks
    assert engine.stats()["live_turns"] == 0


def host_chunks_kept(model: Path, policy: str) -> int:
    """Tokens that a paused program need not compute, after an ended one and others went through a tight host tier."""
    engine = OffloadingHarness(
        model, SchedulingSettings(preset="vllm"), blocks=40, host_chunks=60, host_policy=policy, load_s=0.01
    )
    paused = engine.run_turn("paused-1", prompt(1, 320), program="paused")  # 20 chunks
    engine.run_turn("ended-1", prompt(2, 480), program="ended", is_last_turn=True)  # 30 chunks
    for index in range(3):
        engine.run_turn(f"x{index}", prompt(60 + index, 240), program=f"x{index}", is_last_turn=True)  # 15 chunks each
    engine.run_turn("paused-2", paused + prompt(3, 16), program="paused")
    return 320 - int(engine.stats()["recomputed_tokens"])


def test_a_tight_host_tier_keeps_the_paused_program_because_it_is_told_who_ended(model: Path) -> None:
    assert host_chunks_kept(model, "lru") < 100
    assert host_chunks_kept(model, "EndedProgramsFirst") == 320
