"""Tool-latency history between the store and the scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agent_program.clock import ManualClock
from agent_program.errors import StoreUnavailable
from agent_program.ids import ToolKey
from agent_program.tool_events import LatencySample, SampleSource, ToolOutcome
from engine_replicas.latency_feed import SAMPLES_WAITING_MAX, LatencyFeed
from engine_replicas.scheduler_client import SchedulerClient
from tool_runtime.history import MemoryHistory
from tool_runtime.latency import LatencySnapshot


class SwitchableHistory(MemoryHistory):
    """Memory behind a switch that takes it away."""

    is_away = False

    async def add(self, samples: Sequence[LatencySample]) -> None:
        self._check()
        await super().add(samples)

    async def snapshot(self) -> LatencySnapshot:
        self._check()
        return await super().snapshot()

    def _check(self) -> None:
        if self.is_away:
            raise StoreUnavailable


class Core:
    """An engine core that keeps what it is told, unless it is deaf."""

    def __init__(self) -> None:
        self.pushed: list[dict[str, Any]] = []
        self.is_deaf = False

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        if self.is_deaf:
            raise RuntimeError("the engine is restarting")
        assert method == "continuum_push_latency"
        self.pushed.append(args[0])
        return args[0]["version"]


class Parts:
    def __init__(self) -> None:
        self.history, self.core = SwitchableHistory(), Core()
        self.clock = ManualClock()
        scheduler = SchedulerClient(self.core, timeout_s=10, clock=self.clock)
        self.feed = LatencyFeed(self.history, scheduler, self.clock)


def sample(tool: str = "make", duration_s: float = 1.0) -> LatencySample:
    return LatencySample(
        tool=ToolKey(tool),
        duration_s=duration_s,
        outcome=ToolOutcome.OK,
        source=SampleSource.REQUEST_GAP,
        at_wall_s=0.0,
    )


async def test_a_new_snapshot_reaches_the_scheduler_once() -> None:
    parts = Parts()
    await parts.history.add([sample()])
    for _ in range(3):
        await parts.feed.round()
    assert [pushed["version"] for pushed in parts.core.pushed] == [1]
    assert parts.core.pushed[0]["tools"]["make"]["quantiles"] == [1.0]
    await parts.history.add([sample("git")])
    await parts.feed.round()
    assert set(parts.core.pushed[-1]["tools"]) == {"make", "git"}


async def test_samples_go_out_with_the_next_round() -> None:
    parts = Parts()
    parts.feed.add(sample("make", 2.0))
    await parts.feed.round()
    assert (await parts.history.snapshot()).tools[ToolKey("make")].quantiles == (2.0,)
    await parts.feed.round()
    assert (await parts.history.snapshot()).tools[ToolKey("make")].count == 1


async def test_with_the_store_away_nothing_is_lost_and_nothing_is_pushed() -> None:
    parts = Parts()
    parts.feed.add(sample())
    parts.history.is_away = True
    await parts.feed.round()
    await parts.feed.round()
    assert parts.feed.store_errors == 2
    assert parts.core.pushed == []
    parts.history.is_away = False
    await parts.feed.round()
    assert parts.core.pushed[0]["global"]["count"] == 1


async def test_samples_that_wait_are_bounded_and_the_oldest_go() -> None:
    parts = Parts()
    parts.history.is_away = True
    for number in range(SAMPLES_WAITING_MAX + 10):
        parts.feed.add(sample(duration_s=float(number)))
    parts.history.is_away = False
    await parts.feed.round()
    snapshot = await parts.history.snapshot()
    assert snapshot.global_.count == SAMPLES_WAITING_MAX
    assert min(snapshot.global_.quantiles) >= 10.0


async def test_a_snapshot_that_the_scheduler_did_not_take_is_pushed_again() -> None:
    parts = Parts()
    await parts.history.add([sample()])
    parts.core.is_deaf = True
    await parts.feed.round()
    parts.core.is_deaf = False
    await parts.feed.round()
    assert len(parts.core.pushed) == 1
    assert parts.feed.version == 1
