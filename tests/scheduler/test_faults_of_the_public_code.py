"""The faults of the paper's public code, as far as they concern an engine: here each is a thing that does not happen.

Numbers are those of a list of faults found in that code. Two of them are not here: which tool an answer calls (5) is read by
the replica, and what a shell command's tool is called (6) by the tool runtime.
"""

from collections.abc import Callable
from typing import Any

import pytest

from engine_replicas.ordering import OrderedTurn, ProgramFcfs
from support.engine_core import SchedulerHarness, prompt

Build = Callable[..., SchedulerHarness]
STATIC = {"retention": "static_ttl", "ttl_s": 30}
EVERYTHING = {"retained_fraction_max": 1.0, "tenant_retained_fraction_max": 1.0, "program_retained_fraction_max": 1.0}


def test_1_every_lapsed_lease_ends_in_one_step(engine: Build) -> None:
    leased = engine(**STATIC, pool={"blocks": 200})
    for index in range(10):
        leased.run_turn(f"p{index}", prompt(index, 64), program=f"p{index}")
    leased.clock.advance(31)
    leased.submit("x", prompt(99, 16))
    leased.step()
    assert leased.leases()["expired"] == 10


def test_2_overlapping_turns_under_one_id_run_to_their_ends(engine: Build) -> None:
    leased = engine(**STATIC, pool={"blocks": 60})
    for index in range(4):
        leased.submit(f"t{index}", prompt(index, 100), program="same", output_tokens=5 + index)
    leased.run()
    assert [len(leased.outputs[f"t{index}"]) for index in range(4)] == [5, 6, 7, 8]
    assert leased.stats()["live_leases"] == 1


def test_2_turns_without_an_id_are_not_one_program(engine: Build) -> None:
    leased = engine(**STATIC, pool={"blocks": 60})
    for index in range(4):
        leased.submit(f"t{index}", prompt(index, 100), output_tokens=5)
    leased.run()
    assert (leased.stats()["programs"], leased.stats()["leases_begun"]) == (0, 0)


def test_3_a_first_turn_may_name_a_tool_that_ran_before_it(engine: Build) -> None:
    leased = engine(preset="continuum", pool={"blocks": 60})
    leased.run_turn("t0", prompt(0, 100), program="p", last_tool="pytest", last_tool_s=3.0)
    assert leased.outputs["t0"]


def test_4_a_tool_that_the_client_declared_is_not_forgotten_when_the_answer_shows_none(engine: Build) -> None:
    leased = engine(preset="continuum", pool={"blocks": 60})
    context = leased.run_turn("t0", prompt(0, 100), program="p", next_tool="deploy")
    leased.scheduler.continuum_lease_arm("p", "0", None, False)
    leased.clock.advance(2)
    leased.run_turn("t1", context + prompt(1, 20), program="p")
    assert leased.stats()["tool_latency"]["tools"] == 1


def test_7_leases_go_before_running_turns_are_preempted(engine: Build) -> None:
    full = engine(**STATIC, **EVERYTHING, pool={"blocks": 40})
    full.run_turn("idle", prompt(1, 320), program="idle")
    for index in range(2):
        full.submit(f"busy{index}", prompt(10 + index, 150), program=f"busy{index}", output_tokens=130)
    full.run()
    assert full.preemptions == 0


def test_8_a_waiting_turn_is_kept_out_by_leases_no_longer_than_they_last(engine: Build) -> None:
    full = engine(retention="static_ttl", ttl_s=0.2, **EVERYTHING, pool={"blocks": 40})
    full.run_turn("idle", prompt(1, 320), program="idle")
    deadline_s = full.clock.now_s() + 0.2
    full.submit("busy", prompt(2, 100), program="busy", output_tokens=200)
    full.step()
    full.submit("waiting", prompt(3, 240), program="waiting")
    full.run(lambda: "waiting" in full.first_scheduled)
    assert "busy" in full.scheduler.requests
    assert full.clock.now_s() == pytest.approx(deadline_s, abs=2 * 0.05)


def test_9_a_lone_turn_that_cannot_grow_and_no_lease_to_take_is_vllms_own_case(engine: Build) -> None:
    tiny = engine(**STATIC, pool={"blocks": 8})
    tiny.submit("t0", prompt(0, 100), program="p", output_tokens=60)  # 160 tokens need ten blocks
    for _ in range(100):
        tiny.step()
    assert tiny.scheduler.requests["t0"].num_preemptions >= 1
    tiny.abort("t0")
    assert tiny.free_blocks == tiny.total_blocks


def test_10_steps_with_preemptions_stay_within_the_token_budget_and_lose_nobody(engine: Build) -> None:
    full = engine(preset="continuum", pool={"blocks": 24, "step_tokens_max": 64, "max_num_seqs": 8})
    for index in range(6):
        full.submit(f"t{index}", prompt(index, 60), program=f"p{index}", output_tokens=80)
    while full.scheduler.has_requests():
        full.step()
        assert full.step_tokens <= 64
    assert full.preemptions >= 2
    assert all(len(full.outputs[f"t{index}"]) == 80 for index in range(6))


