"""Workspaces moved in and out as archives: export, import, snapshot, restore.

    <state_dir>/uploads/<id>              an archive that is arriving; then `<id>.content`, what is unpacked of it
    <state_dir>/snapshots/<workspace>/<id>.tar

What comes in is unpacked beside the workspace and takes its place in one step, or is refused and changes nothing. Meanwhile the
program has no sandbox, and calls that come wait. A sandbox that it had is closed first: processes in it would go on in files that
are gone.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import AsyncIterator, Generator
from pathlib import Path

from agent_program.clock import Clock
from agent_program.errors import Overloaded
from agent_program.ids import ProgramId, TenantId
from tool_runtime.config import ToolRuntimeSettings
from tool_runtime.program_sandboxes import ProgramSandboxes
from tool_runtime.tar_writer import tar_of
from tool_runtime.workspace_content import WorkspaceContent
from tool_runtime.workspace_copies import in_thread, unpack_into_place, workspace_tar_limits
from tool_runtime.workspace_errors import SnapshotNotFound, UploadNotFound, WorkspaceNotFound, WorkspaceTooLarge
from tool_runtime.workspaces import Workspaces

_UPLOADS_MAX = 16
_UPLOAD_STALLS_S = 60.0
_RETRY_AFTER_S = 10.0
_SNAPSHOT_ID = re.compile(r"[0-9a-f]{32}\Z")
Key = tuple[TenantId, ProgramId]


class _Upload:
    """An archive that is arriving."""

    def __init__(self, owner: Key, path: Path, now_s: float) -> None:
        self.owner = owner
        self.path = path
        self.bytes = 0
        self.touched_s = now_s


class WorkspaceTransfers:
    """Moves the workspaces of one tool actor's programs."""

    def __init__(
        self, settings: ToolRuntimeSettings, workspaces: Workspaces, sandboxes: ProgramSandboxes, clock: Clock
    ) -> None:
        self._limits = settings.limits
        self._snapshots_max = settings.workspace_snapshots_max
        self._workspaces = workspaces
        self._sandboxes = sandboxes
        self._clock = clock
        self._uploads: dict[str, _Upload] = {}

    # Out

    async def export(self, tenant_id: TenantId, program_id: ProgramId) -> AsyncIterator[bytes]:
        """The workspace as a tar, in pieces.

        Raises:
            WorkspaceNotFound: before the first piece; there is none.
            WorkspaceTooLarge: meanwhile; what came is not a whole archive.
        """
        await self._sandboxes.fetch_files(tenant_id, program_id)
        pieces = self._archive(tenant_id, program_id)
        try:
            while piece := await in_thread(next, pieces, b""):
                yield piece
        finally:
            await in_thread(pieces.close)

    async def snapshot(self, tenant_id: TenantId, program_id: ProgramId) -> str:
        """Keep the workspace as it is, under the id that is returned; of too many snapshots the oldest goes.

        Raises:
            WorkspaceNotFound, WorkspaceTooLarge.
            WorkspaceBusy: calls of the program are under way, so that there is no moment to keep.
        """
        async with self._sandboxes.at_rest(tenant_id, program_id, closes=False):
            return await in_thread(self._keep, tenant_id, program_id)

    # In

    async def restore(self, tenant_id: TenantId, program_id: ProgramId, snapshot_id: str) -> WorkspaceContent:
        """Make the workspace what it was.

        Raises:
            SnapshotNotFound: the program has none of this id.
            WorkspaceBusy: calls of the program are under way.
        """
        if not _SNAPSHOT_ID.match(snapshot_id):
            raise SnapshotNotFound
        path = self._snapshots(tenant_id, program_id) / f"{snapshot_id}.tar"
        if not path.exists():
            raise SnapshotNotFound
        return await self._replace(tenant_id, program_id, path, keeps_all_symlinks=True)

    async def begin(self, tenant_id: TenantId, program_id: ProgramId) -> str:
        """Begin an upload; returns its id.

        Raises:
            Overloaded: as many as may be are under way.
        """
        await self.drop_stalled()
        if len(self._uploads) >= _UPLOADS_MAX:
            raise Overloaded("too many workspaces are being uploaded", retry_after_s=_RETRY_AFTER_S)
        upload_id = secrets.token_hex(16)
        path = self._workspaces.uploads / upload_id
        self._uploads[upload_id] = _Upload((tenant_id, program_id), path, self._clock.now_s())
        await in_thread(path.touch, 0o600)
        return upload_id

    async def append(self, tenant_id: TenantId, program_id: ProgramId, upload_id: str, piece: bytes) -> int:
        """Add to an upload; returns its bytes so far.

        Raises:
            UploadNotFound: the program has none of this id.
            WorkspaceTooLarge: it is larger than any archive of a workspace; it is dropped.
        """
        upload = self._upload(tenant_id, program_id, upload_id)
        upload.bytes += len(piece)
        upload.touched_s = self._clock.now_s()
        if upload.bytes > workspace_tar_limits(self._limits).archive_bytes_max:
            await self._drop(upload_id)
            raise WorkspaceTooLarge("the archive is larger than a workspace may be")
        await in_thread(_append, upload.path, piece)
        return upload.bytes

    async def commit(self, tenant_id: TenantId, program_id: ProgramId, upload_id: str) -> WorkspaceContent:
        """Make the upload the program's workspace. Either way the upload is over.

        Raises:
            UploadNotFound, ArchiveRefused, WorkspaceTooLarge.
            WorkspaceBusy: calls of the program are under way.
        """
        upload = self._upload(tenant_id, program_id, upload_id)
        try:
            return await self._replace(tenant_id, program_id, upload.path, keeps_all_symlinks=False)
        finally:
            await self._drop(upload_id)

    async def take(
        self, tenant_id: TenantId, program_id: ProgramId, archive: AsyncIterator[bytes] | bytes
    ) -> WorkspaceContent:
        """Begin, append and commit in one."""
        upload_id = await self.begin(tenant_id, program_id)
        try:
            if isinstance(archive, bytes):
                await self.append(tenant_id, program_id, upload_id, archive)
            else:
                async for piece in archive:
                    await self.append(tenant_id, program_id, upload_id, piece)
        except BaseException:
            await self._drop(upload_id)
            raise
        return await self.commit(tenant_id, program_id, upload_id)

    async def drop_stalled(self) -> float:
        """Give up uploads of which nothing came for a while; returns the seconds until that should be looked at again."""
        now_s = self._clock.now_s()
        for upload_id, upload in list(self._uploads.items()):
            if now_s - upload.touched_s >= _UPLOAD_STALLS_S:
                await self._drop(upload_id)
        return _UPLOAD_STALLS_S

    async def _replace(
        self, tenant_id: TenantId, program_id: ProgramId, archive: Path, *, keeps_all_symlinks: bool
    ) -> WorkspaceContent:
        async with self._sandboxes.at_rest(tenant_id, program_id, closes=True):
            limits = workspace_tar_limits(self._limits, keeps_all_symlinks=keeps_all_symlinks)
            return await in_thread(unpack_into_place, self._workspaces, tenant_id, program_id, archive, limits)

    # In a thread

    def _archive(self, tenant_id: TenantId, program_id: ProgramId) -> Generator[bytes, None, None]:
        path = self._workspaces.path(tenant_id, program_id)
        pieces = tar_of(path, bytes_max=self._limits.workspace_bytes_max, files_max=self._limits.workspace_files_max)
        try:
            yield from pieces
        except FileNotFoundError as exc:
            raise WorkspaceNotFound from exc

    def _keep(self, tenant_id: TenantId, program_id: ProgramId) -> str:
        directory = self._snapshots(tenant_id, program_id)
        snapshot_id = secrets.token_hex(16)
        arriving = self._workspaces.uploads / snapshot_id
        try:
            with open(arriving, "xb", opener=_private) as file:
                for piece in self._archive(tenant_id, program_id):
                    file.write(piece)
            directory.mkdir(mode=0o700, exist_ok=True)
            kept = sorted(directory.iterdir(), key=lambda path: path.stat().st_mtime_ns)
            for surplus in kept[: max(0, len(kept) + 1 - self._snapshots_max)]:
                surplus.unlink()
            arriving.rename(directory / f"{snapshot_id}.tar")
        finally:
            arriving.unlink(missing_ok=True)
        return snapshot_id

    # Details

    def _upload(self, tenant_id: TenantId, program_id: ProgramId, upload_id: str) -> _Upload:
        upload = self._uploads.get(upload_id)
        if upload is None or upload.owner != (tenant_id, program_id):
            raise UploadNotFound
        return upload

    async def _drop(self, upload_id: str) -> None:
        upload = self._uploads.pop(upload_id, None)
        if upload is not None:
            await in_thread(upload.path.unlink, True)

    def _snapshots(self, tenant_id: TenantId, program_id: ProgramId) -> Path:
        return self._workspaces.snapshots / self._workspaces.path(tenant_id, program_id).name


def _append(path: Path, piece: bytes) -> None:
    with path.open("ab") as file:
        file.write(piece)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)
