"""The journals that the journal's contract is run over."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from agent_program.clock import ManualClock, SystemClock
from deployments.memory_journal import MemoryJournal
from deployments.redis_journal import RedisJournal
from support.journals import World
from support.redis_server import SERVERS, RedisServer


@pytest.fixture(scope="module", params=["memory", *SERVERS])
def journal_server(request: pytest.FixtureRequest) -> Iterator[RedisServer | None]:
    if request.param == "memory":
        yield None
        return
    with RedisServer(SERVERS[request.param]()) as running:
        yield running


@pytest.fixture
async def world(journal_server: RedisServer | None) -> AsyncIterator[World]:
    if journal_server is None:
        clock = ManualClock()
        yield World(MemoryJournal(clock), clock)
        return
    journal = RedisJournal(journal_server.url, SystemClock())
    await journal._client.flushall()
    yield World(journal, SystemClock())
    await journal.close()
