"""Retention never blocks progress: what leases hold is had back before anybody is preempted and before the engine idles."""

from collections.abc import Callable

import pytest

from support.engine_core import SchedulerHarness, prompt

Build = Callable[..., SchedulerHarness]
FOREVER = {"retention": "static_ttl", "ttl_s": 10_000, "ttl_max_s": 10_000, "retained_fraction_max": 1.0}
EVERYTHING = {**FOREVER, "tenant_retained_fraction_max": 1.0, "program_retained_fraction_max": 1.0}


def retain(engine: SchedulerHarness, program: str, seed: int, tokens: int) -> list[int]:
    """A program whose first turn has ended and whose KV is leased."""
    return engine.run_turn(f"{program}-1", prompt(seed, tokens), program=program)


def test_with_the_whole_pool_retained_a_newcomer_is_scheduled_in_the_same_step(engine: Build) -> None:
    full = engine(**EVERYTHING, pool={"blocks": 40})
    for index in range(4):
        retain(full, f"p{index}", index, 160)
    assert full.free_blocks == 0
    full.submit("newcomer", prompt(9, 400), program="new")
    full.step()
    assert "newcomer" in full.first_scheduled


def test_it_takes_as_many_leases_as_it_needs_and_no_more(engine: Build) -> None:
    full = engine(**EVERYTHING, pool={"blocks": 40})
    for index in range(4):
        retain(full, f"p{index}", index, 160)
    full.submit("newcomer", prompt(9, 240), program="new")  # 15 blocks and one to decode into: two leases of ten
    full.step()
    assert full.leases()["reclaimed"] == 2


def test_the_programs_that_arrived_last_give_up_first(engine: Build) -> None:
    full = engine(**EVERYTHING, pool={"blocks": 40})
    for index in range(4):
        retain(full, f"p{index}", index, 160)
    full.submit("newcomer", prompt(9, 240), program="new")
    full.step()
    held = [name for name in ("p0", "p1", "p2", "p3") if full.scheduler.continuum_explain(name)["leases"]]
    assert held == ["p0", "p1"]


def test_a_running_turn_that_grows_takes_leases_before_anybody_is_preempted(engine: Build) -> None:
    full = engine(**EVERYTHING, pool={"blocks": 40})
    retain(full, "idle", 1, 320)  # 20 blocks
    for index in range(2):  # 2 x 10 blocks at first; both grow to 18
        full.submit(f"busy{index}", prompt(10 + index, 150), program=f"busy{index}", output_tokens=130)
    full.run()
    assert full.preemptions == 0
    assert full.stats()["lease_ends"]["running_turn_needs_blocks"] == 1


def test_without_enough_leases_vllm_preempts_as_it_always_does(engine: Build) -> None:
    full = engine(**EVERYTHING, pool={"blocks": 30})
    retain(full, "idle", 1, 160)
    for index in range(2):
        full.submit(f"busy{index}", prompt(10 + index, 150), program=f"busy{index}", output_tokens=150)
    full.run()
    assert full.preemptions >= 1
    assert len(full.outputs["busy0"]) == len(full.outputs["busy1"]) == 150


def test_the_youngest_program_is_preempted(engine: Build) -> None:
    crowded = engine(preset="continuum", pool={"blocks": 24})
    context = crowded.run_turn("old-1", prompt(1, 32), program="old")
    crowded.submit("young", prompt(2, 150), program="young", output_tokens=150)
    crowded.step()
    # The older program's turn starts running after the younger one's, and stays.
    crowded.submit("old-2", context + prompt(3, 120), program="old", output_tokens=150)
    preempted: set[str] = set()
    while crowded.scheduler.has_requests():
        crowded.step()
        preempted |= {
            name for name, request in crowded.scheduler.requests.items() if request.num_preemptions and name != "x"
        }
    assert preempted == {"young"}


def test_while_something_runs_a_waiting_turn_does_not_take_leases(engine: Build) -> None:
    full = engine(**EVERYTHING, pool={"blocks": 40})
    retain(full, "idle", 1, 320)
    full.submit("busy", prompt(2, 150), program="busy", output_tokens=30)
    full.step()
    full.submit("newcomer", prompt(3, 240), program="new")
    for _ in range(5):
        full.step()
    assert "newcomer" not in full.first_scheduled
    assert full.leases()["reclaimed"] == 0


def test_a_waiting_turn_waits_for_leases_at_most_until_they_lapse(engine: Build) -> None:
    full = engine(retention="static_ttl", ttl_s=0.05, program_retained_fraction_max=1.0, pool={"blocks": 40})
    retain(full, "idle", 1, 320)
    full.submit("busy", prompt(2, 150), program="busy", output_tokens=60)
    full.step()
    full.submit("newcomer", prompt(3, 240), program="new")
    full.run(lambda: "newcomer" in full.first_scheduled)
    assert "busy" in full.scheduler.requests
    assert full.leases()["expired"] == 1


def test_a_returning_turn_that_does_not_fit_beside_its_own_lease_takes_the_others_first(engine: Build) -> None:
    full = engine(**EVERYTHING, pool={"blocks": 40})
    context = retain(full, "a", 1, 320)  # 20 blocks
    retain(full, "b", 2, 320)  # 20 blocks
    full.submit("a-2", context + prompt(3, 100), program="a")
    full.step()
    assert full.hits["a-2"] == 320
    assert full.stats()["lease_ends"] == {"nothing_runs": 1, "next_turn_scheduled": 1}


def test_a_returning_turn_with_another_context_may_take_its_own_lease_when_it_is_the_last(engine: Build) -> None:
    full = engine(**EVERYTHING, pool={"blocks": 40})
    retain(full, "a", 1, 480)  # 30 blocks
    full.submit("a-2", prompt(7, 400), program="a")  # 25 blocks, none of them the old ones
    full.step()
    assert "a-2" in full.first_scheduled
    assert full.leases()["reclaimed"] == 1


def test_two_programs_that_hold_what_the_other_needs_do_not_deadlock(engine: Build) -> None:
    full = engine(**EVERYTHING, pool={"blocks": 40})
    contexts = [retain(full, "a", 1, 304), retain(full, "b", 2, 304)]
    for name, context in zip("ab", contexts, strict=True):
        full.submit(f"{name}-2", context + prompt(3, 200), program=name, output_tokens=5)
    full.run()
    assert full.first_scheduled[-2:] == ["a-2", "b-2"]


def test_one_program_cannot_hold_more_than_its_share(engine: Build) -> None:
    fair = engine(**{**FOREVER, "program_retained_fraction_max": 0.25}, pool={"blocks": 40})
    for branch in "0123":
        fair.run_turn(f"a{branch}", prompt(int(branch), 96), program="a", branch=branch)  # 6 blocks each
    assert fair.stats()["retained_blocks"] == 6
    assert fair.stats()["not_retained"] == {"over_cap": 3}


@pytest.mark.parametrize("tenant_share", [0.25, 0.5])
def test_one_tenant_cannot_hold_more_than_its_share_however_many_programs_it_has(
    engine: Build, tenant_share: float
) -> None:
    fair = engine(**{**FOREVER, "tenant_retained_fraction_max": tenant_share}, pool={"blocks": 40})
    for index in range(8):
        fair.run_turn(f"p{index}", prompt(index, 64), program=f"p{index}", tenant_id="greedy")
    assert fair.stats()["retained_blocks"] <= tenant_share * 40
    fair.run_turn("other", prompt(50, 64), program="other", tenant_id="modest")
    assert fair.scheduler.continuum_explain("other")["leases"] != []
