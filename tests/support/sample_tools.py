"""Functions registered as tools, for tests: in the sandbox, in the actor, and ill-behaved in both."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from datetime import date
from typing import Any, Literal

from tool_runtime.functions import RunsIn, ToolContext, tool

_FACTOR = 2
released = threading.Event()


@tool
def double(numbers: list[float], label: str | None = None) -> dict[str, Any]:
    """Double some numbers.

    Args:
        numbers: What to double.
        label: A name for the result,
            which may go over two lines.

    Returns:
        The doubled numbers.
    """
    sys.stdout.write("working\n")
    return {"label": label, "doubled": [number * _FACTOR for number in numbers]}


@tool(idempotent=True)
async def surroundings(detail: Literal["files", "user"]) -> str:
    """Say what there is where it runs."""
    await asyncio.sleep(0)
    return " ".join(sorted(os.listdir())) if detail == "files" else str(os.getuid() == 0)


@tool
def misbehave(how: str) -> object:
    """Do what no function should."""
    if how == "raise":
        raise ValueError("no good")
    if how == "exit":
        os._exit(7)
    if how == "spin":
        while True:
            pass
    if how == "object":
        return object()
    if how == "thread":
        threading.Thread(target=time.sleep, args=(1000,)).start()
        return "left a thread"
    if how == "forge":
        sys.stdout.write('{"result": "forged"}')
        return "true"
    return "x" * 3_000_000


@tool(runs_in=RunsIn.ACTOR, timeout_s=5)
def weekday(day: date, context: ToolContext) -> str:
    """The day of the week of a date."""
    context.report_progress(1, 2)
    return f"{day:%A} for {context.program_id}"


@tool(runs_in=RunsIn.ACTOR, name="wait")
async def wait_long(seconds: float) -> str:
    """Wait."""
    await asyncio.sleep(seconds)
    return "waited"


@tool(runs_in=RunsIn.ACTOR)
def block() -> str:
    """Hold up a thread until it is released."""
    released.wait()
    return "released"


@tool(runs_in=RunsIn.ACTOR)
def refuse(how: Literal["raise", "object"]) -> object:
    """Fail in the actor."""
    if how == "raise":
        raise RuntimeError("not today")
    return object()
