"""Samples reach the history in batches, wait while it is away, and never trouble the tool call that made them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from agent_program.errors import StoreUnavailable
from agent_program.ids import ToolKey
from agent_program.tool_events import LatencySample, SampleSource, ToolOutcome
from tool_runtime.history import MemoryHistory
from tool_runtime.history_writer import HistoryWriter


class AwayHistory(MemoryHistory):
    """A history that can be away."""

    def __init__(self) -> None:
        super().__init__()
        self.is_away = False
        self.batches: list[list[float]] = []
        self.written = asyncio.Event()

    async def add(self, samples: Sequence[LatencySample]) -> None:
        if self.is_away:
            raise StoreUnavailable
        self.batches.append([sample.duration_s for sample in samples])
        await super().add(samples)
        self.written.set()


def sample(duration_s: float) -> LatencySample:
    return LatencySample(
        tool=ToolKey("x"),
        duration_s=duration_s,
        outcome=ToolOutcome.OK,
        source=SampleSource.TOOL_RUNTIME,
        at_wall_s=0.0,
    )


def writer_of(history: AwayHistory, *, interval_s: float = 1000.0, buffered: int = 5) -> HistoryWriter:
    return HistoryWriter(history, flush_interval_s=interval_s, buffered_samples_max=buffered)


async def test_samples_are_written_together() -> None:
    history = AwayHistory()
    writer = writer_of(history)
    for i in range(3):
        writer.record(sample(float(i)))
    assert history.batches == []
    await writer.close()
    assert history.batches == [[0.0, 1.0, 2.0]]


async def test_samples_are_written_after_the_interval_without_being_asked() -> None:
    history = AwayHistory()
    writer = writer_of(history, interval_s=0.001)
    writer.record(sample(1.0))
    async with asyncio.timeout(30):
        await history.written.wait()
    await writer.close()


async def test_while_the_store_is_away_samples_wait_in_order_and_the_oldest_is_dropped_and_counted() -> None:
    history = AwayHistory()
    history.is_away = True
    writer = writer_of(history, buffered=5)
    for i in range(4):
        writer.record(sample(float(i)))
    assert not await writer.flush()
    assert not writer.is_store_reachable
    for i in range(4, 7):
        writer.record(sample(float(i)))
    assert (writer.buffered, writer.dropped) == (5, 2)
    history.is_away = False
    assert await writer.flush()
    assert writer.is_store_reachable
    assert history.batches == [[2.0, 3.0, 4.0, 5.0, 6.0]]
    await writer.close()


async def test_samples_that_come_while_a_write_fails_push_out_the_oldest() -> None:
    history = AwayHistory()
    writer = writer_of(history, buffered=3)
    for i in range(3):
        writer.record(sample(float(i)))

    class Filling(AwayHistory):
        async def add(self, samples: Sequence[LatencySample]) -> None:
            for i in range(3, 5):
                writer.record(sample(float(i)))
            raise StoreUnavailable

    writer._history = Filling()
    assert not await writer.flush()
    assert (writer.buffered, writer.dropped) == (3, 2)
    writer._history = history
    await writer.flush()
    assert history.batches == [[2.0, 3.0, 4.0]]
    await writer.close()


async def test_closing_without_the_store_loses_what_is_left_and_does_not_hang() -> None:
    history = AwayHistory()
    history.is_away = True
    writer = writer_of(history)
    writer.record(sample(1.0))
    await writer.close()
    assert writer.buffered == 1


class StuckHistory(MemoryHistory):
    """A store that takes a batch and never answers."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    async def add(self, samples: Sequence[LatencySample]) -> None:
        self.asked += 1
        await asyncio.Event().wait()


async def test_recording_never_waits_for_the_store_however_much_there_is_and_however_stuck_it_is() -> None:
    history = StuckHistory()
    writer = HistoryWriter(history, flush_interval_s=0.0, buffered_samples_max=1000)
    writer.record(sample(0.0))
    for _ in range(100):  # the writer is in the middle of a write by now
        await asyncio.sleep(0)
    assert history.asked == 1
    # Not a coroutine: 10,000 samples are taken without the event loop getting a turn, the newest of them kept.
    for number in range(10_000):
        writer.record(sample(float(number)))
    assert history.asked == 1
    assert (writer.buffered, writer.dropped) == (1000, 9000)
    assert writer._task is not None
    writer._task.cancel()


async def test_ten_thousand_samples_reach_the_store_in_few_batches() -> None:
    history = AwayHistory()
    writer = HistoryWriter(history, flush_interval_s=1000.0, buffered_samples_max=10_000)
    for number in range(10_000):
        writer.record(sample(float(number)))
    assert await writer.flush()
    assert [len(batch) for batch in history.batches] == [1000] * 10
    assert writer.dropped == 0
    await writer.close()
