"""One actor per module for attacks on the sandbox; each test is a program of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from support.tools import Program, tool_actor
from tool_runtime.actor import ToolActor
from tool_runtime.config import SandboxBackend


@pytest.fixture(
    scope="module", params=[SandboxBackend.BUBBLEWRAP, SandboxBackend.LANDLOCK], ids=lambda backend: backend.value
)
def backend(request: pytest.FixtureRequest) -> SandboxBackend:
    return request.param


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandbox_actor(backend: SandboxBackend) -> AsyncIterator[ToolActor]:
    async with tool_actor(sandbox=backend, interrupt_grace_s=0.2) as actor:
        yield actor


@pytest.fixture
def program(sandbox_actor: ToolActor) -> Program:
    return Program(sandbox_actor)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def standing_program(sandbox_actor: ToolActor) -> Program:
    """One program for all attacks of a kind that change nothing where they fail; that its sandbox goes on working is asked after each."""
    return Program(sandbox_actor)


@pytest.fixture
def neighbour(sandbox_actor: ToolActor) -> Program:
    """Another program on the same actor."""
    return Program(sandbox_actor)
