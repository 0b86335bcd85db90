"""Waiting for a lock, a slot or a task that one may stop waiting for."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any


class CancelledInQueue(Exception):
    """The call was cancelled while it waited."""


async def acquire_unless(cancelled: asyncio.Event, lock: asyncio.Lock | asyncio.Semaphore) -> None:
    """Acquire `lock`, which is then the caller's to release.

    Raises:
        CancelledInQueue: `cancelled` was set first; the lock is not held.
    """
    acquiring, waiting = asyncio.create_task(lock.acquire()), asyncio.create_task(cancelled.wait())
    try:
        await asyncio.wait({acquiring, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if cancelled.is_set():
            raise CancelledInQueue
    except BaseException:
        await _give_back(acquiring, lock)
        raise
    finally:
        waiting.cancel()


async def wait_unless(cancelled: asyncio.Event | None, task: asyncio.Task[Any], *, timeout_s: float) -> None:
    """Wait until `task` is done, `cancelled` is set or the time is up, whichever comes first; the task goes on."""
    waiting = asyncio.create_task((cancelled or asyncio.Event()).wait())
    try:
        await asyncio.wait({task, waiting}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()


async def _give_back(acquiring: asyncio.Task[bool], lock: asyncio.Lock | asyncio.Semaphore) -> None:
    acquiring.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        if await acquiring:
            lock.release()
