"""Reading a request's JSON body: bounded in bytes and in time, and never trusted."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.requests import ClientDisconnect, Request

from agent_program.errors import InvalidRequest, RequestTooLarge


async def read_json(request: Request, *, bytes_max: int, timeout_s: float) -> Any:
    """The body as JSON.

    Raises:
        RequestTooLarge: longer than `bytes_max`, as its Content-Length says or as it turns out.
        InvalidRequest: not JSON, or not there within `timeout_s`.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > bytes_max:
        raise _too_large(bytes_max)
    try:
        async with asyncio.timeout(timeout_s):
            raw = await _read(request, bytes_max)
    except TimeoutError:
        raise InvalidRequest(f"the body did not arrive within {timeout_s:g} s") from None
    except ClientDisconnect:
        raise InvalidRequest("the client went away before its request was complete") from None
    try:
        return json.loads(raw, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None


async def _read(request: Request, bytes_max: int) -> bytes:
    parts, length = [], 0
    async for part in request.stream():
        length += len(part)
        if length > bytes_max:
            raise _too_large(bytes_max)
        parts.append(part)
    return b"".join(parts)


def _too_large(bytes_max: int) -> RequestTooLarge:
    return RequestTooLarge(f"the body is larger than {bytes_max} bytes")


def _no_constant(name: str) -> Any:
    # Python reads NaN and Infinity; JSON has neither, and the engine's own parser refuses them later and less clearly.
    raise ValueError(f"{name} is not JSON")
