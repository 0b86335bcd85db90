"""Leases on vLLM's own KV cache: what a program finds when it comes back."""

from collections.abc import Callable

import pytest

from agent_program.ids import ToolKey
from support.engine_core import SchedulerHarness, prompt
from tool_runtime.latency import LatencySnapshot, ToolLatency

Build = Callable[..., SchedulerHarness]
POOL = {"blocks": 40}
PYTEST = ToolKey("pytest")


def crowd(engine: SchedulerHarness, *, turns: int = 8) -> None:
    """Other programs' turns, one after the other, that together take the whole pool."""
    for index in range(turns):
        engine.run_turn(f"crowd-{index}-{engine.clock.now_s()}", prompt(100 + index, 300), output_tokens=3)


def test_a_leased_context_survives_a_crowd_that_evicts_everything_else(engine: Build) -> None:
    leased = engine(retention="static_ttl", ttl_s=1000, ttl_max_s=1000, pool=POOL)
    context = leased.run_turn("a1", prompt(1, 200), program="a", output_tokens=20)
    crowd(leased)
    leased.run_turn("a2", context + prompt(2, 30), program="a")
    # 219 tokens have KV (the last one was sampled, never computed): 13 blocks of 16.
    assert leased.hits["a2"] == 208
    assert leased.leases()["reused"] == 1


def test_stock_retention_loses_it(engine: Build) -> None:
    stock = engine(preset="vllm", pool=POOL)
    context = stock.run_turn("a1", prompt(1, 200), program="a", output_tokens=20)
    crowd(stock)
    stock.run_turn("a2", context + prompt(2, 30), program="a")
    assert stock.hits["a2"] == 0
    assert (stock.stats()["reused_tokens"], stock.stats()["recomputed_tokens"]) == (0, 219)


def test_the_same_tokens_come_out(engine: Build) -> None:
    answers = []
    for settings in ({"preset": "vllm"}, {"retention": "static_ttl", "ttl_s": 100}, {"preset": "continuum"}):
        one = engine(pool=POOL, **settings)
        context = one.run_turn("a1", prompt(1, 200), program="a", output_tokens=20)
        crowd(one)
        answers.append(one.run_turn("a2", context + prompt(2, 30), program="a", output_tokens=20))
    assert answers[0] == answers[1] == answers[2]


def test_an_expired_lease_gives_every_block_back(engine: Build) -> None:
    leased = engine(retention="static_ttl", ttl_s=5, pool=POOL)
    leased.run_turn("a1", prompt(1, 200), program="a")
    assert leased.free_blocks == leased.total_blocks - 12
    leased.clock.advance(5.1)
    assert leased.leases()["expired"] == 1
    assert leased.free_blocks == leased.total_blocks


def test_an_expired_lease_leaves_its_blocks_findable_until_somebody_needs_them(engine: Build) -> None:
    leased = engine(retention="static_ttl", ttl_s=5, pool=POOL)
    context = leased.run_turn("a1", prompt(1, 200), program="a")
    leased.clock.advance(5.1)
    leased.stats()
    leased.run_turn("a2", context + prompt(2, 30), program="a")
    assert leased.hits["a2"] == 192


def test_a_released_program_gives_every_block_back(engine: Build) -> None:
    leased = engine(retention="static_ttl", ttl_s=100, pool=POOL)
    leased.run_turn("a1", prompt(1, 200), program="a")
    assert leased.scheduler.continuum_release("a") == {"leases": 1, "blocks": 12}
    assert leased.free_blocks == leased.total_blocks


def test_a_shared_system_prompt_is_held_once(engine: Build) -> None:
    leased = engine(retention="static_ttl", ttl_s=100, pool=POOL)
    system = prompt(1, 160)
    for index in range(4):
        leased.run_turn(f"p{index}", system + prompt(10 + index, 40), program=f"p{index}")
    # 10 shared blocks and 2 of each of the four.
    assert leased.stats()["retained_blocks"] == 10 + 4 * 2
    assert leased.free_blocks == leased.total_blocks - 18
    leased.clock.advance(101)
    leased.stats()
    assert leased.free_blocks == leased.total_blocks


