"""Waiting for a condition, with a deadline that a busy machine does not reach."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

_T = TypeVar("_T")
DEADLINE_S = 60.0


def wait_for(condition: Callable[[], _T], *, what: str, deadline_s: float = DEADLINE_S) -> _T:
    """Return the first truthy value of `condition`; fails, naming `what`, when there is none in time."""
    ends_s = time.monotonic() + deadline_s
    while not (value := condition()):
        if time.monotonic() > ends_s:
            raise AssertionError(f"waited {deadline_s:.0f} s in vain: {what}")
        time.sleep(0.05)
    return value


async def wait_for_async(condition: Callable[[], Awaitable[_T]], *, what: str, deadline_s: float = DEADLINE_S) -> _T:
    """`wait_for` with a condition that is awaited."""
    ends_s = time.monotonic() + deadline_s
    while not (value := await condition()):
        if time.monotonic() > ends_s:
            raise AssertionError(f"waited {deadline_s:.0f} s in vain: {what}")
        await asyncio.sleep(0.05)
    return value
