"""The platform's own `/metrics`, as the real pages of its parts make it: no Ray, vLLM or store runs behind them."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from agent_program.clock import ManualClock
from agent_program.ids import ProgramId, ToolKey
from agent_program.turn import TurnHints
from continuum_router.placement import Reason
from continuum_router.router_counters import RouterCounters
from deployments.fleet import PartAnswer
from deployments.health import Health
from deployments.memory_chat import TableFleet
from deployments.memory_clients import ScriptedEngine, ScriptedTools, answer, tool_calls
from deployments.memory_journal import MemoryJournal
from deployments.part_metrics import ingress_page, runner_page, store_page, tools_page
from deployments.program_settings import ProgramSettings
from deployments.runner import ProgramRunner
from engine_replicas.config import SchedulingSettings
from engine_replicas.engine_metrics import exposition
from engine_replicas.policies import named_policies, new_estimates
from engine_replicas.retention.controller import RetentionController
from engine_replicas.retention.events import Changes, FinishedTurn, HeldKv, TurnEnding
from engine_replicas.scheduler_meter import SchedulerMeter
from support.programs import Bench, spec
from tool_runtime.actor import ToolActor
from tool_runtime.call_times import CallTimes
from tool_runtime.config import ToolRuntimeSettings

#: What a vLLM scheduler and a replica add to the controller's numbers (`continuum_stats`, `_own_stats`); a test of the real scheduler
#: holds this list to it.
QUEUE_STATS: Mapping[str, Any] = {
    "lane_tokens": 0,
    "unadmitted_tokens": 128,
    "unadmitted_turns": 1,
    "overdue_turns": 0,
    "block_tokens": 16,
    "total_blocks": 100,
    "free_blocks": 60,
    "running": 2,
    "waiting": 1,
    "queued_tokens": 128,
}
REPLICA_STATS: Mapping[str, Any] = {
    "turns_open": 3,
    "token_continuity": {"same": 2, "continued": 5},
    "latency_snapshot_version": 4,
    "latency_store_errors": 0,
    "latency_snapshot_age_s": 2.0,
    "scheduler_call_failures": {"continuum_lease_arm": 1},
}


def needs_promtool() -> str:
    """Prometheus' own checker: skip where a laptop lacks it, fail where CI does."""
    found = shutil.which("promtool")
    if found is None:
        if os.environ.get("CI"):
            pytest.fail("promtool is needed: install Debian's `prometheus`")
        pytest.skip("promtool is not installed (Debian's `prometheus` has it)")
    return found


def scheduler_stats() -> dict[str, Any]:
    """Of a controller that has held one lease to its reuse and one to its deadline."""
    settings = SchedulingSettings(preset="continuum")
    estimates = new_estimates(settings, step_tokens_max=512, kv_tokens_total=1600)
    estimates.queueing_delay.evicted_turn_waited(5.0)
    policies = named_policies(settings, estimates)
    controller = RetentionController(
        settings=settings, policy=policies.retention, estimates=estimates, blocks_total=100
    )
    meter = SchedulerMeter()
    meter.step_scheduled(0.0003)
    meter.loaded(0)

    def turn(name: str, now_s: float) -> Changes:
        controller.turn_arrived(name, TurnHints(program_id=ProgramId("p")), now_s)
        for end in controller.turn_scheduled(name, 16, now_s):
            meter.lease_ended(end)
        held = HeldKv(blocks=frozenset(range(4)), tokens=64)
        finished = FinishedTurn(turn_id=name, ending=TurnEnding.ENDED, context_tokens=70, collect=lambda: held)
        return controller.turn_finished(finished, now_s + 0.1)

    turn("t1", 1.0)
    controller.arm(ProgramId("p"), "0", ToolKey("pytest"), False, 1.2)
    turn("t2", 2.0)
    controller.arm(ProgramId("p"), "0", ToolKey("pytest"), False, 2.2)
    for end in controller.expire(10_000.0):
        meter.lease_ended(end)
    controller.pause(True, 10_000.0)
    turn("t3", 10_001.0)  # nothing is retained while the engine is paused
    return {**controller.stats(), **meter.to_plain()}