def test_a_context_shorter_than_a_block_is_not_retained(engine: Build) -> None:
    leased = engine(retention="static_ttl", ttl_s=100, pool=POOL)
    leased.run_turn("a1", prompt(1, 9), program="a")
    assert leased.stats()["not_retained"] == {"nothing_to_retain": 1}


def test_a_turn_that_reached_the_models_limit_is_not_retained(engine: Build) -> None:
    leased = engine(retention="static_ttl", ttl_s=100, pool={**POOL, "max_model_len": 210})
    leased.run_turn("a1", prompt(1, 200), program="a", output_tokens=10)
    assert leased.stats()["live_leases"] == 0


def test_continuum_arms_from_the_shared_history(engine: Build) -> None:
    leased = engine(preset="continuum", k_cold_start=5, pool=POOL)
    for index in range(4):  # evicted turns that waited teach T: a crowd in front of each
        context = leased.run_turn(f"t{index}a", prompt(20 + index, 200), program=f"t{index}")
        leased.scheduler.continuum_lease_arm(f"t{index}", "0", "pytest", False)
        leased.submit(f"other{index}", prompt(60 + index, 500), output_tokens=100)
        leased.step()
        leased.run_turn(f"t{index}b", context + prompt(30, 200), program=f"t{index}", is_last_turn=True)
        leased.run()
    assert leased.stats()["queueing_delay_s"] > 0.5
    durations = ToolLatency(count=50, quantiles=tuple(0.1 * (1 + index / 50) for index in range(50)))
    history = LatencySnapshot(version=7, global_=durations, tools={PYTEST: durations})
    assert leased.scheduler.continuum_push_latency(history.to_dict()) == 7
    leased.run_turn("a1", prompt(1, 200), program="a")
    armed = leased.scheduler.continuum_lease_arm("a", "0", "pytest", False)
    assert armed["reason"] == "tool_history"
    # Every call returns within 0.2 s, and the benefit is far above that.
    assert armed["ttl_s"] == pytest.approx(0.198)
    assert armed["blocks"] == 12


def test_stop_strings_end_a_turn_by_an_abort_and_its_kv_is_kept_until_the_replica_says(engine: Build) -> None:
    leased = engine(retention="static_ttl", ttl_s=50, pool=POOL)
    leased.submit("a1", prompt(1, 200), program="a", output_tokens=100, stop=["\n\n"])
    leased.run(lambda: len(leased.outputs["a1"]) >= 10)
    leased.abort("a1")
    explained = leased.scheduler.continuum_explain("a")
    assert [lease["state"] for lease in explained["leases"]] == ["provisional"]
    assert leased.scheduler.continuum_lease_arm("a", "0", "pytest", False)["ttl_s"] == 50


def test_an_abort_without_stop_strings_is_a_client_that_left(engine: Build) -> None:
    leased = engine(retention="static_ttl", ttl_s=50, pool=POOL)
    leased.submit("a1", prompt(1, 200), program="a", output_tokens=100)
    leased.run(lambda: len(leased.outputs["a1"]) >= 10)
    leased.abort("a1")
    leased.run()
    assert leased.stats()["live_leases"] == 0
    assert leased.free_blocks == leased.total_blocks


def test_the_engine_learns_what_a_prefill_costs_from_its_own_steps(engine: Build) -> None:
    learning = engine(preset="continuum", pool={"blocks": 200})
    for index in range(60):
        learning.run_turn(f"t{index}", prompt(index, 40 + 17 * (index % 25)))
    # The harness takes 0.01 s a step and 0.0001 s a token; 1000 tokens are two steps of at most 512.
    assert learning.stats()["prefill_reload_s_per_1k"] == pytest.approx(0.12, rel=0.05)


def test_the_tool_key_of_a_wait_is_what_the_replica_armed(engine: Build) -> None:
    learning = engine(preset="continuum", pool=POOL)
    context = learning.run_turn("a1", prompt(1, 200), program="a")
    learning.scheduler.continuum_lease_arm("a", "0", "pytest", False)
    learning.clock.advance(3.0)
    learning.run_turn("a2", context + prompt(2, 30), program="a")
    assert learning.stats()["tool_latency"] == {"version": None, "samples": 1, "own_samples": 1, "tools": 1}
