"""The border to vLLM: what is checked at import, how the scheduler is made, and how it is called."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore

from engine_replicas import vllm_plugin
from engine_replicas.vllm_scheduler import (
    SUPPORTED_VLLM,
    VLLM_METHODS,
    RetainingAsyncScheduler,
    RetainingScheduler,
    UnsupportedVllm,
    check_vllm,
    make_scheduler,
)
from support.engine_core import SchedulerHarness, prompt

Build = Callable[..., SchedulerHarness]


def test_the_installed_vllm_is_supported() -> None:
    check_vllm(VLLM_METHODS)


def test_another_signature_is_refused_with_the_version_that_is_supported() -> None:
    with pytest.raises(UnsupportedVllm, match=rf"vLLM {SUPPORTED_VLLM}.*Scheduler\.schedule takes .*throttle"):
        check_vllm({Scheduler.schedule: ("self", "something_else")})


@pytest.mark.parametrize("is_async", [False, True])
def test_the_factory_makes_the_scheduler_of_the_engines_mode(
    engine: Build, monkeypatch: pytest.MonkeyPatch, is_async: bool
) -> None:
    made: list[tuple[Any, ...]] = []
    for kind in (RetainingScheduler, RetainingAsyncScheduler):
        monkeypatch.setattr(kind, "__init__", lambda self, **arguments: made.append((type(self), arguments)))
    config = SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=is_async))
    make_scheduler(vllm_config=config)
    ((kind, arguments),) = made
    assert issubclass(kind, AsyncScheduler if is_async else Scheduler)
    assert arguments == {"vllm_config": config}


def test_a_wrong_setting_stops_the_start_by_name(engine: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    built = engine(preset="vllm")
    config = built.scheduler.vllm_config
    monkeypatch.setattr(config, "additional_config", {"continuum": {"retentoin": "continuum"}})
    with pytest.raises(ValidationError, match="retentoin"):
        RetainingScheduler(
            vllm_config=config,
            kv_cache_config=built.scheduler.kv_cache_config,
            structured_output_manager=built.scheduler.structured_output_manager,
            block_size=16,
        )


def test_utility_calls_are_methods_of_the_engine_core_however_often_they_are_registered(engine: Build) -> None:
    vllm_plugin.register()
    vllm_plugin.register()
    built = engine(retention="static_ttl", ttl_s=20)
    core: Any = SimpleNamespace(scheduler=built.scheduler)
    built.run_turn("a1", prompt(1, 100), program="a")
    armed = EngineCore.continuum_lease_arm(core, "a", "0", "pytest", False)
    assert armed == {"ttl_s": 20.0, "blocks": 6, "reason": "static", "outcomes": {}}
    assert EngineCore.continuum_tool_event(core, "a", "started", "pytest", 0.0) is None
    assert EngineCore.continuum_explain(core, "a")["is_known"]
    assert EngineCore.continuum_stats(core)["live_leases"] == 1
    assert EngineCore.continuum_release(core, "a") == {"leases": 1, "blocks": 6}


def test_a_utility_call_to_another_scheduler_says_what_is_missing(engine: Build) -> None:
    vllm_plugin.register()
    core: Any = SimpleNamespace(scheduler=engine(is_stock=True).scheduler)
    with pytest.raises(RuntimeError, match="make_scheduler"):
        EngineCore.continuum_stats(core)


def test_an_id_that_is_too_long_is_no_program(engine: Build) -> None:
    built = engine(retention="static_ttl", ttl_s=20)
    built.run_turn("a1", prompt(1, 100), program="a" * 300)
    assert (built.stats()["programs"], built.free_blocks) == (0, built.total_blocks)


def test_a_step_log_has_a_line_a_step(engine: Build, tmp_path: Any) -> None:
    log = tmp_path / "steps.jsonl"
    built = engine(preset="vllm", step_log_path=str(log))
    built.run_turn("a1", prompt(1, 100), output_tokens=5)
    built.run()
    built.scheduler.shutdown()
    assert len(log.read_text().splitlines()) == 5