SHADOW: Mapping[str, Any] = {
    "agreement": {"both": 1, "neither": 0, "only_real": 1, "only_shadow": 0},
    "block_seconds": {"shadow": 2.0, "real": 3.0},
    "would_save_tokens": 16,
    "would_recompute_tokens": 32,
}


def engine_text() -> str:
    """An engine replica's page."""
    return exposition({**scheduler_stats(), **QUEUE_STATS, "shadow": SHADOW}, REPLICA_STATS)


async def tools_text(state_dir: Path) -> str:
    """A tool actor's page."""
    actor = ToolActor(ToolRuntimeSettings(state_dir=state_dir), None)
    times = CallTimes()
    times.waited(0.1)
    for seconds in (0.5, 1.0, 2.0):
        times.ran(ToolKey("pytest"), seconds)
    # What an actor without sandbox, store and MCP server does not know.
    known = {
        "isolates": True,
        "history_reachable": True,
        "mcp_faults": {"files": "away"},
        "call_times": times.to_plain(),
    }
    return tools_page({**await actor.status(), **known})


def router_plain() -> dict[str, Any]:
    """What the routers of a process have counted."""
    counters = RouterCounters()
    counters.placed(Reason.NEW, bindings=1, unconfirmed=0, is_store_away=False)
    return {"engine": counters.to_plain(), "tools": counters.to_plain()}


async def exported_page(state_dir: Path) -> str:
    """The whole page, after one program that called a tool."""
    clock = ManualClock()
    journal = MemoryJournal(clock)
    turns = [tool_calls(("c1", "shell", {"command": "pytest"})), answer("done", cached_tokens=64)]
    engine, tools = ScriptedEngine(turns), ScriptedTools({"shell": ["ok"]})
    await Bench(spec(), engine=engine, tools=tools, journal=journal, clock=clock).run()
    runner = ProgramRunner(journal=journal, engine=engine, tools=tools, clock=clock, settings=ProgramSettings())
    pages = {
        "engine": engine_text(),
        "tools": await tools_text(state_dir),
        "runner": runner_page(runner.status(), router_plain()),
        "ingress": ingress_page({"event_streams": 0, "refusals": {"overloaded": 1}}, router_plain()),
        "embedded_store": store_page({"memory_bytes": 10, "memory_max_bytes": 20, "clients": 1, "commands": 5}),
    }
    fleet = TableFleet(
        {(part, "metrics_page"): PartAnswer(answers=((f"{part}#1", text),), faults=()) for part, text in pages.items()}
    )
    health = Health(journal=journal, fleet=fleet, replicas_wanted={}, clock=clock, probe_timeout_s=5.0)
    return (await health.metrics_page()).decode()


def families(page: str) -> dict[str, Metric]:
    """The platform's own families of a page, by name."""
    found = text_string_to_metric_families(page)
    return {family.name: family for family in found if family.name.startswith("continuum_")}


def series_names(page: str) -> set[str]:
    """Names that a query may use for what a page exports, whether or not it has a sample now."""
    return set(_names(families(page).values()))


def _names(metrics: Any) -> Iterator[str]:
    for metric in metrics:
        match metric.type:
            case "counter":
                yield f"{metric.name}_total"
            case "histogram":
                yield from (f"{metric.name}{end}" for end in ("_bucket", "_count", "_sum"))
            case _:
                yield metric.name


@cache
def vllm_names() -> frozenset[str]:
    """Names that vLLM's source gives its metrics, read without importing it (which takes seconds)."""
    package = importlib.util.find_spec("vllm")
    assert package is not None
    assert package.submodule_search_locations is not None
    root = Path(package.submodule_search_locations[0])
    text = (root / "v1" / "metrics" / "loggers.py").read_text()
    names = set(re.findall(r'name="(vllm:\w+)"', text))
    ends = ("", "_total", "_bucket", "_count", "_sum")
    return frozenset(name + end for name in names for end in ends)
