"""Workspaces of sandboxes that run elsewhere: copied in when one starts, and out when it rests, closes or is asked for its files.

The copy on this side is what snapshots, exports and the next sandbox are made of. What comes out is an archive that a program may
have made, and is read like any stranger's (`tar_reader.py`); it takes the old copy's place in one step, or not at all.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator
from contextlib import aclosing, suppress
from pathlib import Path
from typing import BinaryIO, TypeVar

from agent_program.errors import SandboxUnavailable
from agent_program.ids import ProgramId, TenantId
from tool_runtime.config import SandboxLimits
from tool_runtime.spawning import RemoteFiles, Spawned
from tool_runtime.tar_reader import TarLimits
from tool_runtime.tar_writer import tar_of
from tool_runtime.trees import delete_tree
from tool_runtime.unpacking import unpack
from tool_runtime.workspace_content import WorkspaceContent
from tool_runtime.workspace_errors import WorkspaceTooLarge
from tool_runtime.workspaces import Workspaces

_COPY_S = 300.0
T = TypeVar("T")


class WorkspaceCopies:
    """Copies of the workspaces that sandboxes elsewhere have."""

    def __init__(self, files: RemoteFiles, workspaces: Workspaces, limits: SandboxLimits) -> None:
        self._files = files
        self._workspaces = workspaces
        self._limits = limits

    async def copy_in(self, child: Spawned, workspace: Path) -> None:
        """Give a sandbox that was just started what the workspace holds.

        Raises:
            SandboxUnavailable: it cannot be done; the sandbox is of no use.
        """
        limits = self._limits
        pieces = tar_of(workspace, bytes_max=limits.workspace_bytes_max, files_max=limits.workspace_files_max)
        if await in_thread(_holds_something, workspace):
            try:
                async with asyncio.timeout(_COPY_S), aclosing(_in_pieces(pieces)) as archive:
                    await self._files.copy_in(child, archive)
            except WorkspaceTooLarge as exc:
                raise SandboxUnavailable(f"the workspace cannot be copied in: {exc.message}") from exc
            except TimeoutError as exc:
                raise SandboxUnavailable(f"the workspace was not copied in within {_COPY_S:g} s") from exc

    async def copy_out(self, child: Spawned, tenant_id: TenantId, program_id: ProgramId) -> WorkspaceContent:
        """Make what the sandbox has the program's workspace.

        Raises:
            SandboxUnavailable: it cannot be had; the workspace is as it was. So it is after the others:
            WorkspaceTooLarge: it is more than a workspace may hold.
            ArchiveRefused: it is no archive of a workspace.
        """
        limits = workspace_tar_limits(self._limits, keeps_all_symlinks=True)
        arriving = self._workspaces.uploads / secrets.token_hex(16)
        try:
            with arriving.open("xb") as file:
                async with asyncio.timeout(_COPY_S), aclosing(self._files.copy_out(child)) as pieces:
                    await self._received(pieces, file, limits.archive_bytes_max)
            return await in_thread(unpack_into_place, self._workspaces, tenant_id, program_id, arriving, limits)
        except TimeoutError as exc:
            raise SandboxUnavailable(f"the workspace was not copied out within {_COPY_S:g} s") from exc
        finally:
            arriving.unlink(missing_ok=True)

    async def _received(self, pieces: AsyncIterator[bytes], file: BinaryIO, bytes_max: int) -> None:
        size = 0
        async for piece in pieces:
            size += len(piece)
            if size > bytes_max:
                raise WorkspaceTooLarge("the workspace holds more than a workspace may")
            await in_thread(file.write, piece)


def unpack_into_place(
    workspaces: Workspaces, tenant_id: TenantId, program_id: ProgramId, archive: Path, limits: TarLimits
) -> WorkspaceContent:
    """Make the content of an archive the program's workspace.

    Raises:
        ArchiveRefused, WorkspaceTooLarge: it may not be; the workspace is as it was.
    """
    uid = workspaces.uid(tenant_id, program_id)
    made = workspaces.uploads / f"{secrets.token_hex(16)}.content"
    made.mkdir(mode=0o700)
    try:
        with archive.open("rb") as file:
            content = unpack(file.read, made, limits, uid=uid)
        if uid is not None:
            os.chown(made, uid, uid)
        made.chmod(0o700)
        workspaces.replace(tenant_id, program_id, made)
    finally:
        with suppress(FileNotFoundError):  # as it is when it took its place
            delete_tree(made)
    return content


def workspace_tar_limits(limits: SandboxLimits, *, keeps_all_symlinks: bool = False) -> TarLimits:
    """What an archive of a workspace may come to."""
    return TarLimits(
        bytes_max=limits.workspace_bytes_max,
        entries_max=limits.workspace_files_max,
        keeps_all_symlinks=keeps_all_symlinks,
    )


async def in_thread(function: Callable[..., T], *arguments: object) -> T:
    """Run it in a thread, to its end also when the caller is cancelled: nothing that it works on is taken away meanwhile."""
    running = asyncio.ensure_future(asyncio.to_thread(function, *arguments))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait({running})
        raise


def _holds_something(directory: Path) -> bool:
    with os.scandir(directory) as entries:
        return next(entries, None) is not None


async def _in_pieces(pieces: Generator[bytes, None, None]) -> AsyncGenerator[bytes, None]:
    """What a generator gives, which runs in threads."""
    try:
        while piece := await in_thread(next, pieces, b""):
            yield piece
    finally:
        await in_thread(pieces.close)
