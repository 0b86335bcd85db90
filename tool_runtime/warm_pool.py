"""Sandboxes that are ready before anybody asks: a new program takes one in the time of a rename.

A parked sandbox has a workspace of its own, empty and under no program's name, and has run nothing. When a program takes it,
the workspace gets the program's name; the mount inside follows, for it is of the directory and not of its name. It is never
put back: a program's sandbox is used by that program alone. A program that has a workspace already starts a sandbox anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path

from agent_program.errors import SandboxUnavailable
from agent_program.ids import ProgramId, TenantId
from tool_runtime.live_sandbox import LiveSandbox
from tool_runtime.workspaces import Workspaces

_LOG = logging.getLogger(__name__)
_AFTER_FAULT_S = 5.0


class WarmPool:
    """A few parked sandboxes, made again one at a time as they are taken."""

    def __init__(
        self, start: Callable[[Path, int | None], Awaitable[LiveSandbox]], workspaces: Workspaces, size: int
    ) -> None:
        """`start` makes a sandbox for a workspace and a user. Nothing is started before `fill`."""
        self._start = start
        self._workspaces = workspaces
        self._size = size
        self._parked: deque[tuple[LiveSandbox, Path]] = deque()
        self._filling: asyncio.Task[None] | None = None
        self.claimed = 0

    def __len__(self) -> int:
        return len(self._parked)

    def claim(self, tenant_id: TenantId, program_id: ProgramId) -> LiveSandbox | None:
        """A parked sandbox, from now on the program's; None if there is none, or the program has files already."""
        if self._workspaces.path(tenant_id, program_id).exists():
            return None
        while self._parked:
            sandbox, workspace = self._parked.popleft()
            self.fill()
            if sandbox.is_alive:
                self._workspaces.adopt(workspace, tenant_id, program_id)
                self.claimed += 1
                return sandbox
            _LOG.warning("a parked sandbox died: %s", sandbox.death_reason)
            self._workspaces.discard(workspace)
        return None

    def fill(self) -> None:
        """Have sandboxes made until there are enough; returns at once."""
        if self._size and (self._filling is None or self._filling.done()):
            self._filling = asyncio.create_task(self._fill())

    async def close(self) -> None:
        """End every parked sandbox and remove what it had."""
        if self._filling is not None:
            self._filling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._filling
        while self._parked:
            sandbox, workspace = self._parked.popleft()
            await sandbox.close()
            await asyncio.to_thread(self._workspaces.discard, workspace)

    async def _fill(self) -> None:
        while len(self._parked) < self._size:
            try:
                await self._park_one()
            except SandboxUnavailable as exc:
                _LOG.warning("no sandbox can be parked now: %s", exc.message)
                await asyncio.sleep(_AFTER_FAULT_S)

    async def _park_one(self) -> None:
        workspace, uid = self._workspaces.park()
        try:
            self._parked.append((await self._start(workspace, uid), workspace))
        except BaseException:
            self._workspaces.discard(workspace)
            raise
