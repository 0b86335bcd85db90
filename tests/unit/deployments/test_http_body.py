"""A request's body: bounded in bytes and in time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.requests import Request

from agent_program.errors import InvalidRequest, RequestTooLarge
from deployments.http_body import NESTING_MAX, read_json


def request(
    *parts: bytes, headers: dict[str, str] | None = None, stalls: bool = False, leaves: bool = False
) -> Request:
    """A request whose body comes in parts, and then stalls or breaks off where it is told to."""
    events: list[dict[str, Any]] = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    events.append({"type": "http.disconnect"} if leaves else {"type": "http.request", "body": b"", "more_body": False})

    async def receive() -> dict[str, Any]:
        if stalls and len(events) == 1:
            await asyncio.Event().wait()
        return events.pop(0)

    raw = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
    return Request({"type": "http", "method": "POST", "path": "/", "headers": raw}, receive)


async def test_a_body_in_parts_is_one_document() -> None:
    assert await read_json(request(b'{"a"', b": 1}"), bytes_max=100, timeout_s=5) == {"a": 1}


async def test_a_body_that_says_it_is_too_large_is_not_read() -> None:
    unread = request(headers={"content-length": "101"}, stalls=True)
    with pytest.raises(RequestTooLarge):
        await read_json(unread, bytes_max=100, timeout_s=5)


async def test_a_body_that_turns_out_too_large_is_read_no_further() -> None:
    with pytest.raises(RequestTooLarge):
        await read_json(request(b"x" * 60, b"x" * 60, stalls=True), bytes_max=100, timeout_s=5)


async def test_a_body_that_does_not_come_is_given_up() -> None:
    with pytest.raises(InvalidRequest, match="did not arrive"):
        await read_json(request(b"{", stalls=True), bytes_max=100, timeout_s=0.01)


@pytest.mark.parametrize("depth", [NESTING_MAX + 1, 900])
async def test_a_body_that_is_nested_too_deep_is_refused(depth: int) -> None:
    for opening, closing in ((b"[", b"]"), (b'{"a":', b"}")):
        deep = opening * depth + b"1" + closing * depth
        with pytest.raises(InvalidRequest, match="nested"):
            await read_json(request(deep), bytes_max=100_000, timeout_s=5)


async def test_a_body_may_be_nested_as_deep_as_allowed() -> None:
    deep = b"[" * NESTING_MAX + b"1" + b"]" * NESTING_MAX
    assert await read_json(request(deep), bytes_max=100_000, timeout_s=5)


async def test_half_a_surrogate_pair_is_refused_and_a_whole_one_is_a_character() -> None:
    with pytest.raises(InvalidRequest, match="surrogate"):
        await read_json(request(b'{"a": "\\ud83d"}'), bytes_max=100, timeout_s=5)
    assert await read_json(request(b'{"a": "\\uD83D\\ude00"}'), bytes_max=100, timeout_s=5) == {"a": "\U0001f600"}


async def test_a_client_that_leaves_before_its_body_is_complete_starts_nothing() -> None:
    with pytest.raises(InvalidRequest, match="went away"):
        await read_json(request(b"{", leaves=True), bytes_max=100, timeout_s=5)
