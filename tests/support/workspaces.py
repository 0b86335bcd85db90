"""Workspaces in memory: what the API's tests read from and write to. An archive here is any bytes; nothing is unpacked."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from agent_program.ids import ProgramId, TenantId
from tool_runtime.workspace_content import WorkspaceContent
from tool_runtime.workspace_errors import ArchiveRefused, SnapshotNotFound, WorkspaceNotFound, WorkspaceTooLarge

Owner = tuple[TenantId, ProgramId]


class MemoryWorkspaces:
    """`WorkspaceClient` over dictionaries."""

    def __init__(self) -> None:
        self.files: dict[Owner, bytes] = {}
        self.snapshots: dict[tuple[Owner, str], bytes] = {}
        self.piece_sizes: list[int] = []
        #: Readings that were ended, whole or not.
        self.readings_ended = 0
        #: A reading breaks off after its first piece.
        self.breaks_off = False
        self._uploads: dict[str, bytes] = {}

    @asynccontextmanager
    async def read(self, program_id: ProgramId, tenant_id: TenantId) -> AsyncIterator[AsyncIterator[bytes]]:
        async def pieces() -> AsyncIterator[bytes]:
            whole = self._found(program_id, tenant_id)
            yield whole[:3]
            if self.breaks_off:
                raise WorkspaceTooLarge
            yield whole[3:]

        try:
            yield pieces()
        finally:
            self.readings_ended += 1

    async def begin(self, program_id: ProgramId, tenant_id: TenantId) -> str:
        upload_id = f"upload-{len(self._uploads)}"
        self._uploads[upload_id] = b""
        return upload_id

    async def append(self, program_id: ProgramId, tenant_id: TenantId, upload_id: str, piece: bytes) -> None:
        self.piece_sizes.append(len(piece))
        self._uploads[upload_id] += piece

    async def commit(self, program_id: ProgramId, tenant_id: TenantId, upload_id: str) -> WorkspaceContent:
        whole = self._uploads.pop(upload_id)
        if whole.startswith(b"not a tar"):
            raise ArchiveRefused("not a tar")
        self.files[tenant_id, program_id] = whole
        return WorkspaceContent(entries=1, bytes=len(whole))

    async def snapshot(self, program_id: ProgramId, tenant_id: TenantId) -> str:
        snapshot_id = f"{len(self.snapshots):032x}"
        self.snapshots[(tenant_id, program_id), snapshot_id] = self._found(program_id, tenant_id)
        return snapshot_id

    async def restore(self, program_id: ProgramId, tenant_id: TenantId, snapshot_id: str) -> WorkspaceContent:
        owner = (tenant_id, program_id)
        if (owner, snapshot_id) not in self.snapshots:
            raise SnapshotNotFound
        self.files[owner] = self.snapshots[owner, snapshot_id]
        return WorkspaceContent(entries=1, bytes=len(self.files[owner]))

    def _found(self, program_id: ProgramId, tenant_id: TenantId) -> bytes:
        if (tenant_id, program_id) not in self.files:
            raise WorkspaceNotFound
        return self.files[tenant_id, program_id]
