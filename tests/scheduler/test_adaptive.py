"""Ours, on the real queue: leases that can be outbid, a lane for first turns, bounded passing, and admission."""

from collections.abc import Callable

from support.engine_core import SchedulerHarness, prompt

Build = Callable[..., SchedulerHarness]
ADAPTIVE = {"preset": "adaptive", "program_retained_fraction_max": 1.0, "tenant_retained_fraction_max": 1.0}
PLAIN = {**ADAPTIVE, "admission": "none", "lane_fraction": 0.0}


def warmed_up(engine: SchedulerHarness) -> None:
    """An engine that has seen what its steps cost, and an empty cache."""
    engine.submit("warm", prompt(90, 200), output_tokens=200)
    engine.run()
    for index in range(10):
        engine.run_turn(f"warm{index}", prompt(91 + index, 100 + 10 * index))
    engine.scheduler.reset_prefix_cache()


def test_nothing_is_freed_by_time_alone(engine: Build) -> None:
    idle = engine(**PLAIN, pool={"blocks": 60})
    context = idle.run_turn("a1", prompt(1, 320), program="a")
    idle.clock.advance(1000)
    idle.submit("a2", context + prompt(2, 10), program="a")
    idle.step()
    assert idle.hits["a2"] == 320


def test_a_waiting_turn_outbids_a_program_that_has_been_away_for_long(engine: Build) -> None:
    full = engine(**PLAIN, pool={"blocks": 40})
    warmed_up(full)
    full.run_turn("idle1", prompt(1, 320), program="idle")  # 20 blocks
    full.clock.advance(1000)
    full.submit("busy", prompt(2, 150), program="busy", output_tokens=60)
    full.step()
    full.submit("newcomer", prompt(3, 240), program="new")
    full.run(lambda: "newcomer" in full.first_scheduled)
    assert "busy" in full.scheduler.requests
    assert full.stats()["lease_ends"]["outbid"] == 1


def test_a_newer_lease_takes_the_place_of_older_ones_under_a_cap(engine: Build) -> None:
    capped = engine(**{**PLAIN, "tenant_retained_fraction_max": 0.5}, pool={"blocks": 60})
    for index in range(4):
        capped.run_turn(f"p{index}", prompt(index, 160), program=f"p{index}")  # 10 blocks each; 30 may be held
        capped.clock.advance(10)
    held = [name for name in ("p0", "p1", "p2", "p3") if capped.scheduler.continuum_explain(name)["leases"]]
    assert held == ["p1", "p2", "p3"]
    assert capped.stats()["lease_ends"] == {"over_cap": 1}


def test_a_first_turn_goes_before_others_while_its_lane_has_room(engine: Build) -> None:
    laned = engine(**{**PLAIN, "lane_fraction": 0.2}, pool={"blocks": 200, "max_num_seqs": 1})
    context = laned.run_turn("a1", prompt(1, 40), program="a")
    laned.submit("busy", prompt(99, 20), output_tokens=10)
    laned.step()
    laned.submit("a2", context + prompt(3, 20), program="a")
    laned.submit("b1", prompt(2, 40), program="b")
    laned.run()
    assert laned.first_scheduled[-2:] == ["b1", "a2"]


def test_without_a_lane_the_resident_program_goes_first(engine: Build) -> None:
    ordered = engine(**PLAIN, pool={"blocks": 200, "max_num_seqs": 1})
    context = ordered.run_turn("a1", prompt(1, 40), program="a")
    ordered.submit("busy", prompt(99, 20), output_tokens=10)
    ordered.step()
    ordered.submit("b1", prompt(2, 40), program="b")
    ordered.submit("a2", context + prompt(3, 20), program="a")
    ordered.run()
    assert ordered.first_scheduled[-2:] == ["a2", "b1"]


def test_among_first_turns_the_program_that_declares_less_goes_first(engine: Build) -> None:
    ordered = engine(**PLAIN, pool={"blocks": 200, "max_num_seqs": 1})
    ordered.run_turn("x1", prompt(9, 40), program="x", remaining_turns=3)
    ordered.submit("busy", prompt(99, 20), output_tokens=10)
    ordered.step()
    ordered.submit("long", prompt(1, 40), program="long", remaining_turns=50)
    ordered.submit("short", prompt(2, 40), program="short", remaining_turns=1)
    ordered.run()
    assert ordered.first_scheduled[-2:] == ["short", "long"]


def test_a_small_turn_passes_one_that_does_not_fit(engine: Build) -> None:
    crowded = engine(**PLAIN, pool={"blocks": 40})
    crowded.submit("busy", prompt(1, 320), program="busy", output_tokens=60)
    crowded.step()
    crowded.submit("large", prompt(2, 400), program="large")
    crowded.submit("small", prompt(3, 100), program="small")
    crowded.run(lambda: "small" in crowded.first_scheduled)
    assert "busy" in crowded.scheduler.requests
    assert "large" not in crowded.first_scheduled


