"""The part of a tool actor that moves workspaces in and out. Ray Serve calls these methods by name."""

from __future__ import annotations

from collections.abc import AsyncIterator

from agent_program.ids import DEFAULT_TENANT, ProgramId, TenantId
from tool_runtime.workspace_content import WorkspaceContent
from tool_runtime.workspace_transfers import WorkspaceTransfers


class WorkspaceCalls:
    """Export, import, snapshot and restore of a program's workspace. All raise SandboxUnavailable where no sandbox holds."""

    async def _workspace_transfers(self) -> WorkspaceTransfers:
        raise NotImplementedError

    async def export_workspace(
        self, program_id: ProgramId, *, tenant_id: TenantId = DEFAULT_TENANT
    ) -> AsyncIterator[bytes]:
        """The workspace as an uncompressed pax tar, in pieces of at most 256 KiB. Calls may run meanwhile.

        Sockets, fifos and devices are left out, a file with several names is there once for each, owners are not told.

        Raises:
            WorkspaceNotFound: before the first piece.
            WorkspaceTooLarge: meanwhile; what was given out is then not an archive.
        """
        async for piece in (await self._workspace_transfers()).export(tenant_id, program_id):
            yield piece

    async def import_workspace(
        self,
        program_id: ProgramId,
        archive: AsyncIterator[bytes] | bytes,
        *,
        tenant_id: TenantId = DEFAULT_TENANT,
    ) -> WorkspaceContent:
        """Replace the workspace by the content of a tar, gzip-compressed or not; a refused archive changes nothing.

        The program's sandbox is closed; its next call starts another and is told what was lost.

        Raises:
            ArchiveRefused: it asks for something that it may not have; the message names the entry and the reason.
            WorkspaceTooLarge: it unpacks to more than a workspace may hold.
            WorkspaceBusy: calls of the program are under way.
        """
        return await (await self._workspace_transfers()).take(tenant_id, program_id, archive)

    async def begin_import(self, program_id: ProgramId, *, tenant_id: TenantId = DEFAULT_TENANT) -> str:
        """`import_workspace` in steps, for those who can't hand over an iterator. Returns an upload's id.

        Raises:
            Overloaded: too many uploads are under way.
        """
        return await (await self._workspace_transfers()).begin(tenant_id, program_id)

    async def append_import(
        self, program_id: ProgramId, upload_id: str, piece: bytes, *, tenant_id: TenantId = DEFAULT_TENANT
    ) -> int:
        """Add to an upload; returns its bytes so far. One of which nothing comes for a minute is given up.

        Raises:
            UploadNotFound: it was never begun, is finished, or was given up.
            WorkspaceTooLarge: it is larger than any archive of a workspace.
        """
        return await (await self._workspace_transfers()).append(tenant_id, program_id, upload_id, piece)

    async def commit_import(
        self, program_id: ProgramId, upload_id: str, *, tenant_id: TenantId = DEFAULT_TENANT
    ) -> WorkspaceContent:
        """Make an upload the workspace. Raises what `import_workspace` raises, and UploadNotFound."""
        return await (await self._workspace_transfers()).commit(tenant_id, program_id, upload_id)

    async def snapshot_workspace(self, program_id: ProgramId, *, tenant_id: TenantId = DEFAULT_TENANT) -> str:
        """Keep the workspace as it is under the id that is returned, until the workspace is deleted or there are too many.

        Raises:
            WorkspaceNotFound, WorkspaceTooLarge.
            WorkspaceBusy: calls of the program are under way.
        """
        return await (await self._workspace_transfers()).snapshot(tenant_id, program_id)

    async def restore_workspace(
        self, program_id: ProgramId, snapshot_id: str, *, tenant_id: TenantId = DEFAULT_TENANT
    ) -> WorkspaceContent:
        """Make the workspace what it was at a snapshot. The sandbox is closed, as by `import_workspace`.

        Raises:
            SnapshotNotFound: the program has none of this id.
            WorkspaceBusy: calls of the program are under way.
        """
        return await (await self._workspace_transfers()).restore(tenant_id, program_id, snapshot_id)
