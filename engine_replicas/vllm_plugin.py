"""The utility calls: how the replica's process talks to the scheduler in the engine's process.

vLLM's `EngineCoreClient.call_utility_async(name, *args)` calls the method `name` on the engine core, between two steps, with
plain values that survive msgpack. `register` adds the functions below to the engine core as such methods. vLLM counts the
parameters of a method before it calls it, so each is written out.

`register` is named as a `vllm.general_plugins` entry point, and the scheduler calls it too, so that the calls exist wherever
the scheduler does, installed or not. It may run any number of times.
"""

from __future__ import annotations

from typing import Any

from engine_replicas.orphan_watch import end_with_parent


def continuum_lease_arm(
    self: Any, program_id: str, branch: str, tool_key: str | None, is_last_turn: bool
) -> dict[str, Any]:
    """The turn's answer is parsed: the program runs `tool_key` now, or none, or ends. Returns the lease's `ttl_s` and
    `blocks` (0 where nothing is retained) and the `reason`."""
    return dict(_scheduler(self).continuum_lease_arm(program_id, branch, tool_key, is_last_turn))


def continuum_release(self: Any, program_id: str) -> dict[str, Any]:
    """The program is over. Returns how many `leases` ended, and their `blocks`."""
    return dict(_scheduler(self).continuum_release(program_id))


def continuum_tool_event(
    self: Any, program_id: str, kind: str, tool_key: str, elapsed_s: float, outcome: str | None = None
) -> None:
    """A tool of the program started or finished (`ToolEventKind`, `ToolOutcome`)."""
    _scheduler(self).continuum_tool_event(program_id, kind, tool_key, elapsed_s, outcome)


def continuum_push_latency(self: Any, snapshot: dict[str, Any]) -> int:
    """Adopt a snapshot of the shared tool-latency history. Returns the version in use."""
    return int(_scheduler(self).continuum_push_latency(snapshot))


def continuum_explain(self: Any, program_id: str) -> dict[str, Any]:
    """The program's leases and last decisions with their inputs."""
    return dict(_scheduler(self).continuum_explain(program_id))


def continuum_stats(self: Any) -> dict[str, Any]:
    """Counters, memory and estimates."""
    return dict(_scheduler(self).continuum_stats())


UTILITY_CALLS = (
    continuum_lease_arm,
    continuum_release,
    continuum_tool_event,
    continuum_push_latency,
    continuum_explain,
    continuum_stats,
)


def register() -> None:
    """Add the utility calls to vLLM's engine core, and have the core that runs in this process, if any, end with its replica."""
    from vllm.v1.engine.core import EngineCore

    for call in UTILITY_CALLS:
        setattr(EngineCore, call.__name__, call)
    end_with_parent()


def _scheduler(engine_core: Any) -> Any:
    scheduler = engine_core.scheduler
    if not hasattr(scheduler, "continuum_stats"):
        raise RuntimeError(
            "this call needs scheduler_cls=engine_replicas.vllm_scheduler.make_scheduler, "
            f"but the engine runs {type(scheduler).__name__}"
        )
    return scheduler