@pytest.mark.parametrize("how", ["declared", "told"])
def test_11_a_programs_last_turn_is_not_retained(engine: Build, how: str) -> None:
    leased = engine(**STATIC, pool={"blocks": 60})
    leased.run_turn("t0", prompt(0, 100), program="p", is_last_turn=how == "declared")
    if how == "told":
        leased.scheduler.continuum_lease_arm("p", "0", "echo", True)
    assert leased.free_blocks == leased.total_blocks


def test_11_an_aborted_turn_is_not_retained(engine: Build) -> None:
    leased = engine(**STATIC, pool={"blocks": 60})
    leased.submit("t0", prompt(0, 100), program="p", output_tokens=50)
    leased.run(lambda: len(leased.outputs["t0"]) > 5)
    leased.abort("t0")
    leased.run()
    assert leased.free_blocks == leased.total_blocks


def test_12_clients_without_ids_do_not_share_leases(engine: Build) -> None:
    leased = engine(**STATIC, pool={"blocks": 60})
    for client in range(3):
        for turn in range(2):
            leased.run_turn(f"client{client}-{turn}", prompt(client, 64 + 32 * turn))
    assert leased.stats()["leases_begun"] == 0


def test_13_a_lease_ends_when_its_next_turn_is_scheduled_and_not_when_that_ends(engine: Build) -> None:
    leased = engine(**STATIC, pool={"blocks": 60})
    leased.run_turn("t0", prompt(0, 100), program="p")
    # The next turn shares half of the context only; the other half is free as soon as it is scheduled.
    leased.submit("t1", [*prompt(0, 100)[:48], *prompt(5, 40)], program="p", output_tokens=50)
    leased.step()
    assert leased.leases()["reused"] == 1
    assert leased.stats()["retained_blocks"] == 0


def test_14_a_lease_whose_next_turn_is_queued_is_held_for_a_limited_time(engine: Build) -> None:
    leased = engine(**STATIC, queued_turn_hold_max_s=5, pool={"blocks": 200, "max_num_seqs": 1})
    context = leased.run_turn("t0", prompt(0, 100), program="p")
    leased.submit("busy", prompt(1, 32), output_tokens=3000)
    leased.step()
    leased.clock.advance(30)
    leased.submit("t1", context + prompt(2, 20), program="p")
    leased.step()
    leased.clock.advance(4.5)
    leased.step()
    assert leased.stats()["live_leases"] == 1
    leased.clock.advance(1)
    leased.step()
    assert leased.stats()["lease_ends"] == {"queued_too_long": 1}


def test_15_no_table_grows_without_bound(engine: Build) -> None:
    leased = engine(retention="static_ttl", ttl_s=0.5, programs_max=16, tools_max=16, pool={"blocks": 60})
    for index in range(200):
        leased.run_turn(f"t{index}", prompt(index, 20), program=f"p{index}", branch=f"b{index}", next_tool=f"x{index}")
        leased.scheduler.continuum_tool_event(f"p{index}", "finished", f"x{index}", 0.1, "ok")
    stats = leased.stats()
    assert stats["programs"] <= 16
    assert stats["tool_latency"]["tools"] <= 16
    assert stats["live_turns"] == 0


def test_15_the_wall_clock_decides_nothing(engine: Build) -> None:
    leased = engine(**STATIC, pool={"blocks": 60})
    leased.run_turn("t0", prompt(0, 100), program="p")
    leased.clock._wall_offset_s += 1e6  # somebody sets the machine's clock
    assert leased.stats()["live_leases"] == 1


class CountingOrder(ProgramFcfs):
    """The paper's order, and how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0

    def waiting_key(self, turn: OrderedTurn) -> tuple[float, ...]:
        self.asked += 1
        return super().waiting_key(turn)


def test_16_a_queue_in_which_nothing_changed_is_not_sorted_again(engine: Build) -> None:
    crowded: Any = engine(preset="continuum", pool={"blocks": 200, "max_num_seqs": 1})
    crowded.scheduler._queue._ordering = order = CountingOrder()
    for index in range(50):
        crowded.submit(f"t{index}", prompt(index, 32), program=f"p{index}", output_tokens=100)
    for _ in range(2):
        crowded.step()
    # Twice for each turn of a program that has not had one: in the lane for first turns, and beside it; and once more where it started.
    at_first = order.asked
    assert at_first <= 2 * 50 + 2
    for _ in range(60):
        crowded.step()
    assert order.asked == at_first


def test_17_scheduling_ahead_of_execution_is_handled(engine: Build) -> None:
    # Every test here runs in both modes; this one leases the turn that a step in flight still writes behind.
    leased = engine(**STATIC, pool={"blocks": 60})
    context = leased.run_turn("t0", prompt(0, 100), program="p", output_tokens=29)
    leased.step()
    leased.run_turn("t1", context + prompt(1, 20), program="p")
    assert leased.hits["t1"] == 128
