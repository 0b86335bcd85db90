"""A call's progress reaches whoever waits: the latest word, never backwards, and not more often than is useful."""

from __future__ import annotations

import asyncio

from agent_program.ids import ToolKey
from tool_runtime.progress import ProgressFeed
from tool_runtime.tool_call import ToolProgress


async def told(feed: ProgressFeed, running: asyncio.Task[None]) -> list[float]:
    return [update.progress async for update in feed.until(running)]


async def test_many_words_in_one_interval_are_the_first_and_the_last() -> None:
    feed = ProgressFeed(interval_s=1000.0)

    async def tool() -> None:
        await feed.report(1.0)
        await asyncio.sleep(0.01)
        for number in range(2, 100):
            await feed.report(float(number))

    running = asyncio.create_task(tool())
    assert await told(feed, running) == [1.0]  # what came within the interval ends with the call
    frequent = ProgressFeed(interval_s=0.0)
    await frequent.report(1.0)
    await frequent.report(2.0)
    assert await told(frequent, asyncio.create_task(asyncio.sleep(0.05))) == [2.0]


async def test_what_goes_backwards_or_is_no_number_is_left_out() -> None:
    feed = ProgressFeed(interval_s=0.0)
    for progress in (3.0, 2.0, float("nan")):
        await feed.report(progress, 4.0, "x" * 10_000)
    assert feed._latest is not None
    assert (feed._latest.progress, len(feed._latest.message or "")) == (3.0, 500)


async def test_a_call_that_says_nothing_has_no_progress() -> None:
    assert await told(ProgressFeed(), asyncio.create_task(asyncio.sleep(0))) == []


def test_the_fraction_is_known_where_the_total_is() -> None:
    def fraction(progress: float, total: float | None) -> float | None:
        return ToolProgress(call_id="c", tool_key=ToolKey("t"), progress=progress, total=total).fraction

    assert [fraction(1, 4), fraction(5, 4), fraction(1, None), fraction(1, 0), fraction(1, -2)] == [
        0.25,
        1.0,
        None,
        None,
        None,
    ]