def test_nothing_passes_where_no_skips_are_allowed(engine: Build) -> None:
    crowded = engine(**{**PLAIN, "backfill_skips_max": 0}, pool={"blocks": 40})
    crowded.submit("busy", prompt(1, 320), program="busy", output_tokens=60)
    crowded.step()
    crowded.submit("large", prompt(2, 400), program="large")
    crowded.submit("small", prompt(3, 100), program="small")
    crowded.run()
    assert crowded.first_scheduled == ["busy", "large", "small"]


def test_one_that_has_not_fitted_for_too_long_is_not_passed(engine: Build) -> None:
    crowded = engine(**{**PLAIN, "backfill_wait_max_s": 0.0}, pool={"blocks": 40})
    crowded.submit("busy", prompt(1, 320), program="busy", output_tokens=60)
    crowded.step()
    crowded.submit("large", prompt(2, 400), program="large")
    for _ in range(3):
        crowded.step()
    crowded.submit("small", prompt(3, 100), program="small")
    crowded.run()
    assert crowded.first_scheduled == ["busy", "large", "small"]


def test_a_new_program_waits_while_the_active_ones_need_the_memory(engine: Build) -> None:
    strict = engine(**{**ADAPTIVE, "lane_fraction": 0.0, "admission_fraction": 0.5}, pool={"blocks": 60})
    strict.submit("a1", prompt(1, 320), program="a", output_tokens=40)  # a third of the pool, and growing
    strict.step()
    strict.submit("b1", prompt(2, 160), program="b")  # fits the pool, not the half that is admitted
    for _ in range(20):
        strict.step()
    assert "b1" not in strict.first_scheduled
    strict.run()
    assert strict.first_scheduled == ["a1", "b1"]


def test_a_program_that_has_been_admitted_is_never_held_back(engine: Build) -> None:
    strict = engine(**{**ADAPTIVE, "lane_fraction": 0.0, "admission_fraction": 0.5}, pool={"blocks": 60})
    context = strict.run_turn("b1", prompt(2, 160), program="b")
    strict.submit("a1", prompt(1, 400), program="a", output_tokens=40)
    strict.step()
    strict.submit("b2", context + prompt(3, 20), program="b")
    strict.step()
    assert "b2" in strict.first_scheduled


def test_a_program_that_has_waited_too_long_starts(engine: Build) -> None:
    strict = engine(
        **{**ADAPTIVE, "lane_fraction": 0.0, "admission_fraction": 0.1, "admission_wait_max_s": 5.0},
        pool={"blocks": 60},
    )
    strict.submit("a1", prompt(1, 320), program="a", output_tokens=100)
    strict.step()
    strict.submit("b1", prompt(2, 160), program="b")
    strict.step()
    assert "b1" not in strict.first_scheduled
    strict.clock.advance(6)
    strict.step()
    strict.step()
    assert "b1" in strict.first_scheduled


def test_with_nothing_running_nobody_is_held_back(engine: Build) -> None:
    strict = engine(**{**ADAPTIVE, "lane_fraction": 0.0, "admission_fraction": 0.01}, pool={"blocks": 60})
    strict.submit("a1", prompt(1, 320), program="a")
    strict.step()
    assert strict.first_scheduled == ["a1"]


def test_turns_without_a_program_are_never_held_back(engine: Build) -> None:
    strict = engine(**{**ADAPTIVE, "lane_fraction": 0.0, "admission_fraction": 0.01}, pool={"blocks": 60})
    strict.submit("a1", prompt(1, 320), program="a", output_tokens=40)
    strict.step()
    strict.submit("plain", prompt(2, 60))
    strict.step()
    assert "plain" in strict.first_scheduled


def test_held_back_turns_count_as_waiting_and_can_be_cancelled(engine: Build) -> None:
    strict = engine(**{**ADAPTIVE, "lane_fraction": 0.0, "admission_fraction": 0.1}, pool={"blocks": 60})
    strict.submit("a1", prompt(1, 320), program="a", output_tokens=60)
    strict.step()
    strict.submit("b1", prompt(2, 160), program="b")
    strict.step()
    assert strict.stats()["waiting"] == 1
    strict.abort("b1")
    strict.run()
    assert strict.first_scheduled == ["a1"]


def test_a_program_that_the_lane_let_through_waits_with_its_second_turn_for_admission(engine: Build) -> None:
    strict = engine(**{**ADAPTIVE, "lane_fraction": 0.2, "admission_fraction": 0.5}, pool={"blocks": 60})
    context = strict.run_turn("b1", prompt(2, 160), program="b")  # through the lane
    strict.submit("a1", prompt(1, 400), program="a", output_tokens=100)
    strict.step()
    strict.submit("b2", context + prompt(3, 20), program="b")
    for _ in range(20):
        strict.step()
    assert "b2" not in strict.first_scheduled
    strict.run()
    assert strict.first_scheduled == ["b1", "a1", "b2"]
