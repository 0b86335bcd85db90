"""Calls to the scheduler are bounded and never hurt the turn that makes them."""

from __future__ import annotations

import asyncio
from typing import Any

from agent_program.clock import ManualClock
from engine_replicas.scheduler_client import SchedulerClient


class Core:
    """An engine core that answers, fails, or is dead and never answers."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.fails: Exception | None = None
        self.is_dead = False

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        self.calls.append((method, *args))
        if self.is_dead:
            await asyncio.Event().wait()
        if self.fails is not None:
            raise self.fails
        return {"took": method}


async def test_the_answer_comes_back() -> None:
    core = Core()
    client = SchedulerClient(core, timeout_s=10, clock=ManualClock())
    assert await client.call("continuum_release", "p") == {"took": "continuum_release"}
    assert core.calls == [("continuum_release", "p")]
    assert client.failures == {}


async def test_a_call_that_fails_is_counted_and_answers_nothing() -> None:
    core = Core()
    core.fails = RuntimeError("no such program")
    client = SchedulerClient(core, timeout_s=10, clock=ManualClock())
    assert await client.call("continuum_explain", "p") is None
    assert client.failures == {"continuum_explain": 1}


async def test_a_dead_core_does_not_hold_the_caller() -> None:
    core = Core()
    core.is_dead = True
    client = SchedulerClient(core, timeout_s=0.01, clock=ManualClock())
    assert await client.call("continuum_stats") is None
    assert client.failures == {"continuum_stats": 1}


async def test_silence_counts_from_the_last_answer() -> None:
    core, clock = Core(), ManualClock()
    client = SchedulerClient(core, timeout_s=10, clock=clock)
    clock.advance(5)
    assert client.silence_s == 5
    await client.call("continuum_stats")
    assert client.silence_s == 0
    core.fails = RuntimeError("dead")
    clock.advance(7)
    await client.call("continuum_stats")
    assert client.silence_s == 7
