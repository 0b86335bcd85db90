"""What every tool-latency history promises, asked of each implementation."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from agent_program.clock import ManualClock
from agent_program.errors import StoreUnavailable
from agent_program.ids import ToolKey
from agent_program.tool_events import LatencySample, SampleSource, ToolOutcome
from support.redis_server import SERVERS, RedisServer
from tool_runtime.history import HistoryLimits, LatencyHistory, MemoryHistory
from tool_runtime.latency import QUANTILES_MAX, LatencySnapshot
from tool_runtime.redis_history import RedisHistory

MakeHistory = Callable[..., LatencyHistory]
CLOCK = ManualClock(wall_s=1_000_000.0)


@pytest.fixture(params=["memory", *SERVERS])
def backing(request: pytest.FixtureRequest) -> Iterator[RedisServer | None]:
    if request.param == "memory":
        yield None
        return
    with RedisServer(SERVERS[request.param]()) as server:
        yield server


@pytest.fixture
async def make_history(backing: RedisServer | None) -> AsyncIterator[MakeHistory]:
    made: list[LatencyHistory] = []

    def make(limits: HistoryLimits | None = None) -> LatencyHistory:
        history = MemoryHistory(limits, CLOCK) if backing is None else RedisHistory(backing.url, limits, CLOCK)
        made.append(history)
        return history

    yield make
    for history in made:
        await history.close()


def sample(tool: str, duration_s: float, outcome: ToolOutcome = ToolOutcome.OK, age_s: float = 0.0) -> LatencySample:
    return LatencySample(
        tool=ToolKey(tool),
        duration_s=duration_s,
        outcome=outcome,
        source=SampleSource.TOOL_RUNTIME,
        at_wall_s=CLOCK.wall_s() - age_s,
    )


async def test_an_empty_history_knows_nothing(make_history: MakeHistory) -> None:
    assert await make_history().snapshot() == LatencySnapshot()


async def test_samples_are_kept_per_tool_and_over_all_tools(make_history: MakeHistory) -> None:
    history = make_history()
    await history.add([sample("git", 0.5), sample("pytest", 30.0), sample("git", 0.25)])
    snapshot = await history.snapshot()
    assert snapshot.tools[ToolKey("git")].quantiles == (0.25, 0.5)
    assert snapshot.tools[ToolKey("pytest")].quantiles == (30.0,)
    assert snapshot.global_.quantiles == (0.25, 0.5, 30.0)
    assert snapshot.global_.count == 3


async def test_timeouts_and_cancellations_are_lower_bounds_and_errors_are_durations(make_history: MakeHistory) -> None:
    history = make_history()
    await history.add([sample("x", float(i), outcome) for i, outcome in enumerate(ToolOutcome, start=1)])
    latency = (await history.snapshot()).tools[ToolKey("x")]
    assert latency.quantiles == (1.0, 2.0)  # ok, error
    assert latency.censored_quantiles == (3.0, 4.0, 5.0)  # timeout, cancelled, interrupted
    assert (latency.count, latency.censored_count) == (2, 3)


async def test_the_version_grows_with_every_batch_and_only_then(make_history: MakeHistory) -> None:
    history = make_history()
    versions = [(await history.snapshot()).version]
    for _ in range(2):
        await history.add([sample("a", 1.0)])
        versions.append((await history.snapshot()).version)
    await history.add([])
    versions.append((await history.snapshot()).version)
    assert versions == [0, 1, 2, 2]


async def test_a_window_keeps_the_latest_samples(make_history: MakeHistory) -> None:
    history = make_history(HistoryLimits(window_samples_max=3, global_samples_max=4))
    for batch in ([1.0, 2.0], [3.0], [4.0, 5.0]):
        await history.add([sample("a", duration_s) for duration_s in batch])
    snapshot = await history.snapshot()
    assert snapshot.tools[ToolKey("a")].quantiles == (3.0, 4.0, 5.0)
    assert snapshot.global_.quantiles == (2.0, 3.0, 4.0, 5.0)


async def test_of_too_many_tools_the_one_written_longest_ago_is_forgotten(make_history: MakeHistory) -> None:
    history = make_history(HistoryLimits(keys_max=2))
    await history.add([sample("a", 1.0)])
    await history.add([sample("b", 1.0)])
    await history.add([sample("a", 2.0)])
    await history.add([sample("c", 1.0)])
    assert set((await history.snapshot()).tools) == {"a", "c"}
    # What comes back later starts from nothing.
    await history.add([sample("b", 9.0)])
    assert (await history.snapshot()).tools[ToolKey("b")].quantiles == (9.0,)


async def test_large_windows_are_told_in_a_bounded_number_of_quantiles(make_history: MakeHistory) -> None:
    history = make_history(HistoryLimits(window_samples_max=2000))
    await history.add([sample("a", float(i)) for i in range(1, 1001)])
    latency = (await history.snapshot()).tools[ToolKey("a")]
    assert latency.count == 1000
    assert len(latency.quantiles) == QUANTILES_MAX
    assert latency.quantile(0.5) == pytest.approx(500, abs=4)
    assert latency.quantile(0.99) == pytest.approx(990, abs=4)


async def test_old_samples_weigh_less_when_asked(make_history: MakeHistory) -> None:
    history = make_history(HistoryLimits(half_life_s=60.0))
    await history.add([sample("a", 100.0, age_s=600.0)] * 50 + [sample("a", 1.0)] * 50)
    latency = (await history.snapshot()).tools[ToolKey("a")]
    assert latency.quantile(0.95) == 1.0  # 50 old samples weigh 50 / 2^10 together
    assert latency.count == 100


class TestRedisOnly:
    """What only a shared store can do, or fail at."""

    @pytest.fixture(params=SERVERS)
    def backing(self, request: pytest.FixtureRequest) -> Iterator[RedisServer]:
        with RedisServer(SERVERS[request.param]()) as server:
            yield server

    @pytest.fixture
    def server(self, backing: RedisServer) -> RedisServer:
        return backing

    async def test_writers_and_readers_share_it(self, server: RedisServer, make_history: MakeHistory) -> None:
        writers, reader = [make_history(), make_history()], make_history()
        for round_ in range(3):
            for writer in writers:
                await writer.add([sample("a", float(round_))])
            assert (await reader.snapshot()).tools[ToolKey("a")].count == 2 * (round_ + 1)

    async def test_samples_outlive_the_process_that_wrote_them(
        self, server: RedisServer, make_history: MakeHistory
    ) -> None:
        first = make_history()
        await first.add([sample("a", 1.0)])
        await first.close()
        assert (await make_history().snapshot()).tools[ToolKey("a")].quantiles == (1.0,)

    async def test_a_store_that_is_away_is_said_to_be_and_comes_back(
        self, server: RedisServer, make_history: MakeHistory
    ) -> None:
        history = make_history()
        await history.add([sample("a", 1.0)])
        server.kill()
        with pytest.raises(StoreUnavailable):
            await history.add([sample("a", 2.0)])
        with pytest.raises(StoreUnavailable):
            await history.snapshot()
        server.start()
        await history.add([sample("a", 3.0)])
        assert (await history.snapshot()).tools[ToolKey("a")].quantiles == (3.0,)

    async def test_a_store_that_lost_its_data_is_believed(self, server: RedisServer, make_history: MakeHistory) -> None:
        reader, writer = make_history(), make_history()
        for _ in range(3):
            await writer.add([sample("a", 1.0)])
        assert (await reader.snapshot()).version == 3
        with server.client() as client:
            client.flushall()
        await writer.add([sample("b", 5.0)])
        assert set((await reader.snapshot()).tools) == {"b"}

    async def test_a_store_that_lost_its_data_and_went_on_is_believed_too(
        self, server: RedisServer, make_history: MakeHistory
    ) -> None:
        """Its version may have passed the one that was seen before, and a window may be there under the same name."""
        reader, writer = make_history(), make_history()
        await writer.add([sample("a", 1.0), sample("b", 1.0)])
        assert (await reader.snapshot()).version == 1
        with server.client() as client:
            client.flushall()
        await writer.add([sample("a", 7.0)])
        await writer.add([sample("c", 8.0)])
        snapshot = await reader.snapshot()
        assert {key: latency.quantiles for key, latency in snapshot.tools.items()} == {"a": (7.0,), "c": (8.0,)}
        assert snapshot.global_.quantiles == (7.0, 8.0)

    async def test_what_cannot_be_read_is_left_out(self, server: RedisServer, make_history: MakeHistory) -> None:
        history = make_history()
        await history.add([sample("a", 1.0)])
        with server.client() as client:
            client.lpush("continuum:{latency}:window:a", "nonsense", "nan:ok:tool_runtime:1", "2.0:ok:tool_runtime:1")
            client.lpush("continuum:{latency}:global", "nonsense", ":::::")
        assert (await make_history().snapshot()).tools[ToolKey("a")].quantiles == (1.0, 2.0)

    async def test_only_bounded_lists_are_left_in_the_store(
        self, server: RedisServer, make_history: MakeHistory
    ) -> None:
        history = make_history(HistoryLimits(window_samples_max=5, global_samples_max=7, keys_max=3))
        for i in range(20):
            await history.add([sample(f"tool{i}", 1.0)] * 10)
        with server.client() as client:
            windows = list(client.scan_iter("continuum:{latency}:window:*"))
            assert len(windows) == 3
            assert all(client.llen(window) == 5 for window in windows)
            assert client.llen("continuum:{latency}:global") == 7
            assert client.zcard("continuum:{latency}:keys") == 3
