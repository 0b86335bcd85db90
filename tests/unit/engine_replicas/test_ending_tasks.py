"""Tasks that are told to end, and told again."""

import asyncio

import pytest

replica = pytest.importorskip("engine_replicas.replica")


async def test_a_task_that_swallows_its_cancellation_is_cancelled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica, "_CLOSE_S", 0.05)
    swallowed = 0

    async def deaf() -> None:
        nonlocal swallowed
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                swallowed += 1
                if swallowed == 2:
                    raise

    task = asyncio.create_task(deaf())
    await asyncio.sleep(0)
    await replica._end({task})
    assert task.cancelled()
    assert swallowed == 2
