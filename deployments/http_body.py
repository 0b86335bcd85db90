"""Reading a request's JSON body: bounded in bytes and in time, and never trusted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from typing import Any

from starlette.requests import ClientDisconnect, Request

from agent_program.errors import InvalidRequest, RequestTooLarge

#: Far more than any conversation or tool schema has.
NESTING_MAX = 100


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
        body = json.loads(raw, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    if _is_deeper(body, NESTING_MAX):
        raise InvalidRequest(f"the body is nested more than {NESTING_MAX} levels deep")
    if b"\\ud" in raw.lower() and not _is_unicode(body):
        raise InvalidRequest("the body holds half of a surrogate pair, which is no character")
    return body


async def _read(request: Request, bytes_max: int) -> bytes:
    parts, length = [], 0
    async for part in request.stream():
        length += len(part)
        if length > bytes_max:
            raise _too_large(bytes_max)
        parts.append(part)
    return b"".join(parts)


def _is_deeper(value: Any, levels: int) -> bool:
    """Containers nested more than `levels` deep. What copies and stores a body recurses, and must not meet its limit."""
    front = [value]
    for _ in range(levels):
        front = [child for node in front for child in _children(node)]
        if not front:
            return False
    return any(isinstance(node, (dict, list)) for node in front)


def _children(node: Any) -> Iterable[Any]:
    children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return (child for child in children if isinstance(child, (dict, list)))


def _is_unicode(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _too_large(bytes_max: int) -> RequestTooLarge:
    return RequestTooLarge(f"the body is larger than {bytes_max} bytes")


def _no_constant(name: str) -> Any:
    # Python reads NaN and Infinity; JSON has neither, and the engine's own parser refuses them later and less clearly.
    raise ValueError(f"{name} is not JSON")
