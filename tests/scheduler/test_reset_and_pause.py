"""No lease outlives the cache that it points into; whatever empties the cache keeps working."""

from collections.abc import Callable

import pytest
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

from support.engine_core import SchedulerHarness, prompt

Build = Callable[..., SchedulerHarness]


@pytest.fixture
def leased(engine: Build) -> SchedulerHarness:
    """An engine with two leases."""
    built = engine(retention="static_ttl", ttl_s=1000, ttl_max_s=1000, pool={"blocks": 60})
    for index in range(2):
        built.run_turn(f"p{index}", prompt(index, 160), program=f"p{index}")
    assert built.stats()["live_leases"] == 2
    return built


def test_resetting_the_prefix_cache_releases_every_lease(leased: SchedulerHarness) -> None:
    assert leased.scheduler.reset_prefix_cache()
    assert leased.leases()["released"] == 2
    assert leased.free_blocks == leased.total_blocks


def test_a_weight_update_resets_while_turns_run(leased: SchedulerHarness) -> None:
    leased.submit("running", prompt(5, 100), program="p5", output_tokens=50)
    for _ in range(5):
        leased.step()
    assert leased.scheduler.reset_prefix_cache(reset_running_requests=True)
    leased.run()
    assert len(leased.outputs["running"]) == 50


@pytest.mark.parametrize("state", [PauseState.PAUSED_NEW, PauseState.PAUSED_ALL])
def test_pausing_releases_every_lease(leased: SchedulerHarness, state: PauseState) -> None:
    leased.scheduler.set_pause_state(state)
    assert leased.leases()["released"] == 2
    assert leased.free_blocks == leased.total_blocks


def test_a_turn_that_ends_while_paused_leaves_no_lease_so_that_sleep_can_follow(leased: SchedulerHarness) -> None:
    leased.submit("running", prompt(5, 100), program="p5", output_tokens=10)
    leased.step()
    leased.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    leased.run(lambda: "running" not in leased.scheduler.requests)
    assert leased.scheduler.reset_prefix_cache(reset_running_requests=True)


def test_aborting_everything_as_a_pause_does_leaves_nothing(leased: SchedulerHarness) -> None:
    leased.submit("running", prompt(5, 100), program="p5", output_tokens=50, stop=["x"])
    leased.run(lambda: len(leased.outputs["running"]) > 3)
    leased.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    leased.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    assert leased.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert leased.free_blocks == leased.total_blocks


def test_after_a_pause_retention_goes_on(leased: SchedulerHarness) -> None:
    leased.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    leased.scheduler.set_pause_state(PauseState.UNPAUSED)
    leased.run_turn("p9", prompt(9, 100), program="p9")
    assert leased.stats()["live_leases"] == 1
